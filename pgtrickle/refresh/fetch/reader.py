"""Readers: the connection and the rights with which fragments are read."""

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
    """The connection of the cut, and the function that reads as the stream table's owner if that is another role.

    The owner has no right on change buffers, because they hold all rows of their tables. Where the owner's code has to
    process changes, they are passed to the function as arguments. Fragments that read only changes, and run only
    PostgreSQL's own code, run without the function. A remote database is read with the rights of the role that connects
    there, and the settings have to be set there first.
    """

    conn: psycopg.Connection[Any]
    as_owner: sql.Identifier | None = None
    own_code: bool = True  # the query runs user-defined code
    database: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    shards: Mapping[str, Shards] = field(default_factory=dict)  # shards to read on a node, by placeholder

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
        """The statement that reads a fragment, through the owner's function where that is needed.

        `changes` is the condition for rows of change buffers; `columns` has the names and types of the result.
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
    """Rows of a change buffer, as the text after FROM."""
    return sql.SQL("{} WHERE {}").format(sql.Identifier(CHANGES_SCHEMA, buffer), condition)


def _changes_as_text(buffer: str, condition: sql.Composable) -> sql.Composable:
    """Rows of a change buffer as the text of one array."""
    rows = sql.SQL("(SELECT pg_catalog.array_agg(b)::pg_catalog.text FROM {} AS b WHERE {})")
    return rows.format(sql.Identifier(CHANGES_SCHEMA, buffer), condition)
