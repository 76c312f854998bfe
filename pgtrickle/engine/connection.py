"""Connections like one that is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg


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
    return psycopg.connect(conn.info.dsn, password=conn.info.password or None, autocommit=True)
