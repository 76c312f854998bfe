"""Transactions: settings, timeouts, and snapshots that other connections can use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import sql

CUT_LOCK_TIMEOUT = "5s"
# If many stream tables wait until all locks are taken, no single lock may hold them up for long.
SHARED_LOCK_TIMEOUT = "250ms"
HURRIED_LOCK_TIMEOUT = "50ms"  # while transactions of a whole Citus cluster wait
STATEMENT_TIMEOUT = "10min"
ROW_LOCK_TIMEOUT = "10s"  # for catalog rows, which their owners can lock
# JIT compilation takes seconds for statements that run for milliseconds: the planner overestimates changes and lookups,
# as it does every `generate_series(1, w)`.
NO_JIT = {"jit": "off"}
# For a transaction that reads in the snapshot of a cut, while another one holds the cut's locks.
READ_SETTINGS = {"lock_timeout": SHARED_LOCK_TIMEOUT, "statement_timeout": STATEMENT_TIMEOUT} | NO_JIT


def limit_cut(conn: psycopg.Connection[Any], lock_timeout: str) -> None:
    """Make the settings of a cut, in one round trip and before its snapshot: only utility commands."""
    settings = {"lock_timeout": lock_timeout, "statement_timeout": STATEMENT_TIMEOUT} | NO_JIT
    # The transaction is idle while Spark computes for a group and while executors read.
    settings["idle_in_transaction_session_timeout"] = "0"
    commands = [
        sql.SQL("SET LOCAL {} = {}").format(sql.Identifier(name), sql.Literal(value))
        for name, value in settings.items()
    ]
    conn.execute(sql.SQL("; ").join(commands))


def export(conn: psycopg.Connection[Any]) -> str:
    """Export the snapshot; return the name by which other connections can use it until the transaction ends."""
    row = conn.execute("SELECT pg_export_snapshot()").fetchone()
    assert row is not None
    return str(row[0])


def set_local(conn: psycopg.Connection[Any], settings: Mapping[str, str]) -> None:
    """Make settings for the rest of the transaction."""
    if settings:
        calls = sql.SQL(", ").join(
            sql.SQL("set_config({}, {}, true)").format(sql.Literal(name), sql.Literal(value))
            for name, value in settings.items()
        )
        conn.execute(sql.SQL("SELECT ") + calls)
