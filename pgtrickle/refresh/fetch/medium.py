"""Media: where fetched rows are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from pgtrickle.compile.shared_scan import Slice
from pgtrickle.postgres import copying
from pgtrickle.query.plan import Plan, Version, scans_of
from pgtrickle.refresh.fetch.helper_process import HelperProcesses, Order
from pgtrickle.refresh.fetch.reader import Reader

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """A fragment to read. Its statement reads all of it, or the part that a condition or a query for shards selects."""

    plan: Plan
    schema: pa.Schema
    statement: Callable[[sql.Composable | None, sql.Composable | None], sql.Composable]
    reader: Reader


class Medium(Protocol[T]):
    """Where fetched rows are kept: in the driver's memory, or on Spark's executors."""

    def empty(self, schema: pa.Schema) -> T: ...
    def read(self, request: Request) -> T: ...
    def consolidated(self, rows: T) -> T: ...
    def count(self, rows: T) -> int: ...
    def values(self, columns: Sequence[tuple[T, str]]) -> pa.Array:
        """The distinct values of these columns, including NULL if there is one."""
        ...


@dataclass(frozen=True)
class Part:
    """The slice of a shared read that makes up one fragment's rows."""

    whole: pa.Table  # consolidated
    slice: Slice


@dataclass(frozen=True)
class HelperRead:
    """Reads the changes of tables that have many of them in a helper process."""

    helpers: HelperProcesses
    exported: str  # the cut's snapshot
    many: frozenset[int]  # OIDs of the tables with many changes

    def read(self, medium: InMemory, request: Request, statement: str) -> pa.Table | None:
        """The rows; None if the caller has to read them."""
        scans = scans_of(request.plan)
        if request.reader.database or not any(
            s.version is Version.DELTA and s.relation.oid in self.many for s in scans
        ):
            return None
        info = medium.conn.info
        room = copying.room(medium.conn, copying.MOST_BYTES)
        order = Order(info.dsn, info.password or None, self.exported, medium.settings, statement, request.schema, room)
        rows = self.helpers.read(order)
        if rows is not None:
            copying.hold(medium.conn, rows)
        return rows


@dataclass
class InMemory:
    """Rows as Arrow tables in the driver. What several stream tables read in one cut is read once."""

    conn: psycopg.Connection[Any]
    statements: list[str]  # that were sent
    settings: Mapping[str, str] = field(default_factory=dict)
    helpers: HelperRead | None = None  # set if tables have many changes
    _rows: dict[tuple[str, str], pa.Table] = field(default_factory=dict)  # by database and statement
    _net: dict[int, pa.Table] = field(default_factory=dict)  # consolidated, by the identity of the rows
    _parts: dict[int, Part] = field(default_factory=dict)  # by the identity of the rows, consolidated or not

    def part_of(self, rows: pa.Table) -> Part | None:
        """The shared read that these rows are a part of, if any."""
        return self._parts.get(id(rows))

    def cut_out(self, whole: pa.Table, slice_: Slice) -> pa.Table:
        """One fragment's rows of a shared read."""
        mine = whole.filter(whole.column(slice_.flag)) if slice_.flag is not None else whole
        rows = mine.select([*slice_.columns.values(), "w"]).rename_columns([*slice_.columns, "w"])
        self._parts[id(rows)] = Part(self.consolidated(whole), slice_)
        return rows

    def empty(self, schema: pa.Schema) -> pa.Table:
        return schema.empty_table()

    def read(self, request: Request) -> pa.Table:
        statement = request.statement(None, None)
        shown = statement.as_string(self.conn)
        key = (request.reader.database, shown)
        if key not in self._rows:
            self.statements.append(shown)
            rows = self.helpers.read(self, request, shown) if self.helpers is not None else None
            self._rows[key] = rows if rows is not None else request.reader.copy_out(statement, request.schema)
        return self._rows[key]

    def consolidated(self, rows: pa.Table) -> pa.Table:
        if id(rows) not in self._net:
            net = self._net[id(rows)] = consolidate(rows)
            if id(rows) in self._parts:
                self._parts[id(net)] = self._parts[id(rows)]
        return self._net[id(rows)]

    def count(self, rows: pa.Table) -> int:
        return int(rows.num_rows)

    def values(self, columns: Sequence[tuple[pa.Table, str]]) -> pa.Array:
        chunks = [rows.column(name).combine_chunks().cast(pa.string()) for rows, name in columns]
        return pc.unique(pa.concat_arrays(chunks))


def consolidate(table: pa.Table) -> pa.Table:
    """Merge equal rows, with the sum of their weights, and remove rows that cancel out."""
    names = [name for name in table.schema.names if name != "w"]
    if table.num_rows == 0:
        return table
    if names:
        grouped = table.group_by(names, use_threads=False).aggregate([("w", "sum")])
        table = grouped.rename_columns([*names, "w"]) if grouped.schema.names[-1] == "w_sum" else grouped
    else:
        table = pa.table({"w": [pc.sum(table.column("w")).as_py()]})
    return table.filter(pc.not_equal(table.column("w"), 0)).select([*names, "w"])
