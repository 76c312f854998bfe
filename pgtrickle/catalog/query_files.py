"""The queries of the service itself, one per file in `queries/`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from psycopg import sql

_QUERIES = files("pgtrickle.catalog") / "queries"


@cache
def load_query(name: str) -> sql.SQL:
    """One of the queries. It is read only once, so that a running service keeps the same text."""
    return sql.SQL((_QUERIES / f"{name}.sql").read_text(encoding="utf-8"))
