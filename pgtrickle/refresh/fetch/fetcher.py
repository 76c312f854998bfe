"""Reading fragments from PostgreSQL into Arrow, in the snapshot of the cut.

Rows leave the server as CSV by COPY and are parsed by Arrow's reader, without a Python object per value. Changes are
consolidated on arrival: what cancels out is never seen by Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from pgtrickle.compile.postgres import CHANGES_SCHEMA, compile_fragment, form_name, form_type
from pgtrickle.compile.shared_scan import Slice
from pgtrickle.compile.sql_text import CHANGES, PART, SHARDS, SqlText
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.frontier.window import since
from pgtrickle.ivm.key_bounds import is_chain
from pgtrickle.postgres import copying
from pgtrickle.postgres.copying import copy_out
from pgtrickle.postgres.transactions import set_local
from pgtrickle.query.plan import Column, KeyFilter, Plan, Version, databases_of, scanning, scans_of
from pgtrickle.query.types import Form, PgType
from pgtrickle.refresh.fetch.helper_process import Beside, Order
from pgtrickle.refresh.fetch.key_origins import origins_of
from pgtrickle.sites.citus.shards import Shards
from pgtrickle.sites.remote.connections import told

T = TypeVar("T")
Forms = tuple[tuple[Column, Form], ...]


@dataclass(frozen=True)
class Reader:
    """Who reads: the connection of the cut, and the function that reads as the stream table's owner, if another role.

    The owner has no right on change buffers, which hold all rows of their tables: where the owner's code computes of changes,
    these are arguments of that function. What is PostgreSQL's own code, over changes alone, runs without the function.
    In another database it reads as who connects there, under settings that have to be set there first.
    """

    conn: psycopg.Connection[Any]
    as_owner: sql.Identifier | None = None
    own_code: bool = True  # the query runs code that is not PostgreSQL's own
    database: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    shards: Mapping[str, Shards] = field(default_factory=dict)  # of a node: what to read of distributed tables, by hole

    def copy_out(self, statement: sql.Composable, schema: pa.Schema) -> pa.Table:
        """The rows of a query as an Arrow table of the given schema."""
        if not self.database:
            return copy_out(self.conn, statement, schema, copying.MOST_BYTES)
        with told(self.database), self.conn.transaction():
            set_local(self.conn, self.settings)
            return copy_out(self.conn, statement, schema, copying.MOST_BYTES)

    def as_reader(
        self,
        plan: Plan,
        text: SqlText,
        holes: Mapping[str, sql.Composable],
        changes: sql.Composable,
        columns: Sequence[tuple[str, str]],
    ) -> sql.Composable:
        """A fragment's statement, run with the rights that decide.

        `changes` is the condition for rows of change buffers, `columns` are names and types of what the statement gives.
        """
        only_changes = all(scan.version is Version.DELTA for scan in scans_of(plan))
        if self.as_owner is None or (only_changes and not self.own_code):
            return text.fill(lambda name: _changes_in_place(name, changes) if name.startswith(CHANGES) else holes[name])
        passed: dict[str, sql.Composable] = {}

        def fill(name: str) -> sql.Composable:
            if not name.startswith(CHANGES):
                return holes[name]
            passed.setdefault(name, _changes_as_text(name, changes))
            number = sql.Literal(list(passed).index(name) + 1)
            rows = sql.SQL("pg_catalog.unnest($1[{}]::{}[]) AS b")
            return rows.format(number, sql.Identifier(CHANGES_SCHEMA, name))

        statement = sql.Literal(text.fill(fill).as_string(self.conn))
        arguments = sql.SQL("ARRAY[{}]::pg_catalog.text[]").format(sql.SQL(", ").join(passed.values()))
        names = ", ".join(f"{name} {type_}" for name, type_ in columns)
        call = sql.SQL("SELECT * FROM {}({}::pg_catalog.text, {}) AS t({})")
        return call.format(self.as_owner, statement, arguments, sql.SQL(names))


@dataclass(frozen=True)
class Request:
    """One fragment to read: all of it, or the part that a condition leaves; of a distributed table, one query's rows."""

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
        """The distinct values of these columns, NULL among them where there is one."""
        ...


@dataclass(frozen=True)
class Part:
    """Rows that were read together with those of other fragments."""

    whole: pa.Table  # consolidated
    slice: Slice


@dataclass(frozen=True)
class ReadBeside:
    """A process of its own for the changes of tables that have many."""

    beside: Beside
    exported: str  # the cut's snapshot
    many: frozenset[int]

    def read(self, medium: InMemory, request: Request, statement: str) -> pa.Table | None:
        """The rows; None for what has to be read here."""
        scans = scans_of(request.plan)
        if request.reader.database or not any(
            s.version is Version.DELTA and s.relation.oid in self.many for s in scans
        ):
            return None
        info = medium.conn.info
        order = Order(info.dsn, info.password or None, self.exported, medium.settings, statement, request.schema)
        return self.beside.read(order)


