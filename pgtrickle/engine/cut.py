"""The cut: one snapshot of a database, with locks that keep its tables what they were.

The locks come first, then the snapshot. A table that is truncated or rewritten between the two would read empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from pgtrickle.capture.frontier import Snapshot
from pgtrickle.catalog.analysis import load_query
from pgtrickle.errors import RefreshError

LOCK_TIMEOUT = "5s"
STATEMENT_TIMEOUT = "10min"


@dataclass(frozen=True)
class Cut:
    """One consistent state of a database."""

    conn: psycopg.Connection[Any]
    node: str
    snapshot: Snapshot
    time: datetime

    def export(self) -> str:
        """A name under which other connections can read the same state, while the cut lasts."""
        row = self.conn.execute("SELECT pg_export_snapshot()").fetchone()
        assert row is not None
        return str(row[0])


@contextmanager
def take_cut(conn: psycopg.Connection[Any], views: Sequence[str]) -> Iterator[Cut]:
    """Lock what the views of pgtrickle_views read, take the snapshot, and hold both until the block ends.

    A lock on a view locks the tables behind it, with the rights of the view's owner.
    """
    with conn.transaction():
        # Commands, no queries: the first query takes the snapshot, and the locks must be there before.
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        conn.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(LOCK_TIMEOUT)))
        conn.execute(sql.SQL("SET LOCAL statement_timeout = {}").format(sql.Literal(STATEMENT_TIMEOUT)))
        if views:
            names = sql.SQL(", ").join(sql.Identifier("pgtrickle_views", name) for name in sorted(views))
            try:
                conn.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(names))
            except psycopg.errors.LockNotAvailable as error:
                raise RefreshError(
                    f"a table is locked by another session: {error.diag.message_primary}",
                    f"A refresh waits {LOCK_TIMEOUT} for its sources. It is tried again at the next refresh.",
                ) from error
        with conn.cursor(row_factory=dict_row) as cursor:
            row = cursor.execute(load_query("cut")).fetchone()
        assert row is not None
        if row["in_recovery"]:
            raise RefreshError("this server is a standby", "Connect to the primary: a refresh writes.")
        yield Cut(conn, row["node"], Snapshot.parse(row["snapshot"]), row["cut_time"])


def set_local(conn: psycopg.Connection[Any], settings: dict[str, str]) -> None:
    """Settings for the rest of the transaction."""
    if settings:
        calls = sql.SQL(", ").join(
            sql.SQL("set_config({}, {}, true)").format(sql.Literal(name), sql.Literal(value))
            for name, value in settings.items()
        )
        conn.execute(sql.SQL("SELECT ") + calls)
