"""Programs of stream tables, compiled once and kept while the query means the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row
from sqlglot import exp
from sqlglot.errors import SqlglotError

from pgtrickle.catalog.analysis import GONE, Analysis, aggregate_names
from pgtrickle.delta.program import Program, build_program
from pgtrickle.errors import PrivilegeError, SourceChangedError
from pgtrickle.query.bind import Binder
from pgtrickle.query.dialect import parse
from pgtrickle.query.plan import Relation, scans_of
from pgtrickle.query.unsupported import Unsupported

if TYPE_CHECKING:
    from pgtrickle.engine.jobs import Job

MOST_JOBS = 32  # kept per stream table


@dataclass(frozen=True)
class Compiled:
    """What is known of a query: its relations, and its program or the reason why it has none."""

    shape: str  # changes when a relation or column it reads is renamed or retyped
    view: Relation
    program: Program | None
    reason: str | None
    fragment: str | None = None
    functions: tuple[str, ...] = ()  # that it calls and that are not PostgreSQL's own


@dataclass
class Plans:
    """Compiled queries, kept for all engines of a database; its counts tell how often one was there already."""

    compiled: dict[int, Compiled] = field(default_factory=dict)
    jobs: dict[int, dict[tuple[Any, ...], Job | None]] = field(default_factory=dict)
    found: int = 0
    made: int = 0

    def put(self, pgt_id: int, compiled: Compiled) -> None:
        self.made += 1
        self.jobs.pop(pgt_id, None)
        self.compiled[pgt_id] = compiled

    def job(self, pgt_id: int, key: tuple[Any, ...], build: Callable[[], Job | None]) -> Job | None:
        """A job as it was built for the same key before. A query over many tables has one for each choice of them."""
        jobs = self.jobs.setdefault(pgt_id, {})
        if key not in jobs:
            if len(jobs) >= MOST_JOBS:
                del jobs[next(iter(jobs))]
            jobs[key] = build()
        return jobs[key]

    def forget(self, pgt_id: int) -> None:
        self.compiled.pop(pgt_id, None)
        self.jobs.pop(pgt_id, None)

    def keep(self, ids: Collection[int]) -> None:
        """Forget all others."""
        for pgt_id in [known for known in list(self.compiled) if known not in ids]:
            self.forget(pgt_id)


@dataclass
class Programs:
    """The compiled queries of one database."""

    conn: psycopg.Connection[Any]
    plans: Plans = field(default_factory=Plans)
    _aggregates: frozenset[str] | None = None

    def known(self, pgt_id: int) -> Compiled | None:
        """The query as it was last compiled."""
        found = self.plans.compiled.get(pgt_id)
        self.plans.found += found is not None
        return found

    def compile_for(self, pgt_id: int, view: int, shape: str) -> None:
        called = self.conn.execute("SELECT pgtrickle._own_functions(%s::oid::regclass)", (view,)).fetchall()
        self.plans.put(pgt_id, replace(self.compile(view, shape), functions=tuple(sorted(name for (name,) in called))))

    def compile(self, view: int, shape: str) -> Compiled:
        """Analyse the view's query. Leaves nothing behind in the database."""
        if self._aggregates is None:
            self._aggregates = aggregate_names(self.conn)
        with self.conn.transaction(force_rollback=True):
            self.conn.execute("SELECT set_config('search_path', '', true)")
            analysis = Analysis(self.conn)
            relations = analysis.relations(view)
            own = next((relation for relation in relations.values() if relation.oid == view), None)
            if own is None:
                raise SourceChangedError(
                    "the view of the query was made anew while it was read, as Citus does with tables it distributes",
                    "Refresh again; a service does so by itself.",
                )
            try:
                self._check_route(view)
                self._check_functions(view, own)
                for relation in relations.values():
                    if relation.definition is not None:
                        self._prove(relation.definition)
                        _check_session_values(relation.definition)
                assert own.definition is not None
                binder = Binder(relations, analysis, self._aggregates)
                with self.conn.transaction():
                    program = build_program(own.definition, binder)
                _check_columns(program)
            except Unsupported as error:
                return Compiled(shape, own, None, error.reason, error.fragment)
            except psycopg.errors.InsufficientPrivilege as error:
                raise PrivilegeError(
                    f"the query cannot be analysed: {error.diag.message_primary}",
                    "Grant USAGE on the schemas of its tables and types to the role that refreshes it.",
                ) from error
            except psycopg.Error as error:
                reason = f"PostgreSQL does not accept a part of the plan: {error.diag.message_primary}"
                return Compiled(shape, own, None, reason)
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
        """Functions that are not a matter of their arguments alone make a differential result wrong."""
        with self.conn.cursor(row_factory=dict_row) as cursor:
            row = cursor.execute(
                "SELECT pgtrickle._time_dependent(%(view)s::oid::regclass) AS timed,"
                " (SELECT string_agg(DISTINCT proname, ', ') FROM pgtrickle._functions_used(%(view)s::oid::regclass)"
                "  WHERE provolatile = 's' AND NOT (nspname = 'pg_catalog' AND proname = ANY (%(known)s))) AS stable,"
                " (SELECT bool_or(r.ev_action::text ~ ':funcretset true') FROM pg_rewrite r WHERE r.ev_class = %(view)s)"
                "  AS sets",
                {"view": view, "known": sorted(DETERMINISTIC_STABLE)},
            ).fetchone()
        assert row is not None
        if row["timed"]:
            raise Unsupported("the query depends on the current time")
        if row["stable"]:
            raise Unsupported(f"STABLE functions may change without their arguments: {row['stable']}")
        if row["sets"]:
            raise Unsupported("set-returning functions are not maintained differentially")

    def _prove(self, definition: str) -> None:
        """The parsed tree, written out again and analysed by PostgreSQL, must be the same query."""
        try:
            written = _comparable(self._canonical(parse(definition).sql(dialect="postgres")))
            if written == _comparable(definition):
                return
            # PostgreSQL reads its own text back with fewer parentheses: (a AND b) AND c, as BETWEEN leaves it.
            same = written == _comparable(self._canonical(definition.rstrip().rstrip(";")))
        except psycopg.errors.InsufficientPrivilege:
            raise
        except psycopg.Error as error:
            raise Unsupported(
                f"the parsed query is not accepted by PostgreSQL: {error.diag.message_primary}"
            ) from error
        if not same:
            raise Unsupported("the parsed query does not mean the same to PostgreSQL")

    def _canonical(self, text: str) -> str:
        """PostgreSQL's own text of a query."""
        with self.conn.transaction(force_rollback=True):
            self.conn.execute(sql.SQL("CREATE TEMP VIEW pgt_proof AS " + text))
            row = self.conn.execute("SELECT pg_get_viewdef('pg_temp.pgt_proof'::regclass)").fetchone()
        assert row is not None
        return str(row[0])


def _check_columns(program: Program) -> None:
    for scan in scans_of(program.plan):
        for _, item in scan.fields:
            if item.attnum == GONE:
                raise SourceChangedError(
                    f"column {item.name} of {scan.relation.label} was dropped or retyped there",
                    "Drop the stream tables that use it, and create them again for the table as it is now.",
                )


def _check_session_values(definition: str) -> None:
    """CURRENT_USER and its kin are another value for the service than for who reads."""
    found = parse(definition).find(
        exp.CurrentUser, exp.SessionUser, exp.CurrentSchema, exp.CurrentRole, exp.CurrentCatalog
    )
    if found is not None:
        raise Unsupported(f"the query depends on who runs it: {found.sql()}")


# Deterministic given the settings that are recorded with the stream table (TimeZone, DateStyle, lc_*, search_path).
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
    """The text without differences that are known to mean nothing (each one is tested)."""
    text = definition.strip()
    text = text.replace(" IS NOT UNKNOWN", " IS NOT NULL").replace(" IS UNKNOWN", " IS NULL")
    text = _NOT_TRUE.sub(r"(NOT (\1 IS \2))", text)
    return _ALIASED_CONSTANT.sub(r"\1\2", text)
