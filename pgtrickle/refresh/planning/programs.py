"""Programs of stream tables, compiled once and cached until the meaning of the query changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row
from sqlglot import exp
from sqlglot.errors import SqlglotError

from pgtrickle.catalog.analysis import GONE, Analysis, aggregate_names
from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.compile.placement import Placement
from pgtrickle.errors import PrivilegeError, SourceChangedError
from pgtrickle.ivm.program import Program, build_program
from pgtrickle.postgres.fence import write_as_owner
from pgtrickle.query.binder import Binder
from pgtrickle.query.budget import NESTED, Budget, OverBudget, planning_within
from pgtrickle.query.dialect import parse
from pgtrickle.query.plan import Relation, scans_of
from pgtrickle.query.unsupported import Unsupported
from pgtrickle.refresh.planning.compiled import Compiled
from pgtrickle.refresh.planning.jobs import Job, check_cost

MOST_JOBS = 32  # cached per stream table


@dataclass
class Plans:
    """A cache of compiled queries and jobs for all engines of a database. `found` counts hits, `made` compilations."""

    compiled: dict[int, Compiled] = field(default_factory=dict)
    jobs: dict[int, dict[tuple[Any, ...], Job | OverBudget | None]] = field(default_factory=dict)
    found: int = 0
    made: int = 0

    def put(self, pgt_id: int, compiled: Compiled) -> None:
        self.made += 1
        self.jobs.pop(pgt_id, None)
        self.compiled[pgt_id] = compiled

    def job(self, pgt_id: int, key: tuple[Any, ...], build: Callable[[], Job | None]) -> Job | None:
        """The cached job for the key, built on first use. There may be one for each set of changed tables.

        If planning a job exceeded its budget, it is not planned again: the same OverBudget is raised.
        """
        jobs = self.jobs.setdefault(pgt_id, {})
        if key not in jobs:
            if len(jobs) >= MOST_JOBS:
                del jobs[next(iter(jobs))]
            try:
                jobs[key] = build()
            except OverBudget as error:
                jobs[key] = error.with_traceback(None)
        job = jobs[key]
        if isinstance(job, OverBudget):
            raise job
        return job

    def forget(self, pgt_id: int) -> None:
        self.compiled.pop(pgt_id, None)
        self.jobs.pop(pgt_id, None)

    def keep(self, ids: Collection[int]) -> None:
        """Forget all stream tables except these."""
        for pgt_id in [known for known in list(self.compiled) if known not in ids]:
            self.forget(pgt_id)


@dataclass
class Programs:
    """The compiled queries of one database."""

    conn: psycopg.Connection[Any]
    plans: Plans = field(default_factory=Plans)
    _aggregates: frozenset[str] | None = None
    _analyst: int | None = None  # while a query is compiled: the stream table with whose owner's rights it is analyzed

    def known(self, pgt_id: int) -> Compiled | None:
        """The cached compiled query, if there is one."""
        found = self.plans.compiled.get(pgt_id)
        self.plans.found += found is not None
        return found

    def compile_for(self, row: StreamTableRow, shape: str) -> Compiled:
        """Compile a stream table's query, and cache the result."""
        called = self.conn.execute("SELECT pgtrickle._user_objects(%s::oid::regclass)", (row.view_relid,)).fetchall()
        compiled = self.compile_stored(row, shape)
        compiled = replace(compiled, functions=tuple(sorted(name for (name,) in called)))
        self.plans.put(row.pgt_id, compiled)
        return compiled

    def compile_stored(self, row: StreamTableRow, shape: str) -> Compiled:
        """Compile a stream table's query, with its owner's rights if the analysis may run the owner's code."""
        placement: Placement = "spark" if row.placement == "spark" else "auto"
        return self.compile(row.view_relid, shape, placement, row.hidden, None if row.own else row.pgt_id)

    def compile(
        self, view: int, shape: str, placement: Placement, hidden: str | None = None, as_owner_of: int | None = None
    ) -> Compiled:
        """Compile the view's query. Leaves nothing behind in the database.

        `hidden` names sources behind views of other roles that the owner may not read directly. PostgreSQL has to read
        these through the views.
        """
        row = self.conn.execute("SELECT pgtrickle._runs_user_code(%s::oid::regclass)", (view,)).fetchone()
        assert row is not None
        own_code: bool = row[0]
        self._analyst = as_owner_of if own_code else None
        return replace(self._compile(view, shape, placement, hidden), own_code=own_code)

    def _compile(self, view: int, shape: str, placement: Placement, hidden: str | None) -> Compiled:
        if self._aggregates is None:
            self._aggregates = aggregate_names(self.conn)
        with self.conn.transaction(force_rollback=True):
            self.conn.execute("SET LOCAL search_path TO pg_catalog, pg_temp")
            analysis = Analysis(self.conn, create=self._create if self._analyst is not None else None)
            relations = analysis.relations(view)
            own = next((relation for relation in relations.values() if relation.oid == view), None)
            if own is None:
                raise SourceChangedError(
                    "the view of the query was made anew while it was read, as Citus does with tables it distributes",
                    "Refresh again; a service does so by itself.",
                )
            try:
                if hidden is not None:
                    raise Unsupported(f"a view of another role shows a part of {hidden}, which the owner may not read")
                self._check_route(view)
                self._check_functions(view, own)
                for relation in relations.values():
                    if relation.definition is not None:
                        self._prove(relation.oid, relation.definition)
                        _check_session_values(relation.definition)
                assert own.definition is not None
                binder = Binder(relations, analysis, self._aggregates)
                with planning_within(Budget()):
                    with self.conn.transaction():
                        program = build_program(own.definition, binder)
                    _check_columns(program)
                    check_cost(program, placement)
            except Unsupported as error:
                return Compiled(shape, own, None, error.reason, error.fragment, time_dependent=error.time_dependent)
            except psycopg.errors.InsufficientPrivilege as error:
                raise PrivilegeError(
                    f"the query cannot be analysed: {error.diag.message_primary}",
                    "Grant USAGE on the schemas of its tables and types to the role that refreshes it.",
                ) from error
            except psycopg.Error as error:
                reason = f"PostgreSQL does not accept a part of the plan: {error.diag.message_primary}"
                return Compiled(shape, own, None, reason)
            except RecursionError:
                return Compiled(shape, own, None, NESTED)
            except SqlglotError as error:
                return Compiled(shape, own, None, f"the query's syntax is not understood: {str(error).splitlines()[0]}")
        return Compiled(shape, own, program, None)

    def _check_route(self, view: int) -> None:
        row = self.conn.execute(
            "SELECT FROM pgtrickle.pgt_stream_tables WHERE view_relid = %s::oid AND through_coordinator", (view,)
        ).fetchone()
        if row is not None:
            raise Unsupported("the coordinator computes it, not at a moment that is common to all nodes")

    def _check_functions(self, view: int, own: Relation) -> None:
        """Raise Unsupported if the query has functions for which a differential refresh would give a wrong result.

        These are functions whose results do not depend on their arguments alone, and set-returning functions.
        """
        with self.conn.cursor(row_factory=dict_row) as cursor:
            row = cursor.execute(
                "SELECT pgtrickle._time_dependent(%(view)s::oid::regclass) AS timed,"
                " (SELECT string_agg(DISTINCT proname, ', ') FROM pgtrickle._functions_used(%(view)s::oid::regclass)"
                "  WHERE provolatile = 's' AND NOT (nspname = 'pg_catalog' AND proname = ANY (%(known)s))) AS stable,"
                " (SELECT string_agg(DISTINCT proname, ', ') FROM pgtrickle._functions_used(%(view)s::oid::regclass)"
                "  WHERE provolatile = 'v') AS volatile,"
                " (SELECT bool_or(r.ev_action::text ~ ':funcretset true') FROM pg_rewrite r WHERE r.ev_class = %(view)s)"
                "  AS sets",
                {"view": view, "known": sorted(DETERMINISTIC_STABLE)},
            ).fetchone()
        assert row is not None
        if row["timed"]:
            raise Unsupported("the query depends on the current time", time_dependent=True)
        if row["volatile"]:
            raise Unsupported(f"the query calls VOLATILE functions: {row['volatile']}")
        if row["stable"]:
            reason = f"STABLE functions may change without their arguments: {row['stable']}"
            raise Unsupported(reason, time_dependent=True)
        if row["sets"]:
            raise Unsupported("set-returning functions are not maintained differentially")

    def _prove(self, view: int, definition: str) -> None:
        """Check that the parsed tree, written out again and analyzed by PostgreSQL, is the same query."""
        try:
            text, used = self._canonical(parse(definition).sql(dialect="postgres"))
            if used != self._used(view):
                raise Unsupported(
                    "another function or operator now fits the query's text better than the one it was created with"
                )
            written = _comparable(text)
            if written == _comparable(definition):
                return
            # PostgreSQL drops parentheses when it reads its own text: those of (a AND b) AND c, as BETWEEN produces it.
            same = written == _comparable(self._canonical(definition.rstrip().rstrip(";"))[0])
        except psycopg.errors.InsufficientPrivilege:
            raise
        except psycopg.Error as error:
            raise Unsupported(
                f"the parsed query is not accepted by PostgreSQL: {error.diag.message_primary}"
            ) from error
        if not same:
            raise Unsupported("the parsed query does not mean the same to PostgreSQL")

    def _canonical(self, text: str) -> tuple[str, frozenset[int]]:
        """PostgreSQL's canonical text of a query, and the user-defined functions and operators that it resolves to."""
        with self.conn.transaction(force_rollback=True):
            self._create("CREATE TEMP VIEW pgt_proof AS " + text)
            row = self.conn.execute(
                "SELECT pg_get_viewdef(v.oid), v.oid::bigint FROM to_regclass('pg_temp.pgt_proof') AS v (oid)"
            ).fetchone()
            assert row is not None
            return str(row[0]), self._used(row[1])

    def _used(self, view: int) -> frozenset[int]:
        """The user-defined functions and operators that a view's rule calls."""
        rows = self.conn.execute(
            "SELECT DISTINCT d.refobjid::bigint FROM pg_rewrite AS r JOIN pg_depend AS d ON d.classid = 'pg_rewrite'::regclass"
            " AND d.objid = r.oid AND d.refclassid IN ('pg_proc'::regclass, 'pg_operator'::regclass) WHERE r.ev_class = %s",
            (view,),
        ).fetchall()
        return frozenset(oid for (oid,) in rows)

    def _create(self, statement: str) -> None:
        """Create a view, as the owner if needed: parsing a literal of a composite type runs checks of domains in it."""
        if self._analyst is None:
            self.conn.execute(sql.SQL(statement))
        else:
            write_as_owner(self.conn, self._analyst, statement, None, {})


