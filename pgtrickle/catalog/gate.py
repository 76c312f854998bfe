"""The gate of the catalog: requests that every role can make, authorized by PostgreSQL (see sql/common/gate.sql)."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.types.json import Jsonb


def pass_gate(conn: psycopg.Connection[Any], action: str, **arguments: Any) -> Any:
    """Pass a request through the gate and return the result."""
    row = conn.execute("SELECT pgtrickle._gate(%s, %s)", (action, Jsonb(arguments))).fetchone()
    assert row is not None
    return row[0]


def is_administrator(conn: psycopg.Connection[Any]) -> bool:
    """Whether the connection's role has the rights of administrators and the service."""
    return conn.execute("SELECT pgtrickle._is_administrator()").fetchone() == (True,)


def require_administrator(conn: psycopg.Connection[Any], action: str) -> None:
    """Raise a clear error unless `is_administrator()` is true."""
    conn.execute("SELECT pgtrickle._require_administrator(%s)", (action,))
