"""Connections: opened in one way, whoever stands between us and the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg


def connect(conninfo: str, **parameters: Any) -> psycopg.Connection[Any]:
    """A connection in autocommit. Behind a pooler it keeps nothing on the server that outlives a transaction.

    A pooler is known by another process that answers than the one that greeted us.
    """
    conn = psycopg.connect(conninfo, autocommit=True, **parameters)
    row = conn.execute(
        "SELECT pg_backend_pid(), EXISTS (SELECT FROM pg_extension WHERE extname = 'citus')", prepare=False
    ).fetchone()
    assert row is not None
    if row[0] != conn.info.backend_pid:
        be_pooled(conn)
    elif row[1]:
        conn.execute("SET citus.enable_ddl_propagation = off")  # what we create on a node is that node's
    return conn


def be_pooled(conn: psycopg.Connection[Any]) -> None:
    """From now on, prepare no statements."""
    conn.prepare_threshold = None


def is_pooled(conn: psycopg.Connection[Any]) -> bool:
    """Whether the connection must do without what a transaction-mode pooler takes away."""
    return conn.prepare_threshold is None


@contextmanager
def idle(conn: psycopg.Connection[Any]) -> Iterator[psycopg.Connection[Any]]:
    """The connection, or one like it where an interruption left it in the middle of a statement."""
    if conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        yield conn
        return
    conn.cancel_safe(timeout=5)
    other = another(conn)
    conn.close()
    with other:
        yield other


def another(conn: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """One more connection to the same database as the same role."""
    return connect(conn.info.dsn, password=conn.info.password or None)
