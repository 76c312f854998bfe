"""Reading fragments from PostgreSQL into Arrow, in the snapshot of the cut.

Rows leave the server as CSV by COPY and are parsed by Arrow's reader, without a Python object per value. Changes are
consolidated on arrival: what cancels out is never seen by Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic

import pyarrow as pa
from psycopg import sql

from pgtrickle.compile.postgres import compile_fragment, form_name, form_type
from pgtrickle.compile.sql_text import PART, SHARDS, SqlText
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.frontier.window import since
from pgtrickle.ivm.key_bounds import is_chain
from pgtrickle.postgres.transactions import set_local
from pgtrickle.query.plan import Column, KeyFilter, Plan, Version, databases_of, scanning, scans_of
from pgtrickle.query.types import Form, PgType
from pgtrickle.refresh.fetch.key_origins import origins_of
from pgtrickle.refresh.fetch.medium import Medium, Request, T
from pgtrickle.refresh.fetch.reader import Reader
from pgtrickle.sites.remote.connections import errors_naming

FormList = tuple[tuple[Column, Form], ...]


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
    def missing(self) -> dict[Plan, FormList]:
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

    def _read(self, plan: Plan, forms: FormList) -> T:
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
        with errors_naming(reader.database), reader.conn.transaction():
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


def _unique(forms: Iterable[tuple[Column, Form]]) -> FormList:
    """Each form once, in an order of their own."""
    ordered = sorted(forms, key=lambda pair: form_name(*pair))
    return tuple({form_name(column, form): (column, form) for column, form in ordered}.values())


def schema_of(forms: FormList) -> pa.Schema:
    fields = [pa.field(form_name(column, form), arrow_type(column.type, form)) for column, form in forms]
    return pa.schema([*fields, pa.field("w", pa.int64())])


def arrow_type(type_: PgType, form: Form) -> pa.DataType:
    """Arrow's type for a form in flight."""
    kind = form_type(type_, form)
    types: Mapping[str, pa.DataType] = {"text": pa.string(), "boolean": pa.bool_(), "bigint": pa.int64()}
    if kind == "numeric":
        return pa.decimal128((type_.precision or 0) + 1, type_.scale or 0)
    return types[kind]
