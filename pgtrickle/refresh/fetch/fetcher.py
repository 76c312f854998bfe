"""Reading fragments from PostgreSQL into Arrow, in the snapshot of the cut.

Rows leave the server as CSV by COPY and are parsed by Arrow's reader, without a Python object per value. Changes are
consolidated on arrival, so rows that cancel out never reach Spark.
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
    """Fetches the fragments of one stream table's plan. Results and key sets are kept for the whole refresh."""

    readers: Mapping[str, Reader]  # by database
    windows: Mapping[str, Snapshot]  # by database: the snapshot since which changes are read
    medium: Medium[T]
    joined: frozenset[str] = frozenset()  # new members of sets: all rows of their tables are changes
    _wanted: dict[Plan, set[tuple[Column, Form]]] = field(default_factory=dict)
    _texts: dict[Plan, SqlText] = field(default_factory=dict)
    _rows: dict[Plan, T] = field(default_factory=dict)
    _tables: dict[Plan, T] = field(default_factory=dict)

    def want(self, plan: Plan, forms: Sequence[tuple[Column, Form]] | frozenset[tuple[Column, Form]]) -> None:
        """Announce what will be read of a fragment, and of the fragments that its keys come from."""
        known = self._wanted.setdefault(plan, set())
        known |= set(forms)
        if plan not in self._texts:
            self._texts[plan] = compile_fragment(plan, ())
            for key in self._texts[plan].keys:
                for origin in origins_of(key) or []:
                    self.want(origin.plan, [(origin.column, "text")])

    @property
    def databases(self) -> frozenset[str]:
        """The databases from which something will be read."""
        return frozenset(database_of(plan) for plan in self._wanted)

    @property
    def missing(self) -> dict[Plan, FormList]:
        """The fragments that were announced and not yet read, with the forms to read."""
        return {plan: _unique(forms) for plan, forms in self._wanted.items() if plan not in self._rows}

    def put(self, plan: Plan, rows: T) -> None:
        """Store rows of a fragment that were read in another way."""
        self._rows[plan] = rows

    def table(self, plan: Plan) -> T:
        """The fragment's rows, with the announced forms and weights; changes are consolidated."""
        if plan not in self._tables:
            table = self._raw(plan)
            if any(scan.version is Version.DELTA for scan in scans_of(plan)):
                table = self.medium.consolidated(table)
            self._tables[plan] = table
        return self._tables[plan]

    def _raw(self, plan: Plan) -> T:
        """The fragment's rows as read. Keys are taken from these: a key may cancel out although its rows do not."""
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
        """The keys of a lookup; None if no fetched rows hold them."""
        origins = origins_of(key)
        if origins is None:
            return None
        found = self.medium.values([(self._raw(origin.plan), form_name(origin.column, "text")) for origin in origins])
        return _Keys([value for value in found.to_pylist() if value is not None], bool(found.null_count and key.nulls))


@dataclass(frozen=True)
class _Keys:
    """The keys of a lookup, as text."""

    values: list[str]
    nulls: bool  # NULL is a key too


def _condition(key: KeyFilter, keys: _Keys | None) -> sql.Composable | None:
    """The condition of a lookup; None if there are no keys."""
    if keys is None:
        return sql.SQL("true")
    name = sql.Identifier(key.column.id)
    parts: list[sql.Composable] = []
    if keys.values:
        # Keep the type and the collation of the keys' origin: a cast to those of this column may fail, or make
        # different keys equal.
        type_ = key.origin_column.type
        values = sql.Literal(keys.values)
        equals = sql.SQL(type_.equals)
        # To PostgreSQL, an array of arrays is one array with more dimensions.
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
    """Placeholders for a lookup by distribution column, which reads only the shards that can hold the keys."""
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
        if key.column.type != key.origin_column.type:  # equal values of different types may have different hashes
            continue
        with errors_naming(reader.database), reader.conn.transaction():
            set_local(reader.conn, reader.settings)  # the keys were printed under these settings
            few = {hole: shards.holding(reader.conn, key.column.type.name, found.values)}
        # An older version is computed by undoing changes, also those of other keys: there the key condition stays.
        return few | ({name: sql.SQL("true")} if scan.version is Version.NEW else {})
    return {}


def database_of(plan: Plan) -> str:
    """The database whose tables a fragment reads; empty for the home database, or if it reads no table."""
    names = databases_of(plan)
    assert len(names) < 2, f"a fragment over {sorted(names)}"
    return next(iter(names), "")


def _unique(forms: Iterable[tuple[Column, Form]]) -> FormList:
    """The forms without duplicates, in a fixed order."""
    ordered = sorted(forms, key=lambda pair: form_name(*pair))
    return tuple({form_name(column, form): (column, form) for column, form in ordered}.values())


def schema_of(forms: FormList) -> pa.Schema:
    fields = [pa.field(form_name(column, form), arrow_type(column.type, form)) for column, form in forms]
    return pa.schema([*fields, pa.field("w", pa.int64())])


def arrow_type(type_: PgType, form: Form) -> pa.DataType:
    """The Arrow type in which a form is fetched."""
    kind = form_type(type_, form)
    types: Mapping[str, pa.DataType] = {"text": pa.string(), "boolean": pa.bool_(), "bigint": pa.int64()}
    if kind == "numeric":
        return pa.decimal128((type_.precision or 0) + 1, type_.scale or 0)
    return types[kind]