def _check_columns(program: Program) -> None:
    for scan in scans_of(program.plan):
        for _, item in scan.fields:
            if item.attnum == GONE:
                raise SourceChangedError(
                    f"column {item.name} of {scan.relation.label} was dropped or retyped there",
                    "Drop the stream tables that use it, and create them again for the table as it is now.",
                )


def _check_session_values(definition: str) -> None:
    """Raise Unsupported for CURRENT_USER and the like, whose value for the service is not that for the reader."""
    found = parse(definition).find(
        exp.CurrentUser, exp.SessionUser, exp.CurrentSchema, exp.CurrentRole, exp.CurrentCatalog
    )
    if found is not None:
        raise Unsupported(f"the query depends on who runs it: {found.sql()}")


# STABLE functions that are deterministic under the settings recorded with the stream table (TimeZone, DateStyle, lc_*,
# search_path).
DETERMINISTIC_STABLE = frozenset(
    {
        "to_char", "to_date", "to_timestamp", "to_number", "date_trunc", "date_part", "extract", "timezone", "date_bin",
        "timestamptz", "timestamp", "date", "time", "timetz", "text", "varchar", "concat", "concat_ws", "format",
        "textcat", "anytextcat", "textanycat", "array_to_string", "string_to_array", "array_out", "record_out",
        "jsonb_agg", "json_agg", "jsonb_object_agg", "json_object_agg", "jsonb_build_object", "json_build_object",
        "jsonb_build_array", "json_build_array", "to_json", "to_jsonb", "row_to_json", "array_to_json",
        "jsonb_agg_transfn", "json_agg_transfn", "jsonb_object_agg_transfn", "jsonb_agg_strict", "jsonb_object_agg_strict",
        "jsonb_object_agg_unique", "timestamptz_pl_interval", "timestamptz_mi_interval", "interval_pl_timestamptz",
        "timestamptz_lt_timestamp", "timestamptz_le_timestamp", "timestamptz_eq_timestamp", "timestamptz_gt_timestamp",
        "timestamptz_ge_timestamp", "timestamptz_ne_timestamp", "timestamp_lt_timestamptz", "timestamp_gt_timestamptz",
        "timestamptz_lt_date", "timestamptz_le_date", "timestamptz_eq_date", "timestamptz_gt_date",
        "timestamptz_ge_date", "timestamptz_ne_date", "date_lt_timestamptz", "date_le_timestamptz",
        "date_eq_timestamptz", "date_gt_timestamptz", "date_ge_timestamptz", "date_ne_timestamptz",
        "timestamp_eq_timestamptz", "timestamp_le_timestamptz", "timestamp_ge_timestamptz", "timestamp_ne_timestamptz",
        "record_eq", "array_agg", "unknown",
    }
)  # fmt: skip

_ALIASED_CONSTANT = re.compile(r"""^(\s*(?:SELECT )?'(?:[^']|'')*'::[\w" .]+?) AS [\w"]+(,?)$""", re.MULTILINE)
_NOT_TRUE = re.compile(r"\((\w[\w.\"]*) IS NOT (TRUE|FALSE)\)")


def _comparable(definition: str) -> str:
    """The text with differences removed that are known not to matter (each of them is tested)."""
    text = definition.strip()
    text = text.replace(" IS NOT UNKNOWN", " IS NOT NULL").replace(" IS UNKNOWN", " IS NULL")
    text = _NOT_TRUE.sub(r"(NOT (\1 IS \2))", text)
    return _ALIASED_CONSTANT.sub(r"\1\2", text)
