"""Transactions: their settings and timeouts, and a snapshot that others can read under."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import sql

CUT_LOCK_TIMEOUT = "5s"
# Where many wait for the locks of all, nobody waits long for one.
SHARED_LOCK_TIMEOUT = "250ms"
HURRIED_LOCK_TIMEOUT = "50ms"  # while transactions of a whole cluster wait
STATEMENT_TIMEOUT = "10min"


def export(conn: psycopg.Connection[Any]) -> str:
    """A name under which other connections can read what a cut reads, while it lasts."""
    row = conn.execute("SELECT pg_export_snapshot()").fetchone()
    assert row is not None
    return str(row[0])


def set_local(conn: psycopg.Connection[Any], settings: Mapping[str, str]) -> None:
    """Settings for the rest of the transaction."""
    if settings:
        calls = sql.SQL(", ").join(
            sql.SQL("set_config({}, {}, true)").format(sql.Literal(name), sql.Literal(value))
            for name, value in settings.items()
        )
        conn.execute(sql.SQL("SELECT ") + calls)
