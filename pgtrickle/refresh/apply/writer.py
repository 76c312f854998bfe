"""Writing a delta to a stream table, with the rights of its owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.types.array import ListBinaryDumper

from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.compile.apply import (
    Target,
    additive_statement,
    incoming,
    new_row_ids_statement,
    replace_statement,
    resync_statement,
    rows_statement,
)
from pgtrickle.compile.citus_apply import citus_key, citus_statements, stage_ddl
from pgtrickle.compile.sql_text import ident
from pgtrickle.enums import Action
from pgtrickle.errors import PgtrickleError
from pgtrickle.ivm.additive import AdditiveForm
from pgtrickle.ivm.program import Program
from pgtrickle.postgres import fence
from pgtrickle.query.plan import Column, Project
from pgtrickle.refresh.apply.load import Delta, Load, load
from pgtrickle.refresh.planning.jobs import full_query
from pgtrickle.refresh.stages import Computed


class Diverged(PgtrickleError):
    """The stored rows do not match the frontier, so the stream table has to be re-initialized."""


@dataclass(frozen=True)
class Writer:
    """Writes the delta of one stream table in the transaction of its apply."""

    conn: psycopg.Connection[Any]
    row: StreamTableRow
    computed: Computed
    settings: Mapping[str, str]  # of the transaction

    def write(self) -> tuple[int, int]:
        """Write the delta; return the numbers of inserted and deleted rows."""
        target, counts = self._write()
        if target is None:
            return 0, 0
        if target.stage is not None and not target.empty:
            counts = self._move_from_stage(target)
        if counts[2] != 0:
            raise Diverged(
                f"{self.row.label} does not hold the rows it should ({counts[2]} to delete were not found)",
                "It was changed by hand or restored; it is rebuilt from its query.",
            )
        return counts[0], counts[1]

    def _write(self) -> tuple[Target | None, list[int]]:
        delta, decided = self.computed.delta, self.computed.decided
        compiled, differential = decided.at_cut.compiled, decided.decision.action is Action.DIFFERENTIAL
        program = compiled.program
        loaded = self._load(delta)
        if program is not None and program.additive is not None:
            return self._write_groups(program, program.additive, loaded, differential=differential)
        if not differential and decided.placement == "spark" and program is not None and program.finish:
            if delta is None:  # the result is empty: all stored rows have to be deleted
                names = ("w", *(column.id for column in program.core.columns))
                loaded = load(self.conn, pa.table({name: pa.array([], pa.string()) for name in names}), None)
            target = self._target(program.output)
            statement = replace_statement(target, program.core.columns, program.finish, loaded.relation)
        elif delta is None:
            return None, []
        elif differential:
            assert program is not None
            target = self._target(program.output, null_keys=_null_keys(program, self._key, delta))
            statement = rows_statement(target, program.core.columns, program.finish, loaded.relation)
        else:
            columns = full_query(compiled, decided.placement)[1]
            target = self._target(columns, empty=self.computed.fetched.into_empty)
            statement = rows_statement(target, columns, (), loaded.relation)
        return target, self._run(statement, loaded.arrays)

    def _write_groups(
        self, program: Program, additive: AdditiveForm, loaded: Load, *, differential: bool
    ) -> tuple[Target, list[int]]:
        """Write groups whose aggregates are added up in a state table."""
        row, delta = self.row, self.computed.delta
        state = f"pgtrickle_views.{ident(f'state_{row.pgt_id}')}"
        target = self._target(program.output, null_keys=_null_keys(program, self._key, delta))
        if differential:
            if not row.own:
                self.conn.execute("SELECT pgtrickle._grant_state(%s)", (row.pgt_id,))
            statement = additive_statement(target, additive, program.finish, state, loaded.relation)
            counts = self._run(statement, loaded.arrays)
        else:
            self._make_state(additive)
            if delta is not None or not additive.keys:  # without keys there is a group even for no rows
                self._run(_load_state(additive, state, loaded.relation), loaded.arrays)
            anything = replace(target, null_keys=True)
            counts = [*self._run(resync_statement(anything, additive, program.finish, state), []), 0]
        if additive.keys and counts[3]:
            self._run(f"WITH d AS (DELETE FROM {state} WHERE n = 0 RETURNING 1) SELECT ARRAY[count(*)] FROM d", [])
        return target, counts

    def _make_state(self, additive: AdditiveForm) -> None:
        columns = [*additive.key_columns, *additive.state_columns]
        self.conn.execute(
            "SELECT pgtrickle._make_state(%s, %s, %s, %s, %s)",
            (
                self.row.pgt_id,
                [name for name, _ in columns],
                [type_.name for _, type_ in columns],
                [type_.collation or None for _, type_ in columns],
                len(additive.keys),
            ),
        )

    @property
    def _key(self) -> tuple[str, ...] | None:
        return tuple(self.row.key_columns) if self.row.key_columns is not None else None

    def _load(self, delta: Delta | None) -> Load:
        return load(self.conn, delta, None if self.row.own else self.row.owner)

    def _target(self, columns: tuple[Column, ...], *, null_keys: bool = True, empty: bool = False) -> Target:
        """Prepare the target of the apply.

        An ordinary table gets new row ids if it still has former ones. For a table that Citus placed, the target gets
        the key for such tables, and a temporary table that holds the delta's rows.
        """
        row = self.row
        table = f"{ident(row.pgt_schema)}.{ident(row.pgt_name)}"
        stage = f"pg_temp.pgt_z_{row.pgt_id}" if row.is_citus_table else None
        target = Target(table, columns, self._key, null_keys, empty=empty, stage=stage)
        if target.stage is None:
            if target.has_row_id and row.has_former_row_ids:
                self._run(new_row_ids_statement(target), [])
                self.conn.execute(
                    "UPDATE pgtrickle.pgt_stream_tables SET has_former_row_ids = false WHERE pgt_id = %s",
                    (row.pgt_id,),
                )
            return target
        placed = replace(
            target,
            key=citus_key(target.columns, target.key, row.output_distribution_column),
            former_row_ids=row.has_former_row_ids,
        )
        self.conn.execute(stage_ddl(target.stage, placed).encode())
        if not row.own and row.owner is not None:
            names = sql.SQL(target.stage), sql.Identifier(row.owner)
            self.conn.execute(sql.SQL("GRANT SELECT, INSERT ON {} TO {}").format(*names))
        return placed

    def _move_from_stage(self, target: Target) -> list[int]:
        counts = [0, 0, 0]
        for statement in citus_statements(target, self.row.output_distribution_column):
            counts = [sum(pair) for pair in zip(counts, self._run(statement, []), strict=True)]
        return counts

    def _run(self, statement: str, arrays: list[str]) -> list[int]:
        """Run a statement with the rights of the stream table's owner, and return the counts that it returns."""
        if self.row.own:
            # In binary format: for text, psycopg would quote the quoted arrays again, which takes longer than the
            # statement.
            with psycopg.RawCursor(self.conn) as cursor:
                cursor.adapters.register_dumper(list, ListBinaryDumper)
                answer = cursor.execute(statement.encode(), [arrays] if "$1" in statement else None).fetchone()
            assert answer is not None
            return [int(value) for value in answer[0]]
        counts = fence.write_as_owner(self.conn, self.row.pgt_id, statement, arrays, self.settings)
        assert counts is not None
        return counts


