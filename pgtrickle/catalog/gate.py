"""The gate of the catalog: what any role may have done, if PostgreSQL finds that it may (see 45_gate.sql)."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.types.json import Jsonb


def pass_gate(conn: psycopg.Connection[Any], action: str, **arguments: Any) -> Any:
    """Have the catalog do something; gives its answer."""
    row = conn.execute("SELECT pgtrickle._gate(%s, %s)", (action, Jsonb(arguments))).fetchone()
    assert row is not None
    return row[0]


def is_administrator(conn: psycopg.Connection[Any]) -> bool:
    """Whether the connection's role may do what only administrators and the service may."""
    return conn.execute("SELECT pgtrickle._is_administrator()").fetchone() == (True,)


def require_administrator(conn: psycopg.Connection[Any], action: str) -> None:
    """A clear error for those who may not."""
    conn.execute("SELECT pgtrickle._require_administrator(%s)", (action,))
