"""Loading a delta into PostgreSQL: as a parameter, through a temporary table, or from a table written by executors."""

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

# Deltas up to this size are passed as a parameter, so that the refresh creates no entries in PostgreSQL's catalogs.
PARAMETER_ROWS = 10_000
PARAMETER_BYTES = 16 << 20


_STAGE = "pg_temp.pgt_delta"


@dataclass(frozen=True)
class Staged:
    """A delta that executors wrote to a table of its own. Only rows of attempts that are listed as done count."""

    table: str  # in pgtrickle_views

    @property
    def path(self) -> tuple[str, str]:
        return "pgtrickle_views", self.table

    @property
    def relation(self) -> str:
        table = f'pgtrickle_views."{self.table}"'
        return f"(SELECT * FROM {table} WHERE attempt IN (SELECT w FROM {table} WHERE attempt = 'done')) AS staged"

    def allow(self, conn: psycopg.Connection[Any], owner: str | None) -> None:
        """Grant the role that applies the delta the right to read it."""
        if owner is not None:
            table = sql.Identifier(*self.path)
            conn.execute(sql.SQL("GRANT SELECT ON {} TO {}").format(table, sql.Identifier(owner)))

    def create(self, conn: psycopg.Connection[Any], columns: Sequence[str]) -> None:
        """Create the table. Tables that processes left when they died under earlier claims are dropped."""
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
    """A loaded delta as the apply statement reads it: arrays for its parameter, or a relation."""

    arrays: list[str]
    relation: str | None


def load(conn: psycopg.Connection[Any], delta: Delta | None, owner: str | None) -> Load:
    """Load a delta for the apply statement; `owner` is the role that runs it, if that is not the current one."""
    if delta is None:
        return Load([], None)
    if isinstance(delta, Staged):
        delta.allow(conn, owner)
        return Load([], delta.relation)
    if delta.num_rows > PARAMETER_ROWS or delta.nbytes > PARAMETER_BYTES:
        _stage(conn, delta, owner)
        return Load([], _STAGE)
    return Load(as_arrays(delta), None)


def as_arrays(delta: pa.Table) -> list[str]:
    """The columns, each as the text of a PostgreSQL array."""
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
    # The planner knows the number of rows without ANALYZE; a small sample is enough for the number of distinct keys.
    conn.execute("SET LOCAL default_statistics_target = 5")
    conn.execute(sql.SQL("ANALYZE {}").format(table))
