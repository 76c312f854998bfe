"""Bringing a delta into PostgreSQL: as one parameter, through a temporary table, or from where executors put it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import psycopg
import pyarrow as pa
from psycopg import sql
from pyarrow import csv

from pgtrickle.postgres.formats import WRITE

# Up to here a delta is a parameter and the refresh leaves no trace in PostgreSQL's catalogs.
PARAMETER_ROWS = 10_000


_STAGE = "pg_temp.pgt_delta"


@dataclass(frozen=True)
class Staged:
    """A delta that executors wrote to a table of its own. Rows of attempts that are not listed as done do not count."""

    table: str  # in pgtrickle_views

    @property
    def path(self) -> tuple[str, str]:
        return "pgtrickle_views", self.table

    @property
    def relation(self) -> str:
        table = f'pgtrickle_views."{self.table}"'
        return f"(SELECT * FROM {table} WHERE attempt IN (SELECT w FROM {table} WHERE attempt = 'done')) AS staged"

    def allow(self, conn: psycopg.Connection[Any], owner: str | None) -> None:
        """Let the role that applies read it."""
        if owner is not None:
            table = sql.Identifier(*self.path)
            conn.execute(sql.SQL("GRANT SELECT ON {} TO {}").format(table, sql.Identifier(owner)))

    def create(self, conn: psycopg.Connection[Any], columns: Sequence[str]) -> None:
        """Make the table. What a process that died left behind under the stream table's earlier claims goes."""
        left = conn.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'pgtrickle_views'::regnamespace AND relkind = 'r'"
            " AND relowner = quote_ident(current_user)::regrole AND relname ^@ %s",
            (self.table.rpartition("_")[0] + "_",),
        ).fetchall()
        for (name,) in left:
            Staged(name).drop(conn)
        fields = sql.SQL(", ").join(sql.SQL("{} text").format(sql.Identifier(name)) for name in ("attempt", *columns))
        conn.execute(sql.SQL("CREATE UNLOGGED TABLE {} ({})").format(sql.Identifier(*self.path), fields))

    def drop(self, conn: psycopg.Connection[Any]) -> None:
        conn.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(*self.path)))


Delta: TypeAlias = pa.Table | Staged


@dataclass(frozen=True)
class Load:
    """A delta as the apply statement reads it: the arrays of its parameter, or a relation."""

    arrays: list[str]
    relation: str | None


def load(conn: psycopg.Connection[Any], delta: Delta | None, owner: str | None) -> Load:
    """Bring a delta to where the statement finds it; `owner` is the role that applies, if another."""
    if delta is None:
        return Load([], None)
    if isinstance(delta, Staged):
        delta.allow(conn, owner)
        return Load([], delta.relation)
    if delta.num_rows > PARAMETER_ROWS:
        _stage(conn, delta, owner)
        return Load([], _STAGE)
    return Load(as_arrays(delta), None)


def as_arrays(delta: pa.Table) -> list[str]:
    """Each column as the text of a PostgreSQL array."""
    return [_array(column.cast(pa.string()).to_pylist()) for column in delta.columns]


def _array(values: list[str | None]) -> str:
    quoted = (
        "NULL" if value is None else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for value in values
    )
    return "{" + ",".join(quoted) + "}"


def _stage(conn: psycopg.Connection[Any], delta: pa.Table, owner: str | None) -> None:
    """Load the delta into the temporary table that the apply statement reads."""
    columns = sql.SQL(", ").join(sql.SQL("{} text").format(sql.Identifier(name)) for name in delta.schema.names)
    table = sql.SQL(_STAGE)
    conn.execute(sql.SQL("CREATE TEMP TABLE pgt_delta ({}) ON COMMIT DROP").format(columns))
    if owner is not None:
        conn.execute(sql.SQL("GRANT SELECT ON {} TO {}").format(table, sql.Identifier(owner)))
    with conn.cursor() as cursor, cursor.copy(sql.SQL("COPY {} FROM STDIN (FORMAT csv)").format(table)) as copy:
        for batch in delta.to_batches(max_chunksize=65_536):
            buffer = io.BytesIO()
            csv.write_csv(pa.Table.from_batches([batch]), buffer, WRITE)
            copy.write(buffer.getvalue())
    # The number of rows is known without it; a small sample tells how many keys there are.
    conn.execute("SET LOCAL default_statistics_target = 5")
    conn.execute(sql.SQL("ANALYZE {}").format(table))
