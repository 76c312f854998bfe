"""The tables that one Spark text reads: as few as possible, because each has the same cost, however few its rows."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pgtrickle.postgres.formats import spark_types
from pgtrickle.query.plan import Fragment
from pgtrickle.refresh.compute.shared_text import Input, Sharers

# A few small tables are passed to Spark as one. Selecting one of them scans the rows of all, so not many or large ones.
_BUNDLED_TABLES = 4
_BUNDLED_ROWS = 10_000
_COMPARED_ROWS = 1_000
_LOCAL_ROWS = 4_000
_LOCAL_BYTES = "spark.sql.execution.arrow.localRelationThreshold"
# Spark shuffles rows unless it knows that they are in one partition.
_SELECT = "SELECT /*+ COALESCE(1) */"


class Relations:
    """The tables for the fragments of some jobs, and queries for the rows of each fragment."""

    def __init__(self, sharers: Sequence[Sharers], prefix: str) -> None:
        self._prefix = prefix  # of the tables' names in Spark
        jobs = [item for some in sharers for item in some.jobs.values()]
        self._together = len(jobs) > 1 or any(some.share for some in sharers)
        tables = [table for item in jobs for table in item.tables.values() if table.num_rows]
        rows = sum(table.num_rows for table in tables)
        self._bundled = not self._together and 1 < len(tables) <= _BUNDLED_TABLES and rows <= _BUNDLED_ROWS
        self._tables: dict[int | bytes, tuple[int, pa.Table]] = {}  # by identity or content

    def rows(self, item: Input, fragment: Fragment) -> str | None:
        """A query for a fragment's rows; None if there are none."""
        table, part = item.tables[fragment], item.parts.get(fragment)
        if table.num_rows == 0:
            return None
        if self._bundled:
            typed = enumerate(spark_types(table.schema))
            items = ", ".join(f"CAST(s{i} AS {type_}) AS {name}" for i, (name, type_) in typed)
            return f"{_SELECT} {items} FROM {self._prefix}_rows WHERE t = {self._number(table)}"
        if part is None or not self._together:
            items = ", ".join(f"s{i} AS {name}" for i, name in enumerate(table.schema.names))
            return f"{_SELECT} {items} FROM {self._prefix}_{self._number(table)}"
        position = {name: f"s{i}" for i, name in enumerate(part.whole.schema.names)}
        items = ", ".join(f"{position[column]} AS {name}" for name, column in [*part.slice.columns.items(), ("w", "w")])
        where = f" WHERE {position[part.slice.flag]}" if part.slice.flag is not None else ""
        rows = f"{_SELECT} {items} FROM {self._prefix}_{self._number(part.whole)}{where}"
        if not item.job.adds_up and part.slice.columns:
            # Rows may be equal in these columns only, and nothing above sums them.
            names = ", ".join(part.slice.columns)
            return f"SELECT {names}, sum(w) AS w FROM ({rows}) GROUP BY {names} HAVING sum(w) <> 0"
        return rows

    def shared_rows(self, sharers: Sharers, fragment: Fragment) -> str | None:
        """A query for a fragment's rows of all jobs that share a text; None if there are none."""
        if sharers.first[1].tables[fragment].num_rows == 0:
            return None
        table = sharers.rows(fragment)
        items = ", ".join(f"s{i} AS {name}" for i, name in enumerate(table.schema.names))
        return f"{_SELECT} {items} FROM {self._prefix}_{self._number(table)}"

    def create(self, spark: SparkSession) -> None:
        """Create the tables in Spark, as temporary views."""
        tables = list(self._tables.values())
        if not self._bundled:
            for number, table in tables:
                numbered = table.rename_columns([f"s{i}" for i in range(table.num_columns)])
                _frame(spark, numbered).createOrReplaceTempView(f"{self._prefix}_{number}")
        elif tables:
            width = max(table.num_columns for _, table in tables)
            rows = pa.concat_tables([_as_strings(number, table, width) for number, table in tables])
            _frame(spark, rows).createOrReplaceTempView(f"{self._prefix}_rows")

    def _number(self, table: pa.Table) -> int:
        """The number of a table. Small tables with equal rows, which many lookups return, have the same number."""
        key = id(table) if table.num_rows > _COMPARED_ROWS else _content(table)
        return self._tables.setdefault(key, (len(self._tables), table))[0]


def _frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    """A DataFrame of the table: few rows as a local relation, which is cheap to plan, more as Arrow batches.

    Spark's optimizer converts each row of a local relation to objects, again for every projection.
    """
    if table.num_rows <= _LOCAL_ROWS:
        return spark.createDataFrame(table)
    spark.conf.set(_LOCAL_BYTES, "0")
    try:
        return spark.createDataFrame(table)
    finally:
        spark.conf.unset(_LOCAL_BYTES)


def _content(table: pa.Table) -> bytes:
    """The table's rows and types, without its column names, as bytes to compare."""
    unnamed = table.rename_columns([f"s{i}" for i in range(table.num_columns)]).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, unnamed.schema) as writer:
        writer.write_table(unnamed)
    return bytes(sink.getvalue())


def _as_strings(number: int, table: pa.Table, width: int) -> pa.Table:
    columns = [pa.array([number] * table.num_rows, pa.int32()), *(column.cast(pa.string()) for column in table.columns)]
    columns += [pa.nulls(table.num_rows, pa.string())] * (width - table.num_columns)
    return pa.table(columns, names=["t", *(f"s{i}" for i in range(width))])
