"""Reading fragments from PostgreSQL into Arrow, in the snapshot of the cut.

Rows leave the server as CSV by COPY and are parsed by Arrow's reader, without a Python object per value. Changes are
consolidated on arrival: what cancels out is never seen by Spark.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from pyarrow import csv

from pgtrickle.capture.frontier import Snapshot
from pgtrickle.capture.window import since
from pgtrickle.compile.postgres import compile_fragment, form_name, form_type
from pgtrickle.compile.text import WINDOW, SqlText
from pgtrickle.delta.restrict import is_chain
from pgtrickle.engine.origins import Origin, origins_of
from pgtrickle.query.plan import Column, KeyFilter, Plan, Version, scans_of
from pgtrickle.query.types import Form, PgType

_PARSE = csv.ParseOptions(newlines_in_values=True)


@dataclass(frozen=True)
class Reader:
    """Who reads: the connection of the cut, and the function that reads as the stream table's owner, if another role."""

    conn: psycopg.Connection[Any]
    as_owner: sql.Identifier | None = None


@dataclass
class Cache:
    """What was read in one cut under the same settings and rights: several stream tables share it."""

    rows: dict[str, pa.Table] = field(default_factory=dict)  # by statement
    net: dict[int, pa.Table] = field(default_factory=dict)  # consolidated, by the identity of the rows

    def consolidated(self, rows: pa.Table) -> pa.Table:
        if id(rows) not in self.net:
            self.net[id(rows)] = consolidate(rows)
        return self.net[id(rows)]


@dataclass
class Fetcher:
    """Fetches the fragments of one stream table's plan; results and key sets are kept for the whole refresh."""

    reader: Reader
    window: Snapshot | None
    cache: Cache = field(default_factory=Cache)
    rows: int = 0
    statements: list[str] = field(default_factory=list)
    _wanted: dict[Plan, set[tuple[Column, Form]]] = field(default_factory=dict)
    _texts: dict[Plan, SqlText] = field(default_factory=dict)
    _rows: dict[Plan, pa.Table] = field(default_factory=dict)
    _tables: dict[Plan, pa.Table] = field(default_factory=dict)

    def want(self, plan: Plan, forms: Sequence[tuple[Column, Form]] | frozenset[tuple[Column, Form]]) -> None:
        """Announce what will be read of a fragment, and of those its keys come from."""
        known = self._wanted.setdefault(plan, set())
        known |= set(forms)
        if plan not in self._texts:
            self._texts[plan] = compile_fragment(plan, ())
            for key in self._texts[plan].keys:
                for origin in origins_of(key) or []:
                    self.want(origin.plan, [(origin.column, "text")])

    def table(self, plan: Plan) -> pa.Table:
        """The fragment's rows: its wanted forms and weights, consolidated."""
        if plan not in self._tables:
            table = self._raw(plan)
            if any(scan.version is Version.DELTA for scan in scans_of(plan)):
                table = self.cache.consolidated(table)
            self._tables[plan] = table
        return self._tables[plan]

    def _raw(self, plan: Plan) -> pa.Table:
        """The rows as they came. Keys are taken from these: what cancels out in the key alone may not in the row."""
        if plan not in self._rows:
            forms = sorted(self._wanted[plan], key=lambda pair: form_name(*pair))
            unique = {form_name(column, form): (column, form) for column, form in forms}
            text = compile_fragment(plan, tuple(unique.values()))
            self._rows[plan] = self._read(text, plan, list(unique.values()))
        return self._rows[plan]

    def _read(self, text: SqlText, plan: Plan, forms: Sequence[tuple[Column, Form]]) -> pa.Table:
        conditions = {f"key{i}": self._key_condition(key) for i, key in enumerate(text.keys)}
        schema = _schema(forms)
        if None in conditions.values() and is_chain(plan):
            return schema.empty_table()
        statement = text.fill(lambda name: self._window() if name == WINDOW else conditions[name] or sql.SQL("false"))
        if self.reader.as_owner is not None:
            names = [f"{form_name(column, form)} {form_type(column.type, form)}" for column, form in forms]
            statement = sql.SQL("SELECT * FROM {}({}) AS t({})").format(
                self.reader.as_owner,
                sql.Literal(statement.as_string(self.reader.conn)),
                sql.SQL(", ".join([*names, "w bigint"])),
            )
        shown = statement.as_string(self.reader.conn)
        if shown not in self.cache.rows:
            self.statements.append(shown)
            self.cache.rows[shown] = copy_out(self.reader.conn, statement, schema)
            self.rows += self.cache.rows[shown].num_rows
        return self.cache.rows[shown]

    def _window(self) -> sql.Composable:
        assert self.window is not None
        return since(self.window, "__pgt_xid")

    def _key_condition(self, key: KeyFilter) -> sql.Composable | None:
        """The bound as a condition; None where no key is left."""
        origins = origins_of(key)
        if origins is None:
            return sql.SQL("true")
        values, nulls = self._values(origins)
        name = sql.Identifier(key.column.id)
        parts: list[sql.Composable] = []
        if values:
            type_ = sql.SQL(key.column.type.name)
            # An array of arrays is one array of more dimensions to PostgreSQL.
            form = (
                "{} IN (SELECT v::{} FROM unnest({}::text[]) AS v)"
                if key.column.type.is_array
                else "{} = ANY ({}::text[]::{}[])"
            )
            order = (
                (name, type_, sql.Literal(values)) if key.column.type.is_array else (name, sql.Literal(values), type_)
            )
            parts.append(sql.SQL(form).format(*order))
        if nulls and key.nulls:
            parts.append(sql.SQL("{} IS NULL").format(name))
        if not parts:
            return None
        return sql.SQL("(") + sql.SQL(" OR ").join(parts) + sql.SQL(")")

    def _values(self, origins: Sequence[Origin]) -> tuple[list[str], bool]:
        chunks = [
            self._raw(origin.plan).column(form_name(origin.column, "text")).combine_chunks() for origin in origins
        ]
        values = pc.unique(pa.concat_arrays([chunk.cast(pa.string()) for chunk in chunks]))
        found = [value for value in values.to_pylist() if value is not None]
        return found, values.null_count > 0


def copy_out(conn: psycopg.Connection[Any], statement: sql.Composable, schema: pa.Schema) -> pa.Table:
    """The rows of a query as an Arrow table of the given schema."""
    command = sql.SQL("COPY ({}) TO STDOUT (FORMAT csv)").format(statement)
    with conn.cursor() as cursor, cursor.copy(command) as copy:
        data = b"".join(copy)
    if not data:
        return schema.empty_table()
    options = csv.ConvertOptions(
        column_types=schema,
        null_values=[""],
        true_values=["t"],
        false_values=["f"],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    read = csv.ReadOptions(column_names=schema.names, block_size=max(1 << 20, len(data) if len(data) < 1 << 28 else 0))
    return csv.read_csv(io.BytesIO(data), read_options=read, parse_options=_PARSE, convert_options=options)


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


def _schema(forms: Sequence[tuple[Column, Form]]) -> pa.Schema:
    fields = [pa.field(form_name(column, form), arrow_type(column.type, form)) for column, form in forms]
    return pa.schema([*fields, pa.field("w", pa.int64())])


def arrow_type(type_: PgType, form: Form) -> pa.DataType:
    """Arrow's type for a form in flight."""
    kind = form_type(type_, form)
    types: Mapping[str, pa.DataType] = {"text": pa.string(), "boolean": pa.bool_(), "bigint": pa.int64()}
    if kind == "numeric":
        return pa.decimal128((type_.precision or 0) + 1, type_.scale or 0)
    return types[kind]