@dataclass
class InMemory:
    """Rows in the driver, as Arrow tables; what several stream tables read in one cut is read once."""

    conn: psycopg.Connection[Any]
    statements: list[str]  # what was sent
    settings: Mapping[str, str] = field(default_factory=dict)
    beside: ReadBeside | None = None  # where tables have many changes
    _rows: dict[tuple[str, str], pa.Table] = field(default_factory=dict)  # by database and statement
    _net: dict[int, pa.Table] = field(default_factory=dict)  # consolidated, by the identity of the rows
    _parts: dict[int, Part] = field(default_factory=dict)  # by the identity of the rows, consolidated or not

    def part_of(self, rows: pa.Table) -> Part | None:
        """Where rows were read together with others, what they are part of."""
        return self._parts.get(id(rows))

    def cut_out(self, whole: pa.Table, slice_: Slice) -> pa.Table:
        """One fragment's rows of those that were read together."""
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
            rows = self.beside.read(self, request, shown) if self.beside is not None else None
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


@dataclass
class Fetcher(Generic[T]):
    """Fetches the fragments of one stream table's plan; results and key sets are kept for the whole refresh."""

    readers: Mapping[str, Reader]  # by database
    windows: Mapping[str, Snapshot]  # the same: behind which its changes lie
    medium: Medium[T]
    joined: frozenset[str] = frozenset()  # databases that are new: the change of their tables is all rows
    _wanted: dict[Plan, set[tuple[Column, Form]]] = field(default_factory=dict)
    _texts: dict[Plan, SqlText] = field(default_factory=dict)
    _rows: dict[Plan, T] = field(default_factory=dict)
    _tables: dict[Plan, T] = field(default_factory=dict)

    def want(self, plan: Plan, forms: Sequence[tuple[Column, Form]] | frozenset[tuple[Column, Form]]) -> None:
        """Announce what will be read of a fragment, and of those its keys come from."""
        known = self._wanted.setdefault(plan, set())
        known |= set(forms)
        if plan not in self._texts:
            self._texts[plan] = compile_fragment(plan, ())
            for key in self._texts[plan].keys:
                for origin in origins_of(key) or []:
                    self.want(origin.plan, [(origin.column, "text")])

    @property
    def databases(self) -> frozenset[str]:
        """Those that something is wanted of."""
        return frozenset(database_of(plan) for plan in self._wanted)

    @property
    def missing(self) -> dict[Plan, Forms]:
        """What is wanted and not yet read."""
        return {plan: _unique(forms) for plan, forms in self._wanted.items() if plan not in self._rows}

    def put(self, plan: Plan, rows: T) -> None:
        """Rows of a fragment that were read elsewhere."""
        self._rows[plan] = rows

    def table(self, plan: Plan) -> T:
        """The fragment's rows: its wanted forms and weights, consolidated."""
        if plan not in self._tables:
            table = self._raw(plan)
            if any(scan.version is Version.DELTA for scan in scans_of(plan)):
                table = self.medium.consolidated(table)
            self._tables[plan] = table
        return self._tables[plan]

    def _raw(self, plan: Plan) -> T:
        """The rows as they came. Keys are taken from these: what cancels out in the key alone may not in the row."""
        if plan not in self._rows:
            self._rows[plan] = self._read(plan, _unique(self._wanted[plan]))
        return self._rows[plan]

    def _read(self, plan: Plan, forms: Forms) -> T:
        schema = schema_of(forms)
        database = database_of(plan)
        reader = self.readers[database]
        keys = {f"key{i}": (key, self._keys(key)) for i, key in enumerate(self._texts[plan].keys)}
        conditions = {name: _condition(key, found) for name, (key, found) in keys.items()}
        if database in self.joined:
            plan = scanning(plan, Version.NEW)
        if None in conditions.values() and is_chain(plan):
            return self.medium.empty(schema)

        def statement(part: sql.Composable | None, rows: sql.Composable | None) -> sql.Composable:
            holes = {name: condition or sql.SQL("false") for name, condition in conditions.items()}
            holes |= {name: rows or sql.SQL(shards.query) for name, shards in reader.shards.items()}
            if rows is None:
                holes |= _few_shards(plan, reader, keys)
            changes: sql.Composable = sql.SQL("false")
            if database in self.windows:
                changes = since(self.windows[database], "__pgt_xid")
            if part is not None:
                holes[PART] = part
                changes = sql.SQL("{} AND {}").format(changes, part)
            text = compile_fragment(plan, forms, in_parts=part is not None)
            names = [(form_name(column, form), form_type(column.type, form)) for column, form in forms]
            return reader.as_reader(plan, text, holes, changes, [*names, ("w", "bigint")])

        return self.medium.read(Request(plan, schema, statement, reader))

    def _keys(self, key: KeyFilter) -> _Keys | None:
        """The values that bound a lookup; None where they are not known."""
        origins = origins_of(key)
        if origins is None:
            return None
        found = self.medium.values([(self._raw(origin.plan), form_name(origin.column, "text")) for origin in origins])
        return _Keys([value for value in found.to_pylist() if value is not None], bool(found.null_count and key.nulls))


