"""The cut: one snapshot of a database, with locks that keep its tables from being altered.

The locks are taken before the snapshot. Otherwise, a table that is truncated or rewritten between the two would appear
empty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from pgtrickle.catalog.query_files import load_query
from pgtrickle.errors import RefreshError
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.postgres.transactions import (
    CUT_LOCK_TIMEOUT,
    HURRIED_LOCK_TIMEOUT,
    SHARED_LOCK_TIMEOUT,
    limit_cut,
)
from pgtrickle.sites.citus.shards import Shards, shards_here
from pgtrickle.sites.remote.cut import RemoteCut
from pgtrickle.sites.stream_tables import RemoteReading


@dataclass(frozen=True)
class Cut:
    """One consistent snapshot of a database."""

    conn: psycopg.Connection[Any]
    node: str
    snapshot: Snapshot
    time: datetime
    # Views that could not be locked and so must not be read; None if another session holds a conflicting lock.
    unavailable: Mapping[str, Exception | None]
    merge_mb: str  # memory for sorts and hashes of an apply
    writes: bool = False  # the cut's transaction also writes, which other connections do not see
    others: Mapping[str, RemoteCut] = field(default_factory=dict)  # cuts of remote databases, by name
    readings: Mapping[int, RemoteReading] = field(default_factory=dict)  # what each stream table reads in them, by id
    shards: Mapping[int, Shards] = field(default_factory=dict)  # of a coordinator, by distributed table


@contextmanager
def take_cut(
    conn: psycopg.Connection[Any],
    views: Sequence[str],
    spread: Collection[int] = (),
    *,
    writes: bool = False,
    hurried: bool = False,
) -> Iterator[Cut]:
    """Lock the sources of views in pgtrickle_views, take the snapshot, and hold both until the block ends.

    A lock on a view also locks the tables behind it, with the rights of the view's owner. For distributed tables, the
    lock on the coordinator's table is enough: TRUNCATE and ALTER lock that before its shards there.
    """
    # Rolled back if nothing is written, which also removes what an owner's code has left in the session.
    with conn.transaction(force_rollback=not writes):
        # Only utility commands until the locks are held: the first query takes the snapshot.
        mode = "READ WRITE" if writes else "READ ONLY"
        conn.execute(sql.SQL("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, {}").format(sql.SQL(mode)))
        timeout = HURRIED_LOCK_TIMEOUT if hurried else CUT_LOCK_TIMEOUT if len(views) == 1 else SHARED_LOCK_TIMEOUT
        limit_cut(conn, timeout)
        unavailable = _lock(conn, views)
        with conn.cursor(row_factory=dict_row) as cursor:
            row = cursor.execute(load_query("cut"), {"lock_timeout": CUT_LOCK_TIMEOUT}).fetchone()
        assert row is not None
        if row["in_recovery"]:
            raise RefreshError("this server is a standby", "Connect to the primary: a refresh writes.")
        if row["delta_cap_mb"] != "0":
            conn.execute(
                "SELECT set_config('work_mem', %s, true)"
                " WHERE pg_size_bytes(current_setting('work_mem')) > pg_size_bytes(%s)",
                (f"{row['delta_cap_mb']}MB",) * 2,
            )
        yield Cut(
            conn,
            row["node"],
            Snapshot.parse(row["snapshot"]),
            row["cut_time"],
            unavailable,
            row["merge_mb"],
            writes,
            shards=shards_here(conn, spread) if spread else {},
        )


def _lock(conn: psycopg.Connection[Any], views: Sequence[str]) -> dict[str, Exception | None]:
    """Lock the views; return those that cannot be locked, each with the error, or None if another session has a lock.

    A view belongs to its owner, who can drop or alter it. That must not affect other stream tables.
    """
    if not views:
        return {}
    try:
        with conn.transaction():
            _lock_all(conn, sorted(views))
    except psycopg.errors.LockNotAvailable:
        if len(views) == 1:
            return {views[0]: None}
    except psycopg.Error:
        if conn.broken or conn.closed:
            raise
    else:
        return {}
    unavailable: dict[str, Exception | None] = {}
    for view in views:
        try:
            with conn.transaction():
                _lock_all(conn, [view], "NOWAIT")
        except psycopg.errors.LockNotAvailable:
            unavailable[view] = None
        except psycopg.Error as error:
            if conn.broken or conn.closed:
                raise
            unavailable[view] = error
    return unavailable


def _lock_all(conn: psycopg.Connection[Any], views: Sequence[str], wait: str = "") -> None:
    names = sql.SQL(", ").join(sql.Identifier("pgtrickle_views", name) for name in views)
    conn.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE {}").format(names, sql.SQL(wait)))
