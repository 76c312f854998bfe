"""The cut: one snapshot of a database, with locks that keep its tables what they were.

The locks come first, then the snapshot. A table that is truncated or rewritten between the two would read empty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from pgtrickle.catalog.analysis import load_query
from pgtrickle.errors import RefreshError
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.postgres.transactions import (
    CUT_LOCK_TIMEOUT,
    HURRIED_LOCK_TIMEOUT,
    SHARED_LOCK_TIMEOUT,
    STATEMENT_TIMEOUT,
)
from pgtrickle.sites.citus.shards import Shards, shards_here

if TYPE_CHECKING:
    from pgtrickle.sites.remote.cut import RemoteCut


@dataclass(frozen=True)
class Cut:
    """One consistent state of a database."""

    conn: psycopg.Connection[Any]
    node: str
    snapshot: Snapshot
    time: datetime
    locked: Mapping[
        str, Exception | None
    ]  # views that could not be locked: not to be read; None where another session has them
    merge_mb: str  # memory for sorts and hashes of an apply
    writes: bool = False  # in the same transaction: what it writes nobody else sees
    others: Mapping[str, RemoteCut] = field(default_factory=dict)  # of other databases, by their names
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
    """Lock what the views of pgtrickle_views read, take the snapshot, and hold both until the block ends.

    A lock on a view locks the tables behind it, with the rights of the view's owner. Who truncates or alters a distributed
    table locks it on the coordinator, before its shards there.
    """
    # Rolled back where nothing is written: what an owner's code left in the session goes with it.
    with conn.transaction(force_rollback=not writes):
        # Commands, no queries: the first query takes the snapshot, and the locks must be there before.
        mode = "READ WRITE" if writes else "READ ONLY"
        conn.execute(sql.SQL("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, {}").format(sql.SQL(mode)))
        timeout = HURRIED_LOCK_TIMEOUT if hurried else CUT_LOCK_TIMEOUT if len(views) == 1 else SHARED_LOCK_TIMEOUT
        conn.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(timeout)))
        conn.execute(sql.SQL("SET LOCAL statement_timeout = {}").format(sql.Literal(STATEMENT_TIMEOUT)))
        # While Spark computes for a group, or executors read, there is nothing to say to the server.
        conn.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        locked = _lock(conn, views)
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
            locked,
            row["merge_mb"],
            writes,
            shards=shards_here(conn, spread),
        )


def _lock(conn: psycopg.Connection[Any], views: Sequence[str]) -> dict[str, Exception | None]:
    """Lock the views; gives back those that cannot be locked, and why if it is not that somebody else has them.

    A view is its owner's, who can drop or alter it: that concerns nobody else.
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
    locked: dict[str, Exception | None] = {}
    for view in views:
        try:
            with conn.transaction():
                _lock_all(conn, [view], "NOWAIT")
        except psycopg.errors.LockNotAvailable:
            locked[view] = None
        except psycopg.Error as error:
            if conn.broken or conn.closed:
                raise
            locked[view] = error
    return locked


def _lock_all(conn: psycopg.Connection[Any], views: Sequence[str], wait: str = "") -> None:
    names = sql.SQL(", ").join(sql.Identifier("pgtrickle_views", name) for name in views)
    conn.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE {}").format(names, sql.SQL(wait)))
