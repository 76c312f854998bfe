"""Compare stream tables with their queries in one snapshot, in PostgreSQL."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import IsolationLevel, sql

from pgtrickle.api.database import Database


def differences(database: Database, dsn: str) -> dict[str, int]:
    """The number of missing and unexpected rows of each stream table, counting duplicates."""
    with psycopg.connect(dsn) as conn:
        conn.isolation_level = IsolationLevel.REPEATABLE_READ
        conn.read_only = True
        return {row.label: _difference(conn, row.pgt_id, row.relid) for row in database.engine.rows()}


def _difference(conn: psycopg.Connection[Any], id_: int, relid: int) -> int:
    view = sql.Identifier("pgtrickle_views", f"q_{id_}")
    names = conn.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped"
        " AND attname <> '__pgt_row_id' ORDER BY attnum",
        (relid,),
    ).fetchall()
    table = conn.execute(
        "SELECT n.nspname, c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE c.oid = %s",
        (relid,),
    ).fetchone()
    assert table is not None
    stored = sql.SQL("SELECT {} FROM {}").format(
        sql.SQL(", ").join(sql.Identifier(name) for (name,) in names), sql.Identifier(*table)
    )
    query = sql.SQL(
        "SELECT count(*) FROM ((TABLE {view} EXCEPT ALL {stored}) UNION ALL ({stored} EXCEPT ALL TABLE {view})) AS d"
    )
    row = conn.execute(query.format(view=view, stored=stored)).fetchone()
    assert row is not None
    return int(row[0])