def _null_keys(program: Program, key: tuple[str, ...] | None, delta: Delta | None) -> bool:
    """Whether some key in the delta is NULL. The finish steps do not change keys."""
    if not isinstance(delta, pa.Table):
        return delta is not None
    if program.additive is not None:
        return any(delta.column(f"k{i}").null_count > 0 for i in range(len(program.additive.keys)))
    if key is None:
        return False
    ids = {column.id for column in program.output if column.name in key}
    for step in reversed(program.finish):
        if isinstance(step, Project):
            ids = {value.name for column, value in step.items if column.id in ids}
    return any(delta.column(name).null_count > 0 for name in ids)


def _load_state(additive: AdditiveForm, state: str, relation: str | None) -> str:
    columns = [*additive.key_columns, *additive.state_columns]
    names = ", ".join(name for name, _ in columns)
    keys = ", ".join(name for name, _ in columns[: len(additive.keys)])
    totals = ", ".join(
        [name for name, _ in columns[: len(additive.keys)]]
        + [f"coalesce(sum({name}), 0)::{type_.name}" for name, type_ in additive.state_columns]
    )
    group = f" GROUP BY {keys}" if keys else ""
    return (
        f"WITH i AS (INSERT INTO {state} ({names}, known) SELECT {totals}, true"
        f" FROM ({incoming(columns, relation)}) AS d{group} RETURNING 1) SELECT ARRAY[count(*)] FROM i"
    )