def _changes_in_place(buffer: str, condition: sql.Composable) -> sql.Composable:
    """Rows of a change buffer where a FROM names them."""
    return sql.SQL("{} WHERE {}").format(sql.Identifier(CHANGES_SCHEMA, buffer), condition)


def _changes_as_text(buffer: str, condition: sql.Composable) -> sql.Composable:
    """Rows of a change buffer as the text of one array."""
    rows = sql.SQL("(SELECT pg_catalog.array_agg(b)::pg_catalog.text FROM {} AS b WHERE {})")
    return rows.format(sql.Identifier(CHANGES_SCHEMA, buffer), condition)


@dataclass(frozen=True)
class _Keys:
    """Values of a lookup, as text."""

    values: list[str]
    nulls: bool  # and NULL


def _condition(key: KeyFilter, keys: _Keys | None) -> sql.Composable | None:
    """The bound as a condition; None where no key is left."""
    if keys is None:
        return sql.SQL("true")
    name = sql.Identifier(key.column.id)
    parts: list[sql.Composable] = []
    if keys.values:
        # Of the type and the collation that they have where they come from: a cast to those of this column may lose what
        # tells them apart, or fail.
        type_ = key.origin_column.type
        values = sql.Literal(keys.values)
        equals = sql.SQL(type_.equals)
        # An array of arrays is one array of more dimensions to PostgreSQL.
        if type_.is_array:
            found = sql.SQL("(SELECT {} FROM unnest({}::text[]) AS v)").format(sql.SQL(type_.from_text("v")), values)
        elif not type_.is_built_in:
            found = sql.SQL("(ARRAY(SELECT {} FROM unnest({}::text[]) AS v))").format(
                sql.SQL(type_.from_text("v")), values
            )
        else:
            array = replace(type_, name=f"{type_.name}[]")
            found = sql.SQL("({}{})").format(values, sql.SQL(array.cast("::text[]")))
        parts.append(sql.SQL("{} {} ANY {}").format(name, equals, found))
    if keys.nulls:
        parts.append(sql.SQL("{} IS NULL").format(name))
    if not parts:
        return None
    return sql.SQL("(") + sql.SQL(" OR ").join(parts) + sql.SQL(")")


def _few_shards(
    plan: Plan, reader: Reader, keys: Mapping[str, tuple[KeyFilter, _Keys | None]]
) -> dict[str, sql.Composable]:
    """A lookup by the column that a table is distributed by, in the shards that can have its rows; the holes that change."""
    if not reader.shards or not is_chain(plan):
        return {}
    (scan,) = scans_of(plan)
    hole = f"{SHARDS}{scan.relation.oid}"
    shards = reader.shards.get(hole)
    if shards is None or shards.column is None or not shards.names or scan.version is Version.DELTA:
        return {}
    named = {column.id: item.name for column, item in scan.fields}
    for name, (key, found) in keys.items():
        if found is None or key.column.type.is_array or named.get(key.column.id) != shards.column:
            continue
        if key.column.type != key.origin_column.type:  # equal values of two types may have different hashes
            continue
        with told(reader.database), reader.conn.transaction():
            set_local(reader.conn, reader.settings)  # the keys were printed under these
            few = {hole: shards.holding(reader.conn, key.column.type.name, found.values)}
        # Of an earlier version changes are undone, those of other keys too.
        return few | ({name: sql.SQL("true")} if scan.version is Version.NEW else {})
    return {}


def database_of(plan: Plan) -> str:
    """The one database whose tables a fragment reads; its own, where it reads none."""
    names = databases_of(plan)
    assert len(names) < 2, f"a fragment over {sorted(names)}"
    return next(iter(names), "")


def consolidate(table: pa.Table) -> pa.Table:
    """Equal rows as one, with the sum of their weights; rows that cancel out are gone."""
    names = [name for name in table.schema.names if name != "w"]
    if table.num_rows == 0:
        return table
    if names:
        grouped = table.group_by(names, use_threads=False).aggregate([("w", "sum")])
        table = grouped.rename_columns([*names, "w"]) if grouped.schema.names[-1] == "w_sum" else grouped
    else:
        table = pa.table({"w": [pc.sum(table.column("w")).as_py()]})
    return table.filter(pc.not_equal(table.column("w"), 0)).select([*names, "w"])


def _unique(forms: Iterable[tuple[Column, Form]]) -> Forms:
    """Each form once, in an order of their own."""
    ordered = sorted(forms, key=lambda pair: form_name(*pair))
    return tuple({form_name(column, form): (column, form) for column, form in ordered}.values())


def schema_of(forms: Forms) -> pa.Schema:
    fields = [pa.field(form_name(column, form), arrow_type(column.type, form)) for column, form in forms]
    return pa.schema([*fields, pa.field("w", pa.int64())])


def arrow_type(type_: PgType, form: Form) -> pa.DataType:
    """Arrow's type for a form in flight."""
    kind = form_type(type_, form)
    types: Mapping[str, pa.DataType] = {"text": pa.string(), "boolean": pa.bool_(), "bigint": pa.int64()}
    if kind == "numeric":
        return pa.decimal128((type_.precision or 0) + 1, type_.scale or 0)
    return types[kind]
