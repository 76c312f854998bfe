"""Bringing a delta into PostgreSQL: small ones as one parameter, large ones through a temporary table."""

from __future__ import annotations

import io
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from pyarrow import csv

from pgtrickle.compile.apply import STAGE

# Up to here a delta is a parameter and the refresh leaves no trace in PostgreSQL's catalogs.
PARAMETER_ROWS = 10_000


def is_staged(delta: pa.Table) -> bool:
    return bool(delta.num_rows > PARAMETER_ROWS)


def as_arrays(delta: pa.Table) -> list[str]:
    """Each column as the text of a PostgreSQL array."""
    return [_array(column.cast(pa.string()).to_pylist()) for column in delta.columns]


def _array(values: list[str | None]) -> str:
    quoted = (
        "NULL" if value is None else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for value in values
    )
    return "{" + ",".join(quoted) + "}"


def stage(conn: psycopg.Connection[Any], delta: pa.Table, owner: str | None) -> None:
    """Load the delta into the temporary table that the apply statement reads."""
    columns = sql.SQL(", ").join(sql.SQL("{} text").format(sql.Identifier(name)) for name in delta.schema.names)
    table = sql.SQL(STAGE)
    conn.execute(sql.SQL("CREATE TEMP TABLE pgt_delta ({}) ON COMMIT DROP").format(columns))
    if owner is not None:
        conn.execute(sql.SQL("GRANT SELECT ON {} TO {}").format(table, sql.Identifier(owner)))
    options = csv.WriteOptions(include_header=False, quoting_style="all_valid")
    with conn.cursor() as cursor, cursor.copy(sql.SQL("COPY {} FROM STDIN (FORMAT csv)").format(table)) as copy:
        for batch in delta.to_batches(max_chunksize=65_536):
            buffer = io.BytesIO()
            csv.write_csv(pa.Table.from_batches([batch]), buffer, write_options=options)
            copy.write(buffer.getvalue())
    conn.execute(sql.SQL("ANALYZE {}").format(table))
