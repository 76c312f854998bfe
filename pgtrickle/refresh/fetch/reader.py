"""Who reads: with which connection, and with whose rights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from pgtrickle.compile.postgres import CHANGES_SCHEMA
from pgtrickle.compile.sql_text import CHANGES, SqlText
from pgtrickle.postgres import copying
from pgtrickle.postgres.copying import copy_out
from pgtrickle.postgres.transactions import set_local
from pgtrickle.query.plan import Plan, Version, scans_of
from pgtrickle.sites.citus.shards import Shards
from pgtrickle.sites.remote.connections import errors_naming


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
        with errors_naming(self.database), self.conn.transaction():
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


def _changes_in_place(buffer: str, condition: sql.Composable) -> sql.Composable:
    """Rows of a change buffer where a FROM names them."""
    return sql.SQL("{} WHERE {}").format(sql.Identifier(CHANGES_SCHEMA, buffer), condition)


def _changes_as_text(buffer: str, condition: sql.Composable) -> sql.Composable:
    """Rows of a change buffer as the text of one array."""
    rows = sql.SQL("(SELECT pg_catalog.array_agg(b)::pg_catalog.text FROM {} AS b WHERE {})")
    return rows.format(sql.Identifier(CHANGES_SCHEMA, buffer), condition)
