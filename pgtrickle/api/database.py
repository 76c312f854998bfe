"""What a Python user imports: a database, its stream tables, and what a refresh did."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgtrickle.api.errors import clear_errors
from pgtrickle.api.registry import OtherDatabases
from pgtrickle.catalog.gate import pass_gate
from pgtrickle.catalog.install import install, require_installed, require_owner, uninstall, upgrade
from pgtrickle.compile.placement import AcrossDatabases
from pgtrickle.errors import (
    ConnectionFailedError,
    DatabaseFailedError,
    InvalidQueryError,
    NotDifferentiableError,
    NotInTimeError,
    PgtrickleError,
    RefreshError,
    StreamTableNotFoundError,
)
from pgtrickle.ivm.program import Program
from pgtrickle.postgres.connection import connect as open_connection
from pgtrickle.refresh.pipeline import Engine
from pgtrickle.refresh.planning.compiled import Compiled
from pgtrickle.refresh.planning.explain import explain_program
from pgtrickle.refresh.planning.jobs import require_placeable
from pgtrickle.refresh.results import RefreshResult
from pgtrickle.refresh.stream_table import StreamTableRow
from pgtrickle.refresh.verify import Verification, answer_requests, verify
from pgtrickle.refresh.work import OnStep
from pgtrickle.sites.remote.functions import describe_functions, note_functions

__all__ = ["Database", "RefreshResult", "StreamTable", "StreamTableStatus", "Verification", "connect"]

log = logging.getLogger("pgtrickle.api")
DSN_VARIABLE = "PGTRICKLE_DSN"
CONNECT_SECONDS = 15


@dataclass(frozen=True)
class StreamTable:
    """A stream table and its state."""

    id: int
    name: str
    query: str | None  # None for those who may not see it
    schedule: str
    refresh_mode: str
    effective_mode: str | None
    mode_reason: str | None
    status: str
    status_reason: str | None
    key: tuple[str, ...] | None
    fresh_as_of: datetime | None
    owner: str | None


@dataclass(frozen=True)
class StreamTableStatus:
    """How fresh a stream table is, and what its last refresh did."""

    name: str
    status: str
    status_reason: str | None
    refresh_mode: str
    effective_mode: str | None
    mode_reason: str | None
    reinit_reason: str | None
    staleness: float | None  # seconds since the oldest change it lacks was committed, 0 if it lacks none
    errors: int  # failed refreshes since the last good one
    last_error: str | None
    last_status: str | None
    last_action: str | None
    rows_inserted: int | None
    rows_deleted: int | None
    seconds: float | None


def connect(dsn: str | None = None, *, on_step: OnStep | None = None) -> Database:
    """Connect to a database; without a DSN, PGTRICKLE_DSN or libpq's own variables say where."""
    dsn = dsn or os.environ.get(DSN_VARIABLE) or ""
    try:
        known = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # libpq's message repeats the text, and with it a password.
        raise ConnectionFailedError(
            "the DSN is not one that PostgreSQL understands",
            "Write it as postgresql://user@host/database, or as key=value pairs.",
        ) from None
    if "@" in str(known.get("host", "")):
        # The rest of a password would be printed as the host's name.
        raise ConnectionFailedError("the DSN has an @ in its host", "Write an @ in a password as %40.")
    limits = (
        {} if "connect_timeout" in known or "PGCONNECT_TIMEOUT" in os.environ else {"connect_timeout": CONNECT_SECONDS}
    )
    try:
        conn = open_connection(dsn, application_name="pgtrickle", **limits)
    except psycopg.OperationalError as error:
        shown = {name: value for name, value in known.items() if name in {"host", "port", "dbname", "user"}}
        where = " ".join(f"{name}={value}" for name, value in shown.items()) or "libpq's defaults"
        remedy = (
            "See that the server runs and takes connections from here, and that the database and the role exist."
            if known
            else f"Give a DSN with --dsn or {DSN_VARIABLE}, such as postgresql://user@host/database."
        )
        raise ConnectionFailedError(f"cannot connect to {where}: {str(error).strip()}", remedy) from error
    conn.add_notice_handler(log_warning)
    return Database(conn, on_step)


def is_worth_telling(diagnostic: psycopg.errors.Diagnostic) -> bool:
    """Whether it is a warning. That nobody serves requests is for SQL users to know: others do the work themselves."""
    about_service = "no pgtrickle service" in (diagnostic.message_primary or "")
    return diagnostic.severity_nonlocalized == "WARNING" and not about_service


def log_warning(diagnostic: psycopg.errors.Diagnostic) -> None:
    """Log a warning of the server's."""
    if is_worth_telling(diagnostic):
        hint = f" ({diagnostic.message_hint})" if diagnostic.message_hint else ""
        log.warning("%s%s", diagnostic.message_primary, hint)


class Database(OtherDatabases):
    """One PostgreSQL database whose stream tables are looked after."""

    def __init__(self, conn: psycopg.Connection[Any], on_step: OnStep | None = None) -> None:
        self.conn = conn
        self.engine = Engine(conn, on_step=on_step) if on_step is not None else Engine(conn)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.engine.claims.lease.end()
        self.engine.connections.close()
        self.conn.close()

    def install(self, *, service_role: str | None = None) -> int:
        """Create or update the catalog; gives its version."""
        version = install(self.conn, service_role=service_role)
        self.engine.cluster.install()
        return version

    def upgrade(self) -> int:
        version = upgrade(self.conn)
        self.engine.cluster.install()
        return version

    def uninstall(self, *, drop_tables: bool = False) -> list[str]:
        """Remove the catalog; gives statements that only the owners of tables can run."""
        require_owner(self.conn)
        require_installed(self.conn)
        self.engine.cluster.uninstall()
        return uninstall(self.conn, drop_tables=drop_tables)

    def create_stream_table(
        self,
        name: str,
        query: str,
        *,
        schedule: str = "calculated",
        refresh_mode: str = "AUTO",
        placement: str | None = None,
        pooler_compatibility_mode: bool = False,
        initialize: bool = True,
        st_placement: str | None = None,
        output_distribution_column: str | None = None,
    ) -> StreamTable:
        """Create a stream table, and fill it unless told otherwise.

        In a Citus cluster `st_placement` says where it is: local, reference or distributed, by a column if one is given.
        """
        require_installed(self.conn)
        with self._tidy_where_refused(), clear_errors(name):
            in_parts = self._import_named(query, refresh_mode)
        with self._tidy_where_refused(), clear_errors(name), self.conn.transaction():
            compiled, key = self._compile(query, "spark" if in_parts else placement)
            if in_parts:
                _require_placeable(name, compiled)
            if refresh_mode.upper() == "DIFFERENTIAL":
                _require_differential(name, compiled)
            row = self.conn.execute(
                "SELECT pgtrickle.create_stream_table(%s, %s, %s, %s, initialize => false, placement => %s,"
                " key_columns => %s, pooler_compatibility_mode => %s, st_placement => %s, output_distribution_column => %s)",
                (
                    name,
                    query,
                    schedule,
                    refresh_mode,
                    placement,
                    key,
                    pooler_compatibility_mode,
                    st_placement,
                    output_distribution_column,
                ),
            ).fetchone()
            assert row is not None
            id_ = int(row[0])
            mode = "DIFFERENTIAL" if compiled.program is not None and refresh_mode.upper() != "FULL" else "FULL"
            self._note_mode(id_, mode, compiled.reason)
            if in_parts:
                self.engine.subscribe(id_)
        self.engine.cluster.finish(id_)
        if initialize:
            self.engine.refresh([id_], "INITIAL")
        return self._public(self.engine.row(id_, name))

    @contextmanager
    def _tidy_where_refused(self) -> Iterator[None]:
        """What was prepared on the nodes of a cluster goes again if there is an error."""
        try:
            yield
        except (psycopg.Error, PgtrickleError):
            if not (self.conn.broken or self.conn.closed):
                self.engine.cluster.tidy()
            raise

    def _note_mode(self, id_: int, mode: str, reason: str | None) -> None:
        pass_gate(self.conn, "note_mode", id=id_, mode=mode, reason=reason)

    def _compile(self, query: str, placement: str | None) -> tuple[Compiled, list[str] | None]:
        """Analyse a query before it is a stream table; gives its key too."""
        row = self.conn.execute("SELECT coalesce(%s, pgtrickle._setting('placement'))", (placement,)).fetchone()
        on_spark = row is not None and row[0] == "spark"
        with self._candidate(query) as view:
            compiled = self.engine.programs.compile(view, "candidate", "spark" if on_spark else "auto")
            key = _storable_key(compiled.program)
            if key is not None:
                return compiled, list(key)
            # One without a differential plan may have a key all the same.
            found = self.conn.execute("SELECT pgtrickle._find_key(%s::oid::regclass)", (view,)).fetchone()
            assert found is not None
            return compiled, found[0] if compiled.program is None else None

    @contextmanager
    def _candidate(self, query: str) -> Iterator[int]:
        """A query as a temporary view, which is gone afterwards."""
        with self.conn.transaction(force_rollback=True):
            try:
                # The binary format brings the extended protocol, which takes one statement only: a COMMIT in the text
                # would make permanent what follows it.
                local = self.conn.execute(
                    "SELECT pgtrickle._visible_text(pgtrickle._local_text(%s), current_setting('search_path'))",
                    (query,),
                ).fetchone()
                assert local is not None
                view = "CREATE TEMP VIEW pgt_candidate AS " + local[0].rstrip().rstrip(";")
                self.conn.execute(view.encode(), binary=True)
            except psycopg.errors.SyntaxError as error:
                raise InvalidQueryError(
                    f"the query is not valid: {error.diag.message_primary}",
                    "Give one SELECT, VALUES or WITH statement.",
                ) from error
            row = self.conn.execute("SELECT 'pg_temp.pgt_candidate'::regclass::oid::bigint").fetchone()
            assert row is not None
            yield row[0]

    def alter_stream_table(
        self,
        name: str,
        *,
        query: str | None = None,
        schedule: str | None = None,
        refresh_mode: str | None = None,
        placement: str | None = None,
        pooler_compatibility_mode: bool | None = None,
        status: str | None = None,
        lost_members: str | None = None,
    ) -> StreamTable:
        """Change what is given. A new query takes effect at the next refresh, which fills the table anew."""
        id_ = self.id_of(name)
        with clear_errors(name):
            in_parts = query is not None and self._import_named(query)
        with clear_errors(name), self.conn.transaction():
            row = self.engine.row(id_, name)
            new_placement = "spark" if in_parts else placement or row.placement
            compiled, key = self._compile(query, new_placement) if query is not None else (None, None)
            if compiled is not None and in_parts:
                _require_placeable(name, compiled)
            if (refresh_mode or row.refresh_mode).upper() == "DIFFERENTIAL":
                stored = replace(row, placement=new_placement)
                _require_differential(name, compiled or self.engine.programs.compile_stored(stored, "alter"))
            if compiled is not None and row.key_columns is not None and key != row.key_columns:
                raise InvalidQueryError(
                    f"the new query of {name} has another key, which its unique index does not fit",
                    "Drop the stream table and create it again.",
                )
            self.conn.execute(
                "SELECT pgtrickle.alter_stream_table(%s, schedule => %s, refresh_mode => %s, status => %s,"
                " placement => %s, query => %s, pooler_compatibility_mode => %s, lost_members => %s)",
                (name, schedule, refresh_mode, status, placement, query, pooler_compatibility_mode, lost_members),
            )
        return self._public(self.engine.row(id_, name))

    def drop_stream_table(self, name: str, *, cascade: bool = False) -> None:
        id_ = self.id_of(name)
        row = self.engine.row(id_, name)
        with clear_errors(name):
            self.conn.execute("SELECT pgtrickle.drop_stream_table(%s, %s)", (name, cascade))
        # Where one cannot be reached, the service tells it later.
        with suppress(DatabaseFailedError):
            self.engine.remote.unsubscribe_dropped(row.databases)
        if row.on_nodes:
            self.engine.cluster.tidy()

    def _import_named(self, query: str, refresh_mode: str = "AUTO") -> bool:
        """Make the tables of other databases and nodes known that a query names; whether it names any."""
        rows = self.conn.execute(
            "SELECT database, format('%%I.%%I', schema, name) FROM pgtrickle._foreign_names(%s)", (query,)
        ).fetchall()
        for database, table in rows:
            self.import_table(database, table)
        resolved = self._resolve_foreign(query)
        spread = self._spread(query, refresh_mode)
        found = bool(rows) or resolved or spread
        if found:
            with self._candidate(query) as view:
                described = describe_functions(self.engine.remote, view)
            note_functions(self.conn, described)
        return found

    def _resolve_foreign(self, query: str) -> bool:
        """Find the registered databases behind the foreign tables that a query reads; whether there are any."""
        found = self.conn.execute("SELECT EXISTS (SELECT FROM pg_foreign_table)").fetchone()
        if found != (True,):
            return False
        with self._candidate(query) as view:
            rows = self.conn.execute(
                "SELECT relation::oid::bigint FROM pgtrickle._sources(%s::oid::regclass) WHERE kind = 'f'", (view,)
            ).fetchall()
        names = [self.engine.remote.servers.resolve(relation) for (relation,) in rows]
        return any(name is not None for name in names)

    def _spread(self, query: str, refresh_mode: str) -> bool:
        """Have the distributed tables that a query reads captured on all nodes of the cluster; whether there are any."""
        if self.conn.execute("SELECT pgtrickle._has_citus()").fetchone() != (True,):
            return False
        with self._candidate(query) as view:
            tables = self.engine.cluster.distributed(view, refresh_mode)
        self.engine.cluster.spread(tables)
        return bool(tables)

    def stream_tables(self) -> list[StreamTable]:
        """All stream tables of the database."""
        require_installed(self.conn)
        return [self._public(row) for row in self.engine.rows()]

    def stream_table(self, name: str) -> StreamTable:
        return self._public(self.engine.row(self.id_of(name), name))

    def refresh(self, name: str | Sequence[str]) -> list[RefreshResult]:
        """Bring one or several stream tables up to date, in one Spark job.

        Those that can be are refreshed; then the error names all that failed.
        """
        names = [name] if isinstance(name, str) else list(name)
        return self.engine.refresh(self._ids_of(names))

    def refresh_all(self) -> list[RefreshResult]:
        """Bring every stream table of the database up to date that is not suspended.

        Those that can be are refreshed; then the error names all that failed.
        """
        require_installed(self.conn)
        ids = [row.pgt_id for row in self.engine.rows() if row.status != "SUSPENDED"]
        return self.engine.refresh(ids, may_be_dropped=True)

    def verify(self, name: str | Sequence[str]) -> list[Verification]:
        """Refresh stream tables, one after the other, and compare each with its query in the same snapshot.

        What is found is recorded, and nothing else done about it.
        """
        names = [name] if isinstance(name, str) else list(name)
        return [verify(self.engine, id_) for id_ in self._ids_of(names)]

    def reinitialize(self, name: str, reason: str) -> RefreshResult:
        """Re-initialize a stream table: replace its contents with the result of its query."""
        id_ = self.id_of(name)
        self.engine.mark_reinit(id_, reason)
        (result,) = self.engine.refresh([id_])
        return result

    def status(self) -> list[StreamTableStatus]:
        """Freshness and last refresh of all stream tables."""
        require_installed(self.conn)
        with self.conn.cursor(row_factory=psycopg.rows.class_row(StreamTableStatus)) as cursor:
            return cursor.execute(
                "SELECT format('%I.%I', s.pgt_schema, s.pgt_name) AS name, s.status, s.status_reason, s.refresh_mode,"
                " s.effective_mode, s.mode_reason, s.reinit_reason, extract(epoch FROM s.staleness)::float8 AS staleness,"
                " s.consecutive_errors AS errors, s.last_error, h.status AS last_status, h.action AS last_action,"
                " h.rows_inserted, h.rows_deleted, extract(epoch FROM h.end_time - h.start_time)::float8 AS seconds"
                " FROM pgtrickle.pgt_status() AS s LEFT JOIN LATERAL (SELECT r.* FROM pgtrickle.pgt_visible_history AS r"
                " WHERE r.pgt_id = s.pgt_id ORDER BY r.refresh_id DESC LIMIT 1) AS h ON true ORDER BY s.pgt_schema, s.pgt_name"
            ).fetchall()

    def staleness(self, name: str) -> float | None:
        """Seconds since the oldest change that the stream table lacks was committed.

        0 if it lacks none, None before its first refresh.
        """
        row = self.conn.execute("SELECT pgtrickle._staleness(%s)", (self.id_of(name),)).fetchone()
        return row[0] if row is not None else None

    def wait_until_fresh(self, name: str, timeout: float = 60.0) -> None:
        """Return when the stream table includes everything that was committed before the call. Needs a service."""
        require_installed(self.conn)
        with clear_errors(name):
            self.conn.execute(
                "CALL pgtrickle.wait_until_fresh(%s, make_interval(secs => %s))", (name, timeout), prepare=False
            )

    def request_refresh(self, name: str, *, key: str | None = None) -> int:
        """Ask the service for a refresh; gives the request's id. Under a key that was used before it is the same one."""
        require_installed(self.conn)
        with clear_errors(name):
            row = self.conn.execute("SELECT pgtrickle.manual_refresh(%s, %s)", (name, key)).fetchone()
        assert row is not None
        return int(row[0])

    def serve_requests(self) -> dict[str, int]:
        """Do what the pending requests of all roles ask for; returns how many of them are now DONE, FAILED and PENDING."""
        waiting = self.conn.execute(
            "SELECT request_id, pgt_id, kind FROM pgtrickle.pgt_requests WHERE status = 'PENDING' ORDER BY request_id"
        ).fetchall()
        refreshes, comparisons = (
            list(dict.fromkeys(pgt_id for _, pgt_id, asked in waiting if asked == kind))
            for kind in ("REFRESH", "VERIFY")
        )
        self.engine.policy = replace(self.engine.policy, backoff=False)
        self.engine.attempt(refreshes, "REQUEST")
        for pgt_id in comparisons:
            answer_requests(self.engine, pgt_id)
        states = self.conn.execute(
            "SELECT status, count(*)::int FROM pgtrickle.pgt_requests WHERE request_id = ANY (%s) GROUP BY 1",
            ([request for request, _, _ in waiting],),
        ).fetchall()
        return dict(states)

    def wait_for_request(self, name: str, request: int, timeout: float = 60.0) -> None:
        """Return when a request is done; raises what went wrong, or that it was not done in time."""
        try:
            self.conn.execute(
                "CALL pgtrickle._await(%s, %s, clock_timestamp() + make_interval(secs => %s), make_interval(secs => %s))",
                (name, request, timeout, timeout),
                prepare=False,
            )
        except psycopg.errors.QueryCanceled as error:
            raise NotInTimeError(error.diag.message_primary or str(error), error.diag.message_hint) from error
        except psycopg.errors.ExternalRoutineException as error:
            raise RefreshError(error.diag.message_primary or str(error), error.diag.message_hint) from error

    def pause(self) -> None:
        """Start no refresh in this database any more; what runs is finished, changes go on being captured."""
        self.conn.execute("SELECT pgtrickle.pause()")

    def resume(self) -> None:
        """Go on after a pause."""
        self.conn.execute("SELECT pgtrickle.resume()")

    def drain(self, timeout: float = 60.0) -> None:
        """Pause, and return when nothing runs any more."""
        self.conn.execute("CALL pgtrickle.drain(make_interval(secs => %s))", (timeout,))

    def explain(self, name: str) -> str:
        """The delta plan as a tree: what runs where, and why."""
        row = self.engine.row(self.id_of(name), name)
        compiled = self.engine.programs.compile_stored(row, "explain")
        return explain_program(row, compiled)

    def history(self, name: str, limit: int = 20) -> list[dict[str, Any]]:
        """The last refreshes of a stream table, newest first."""
        with self.conn.cursor(row_factory=psycopg.rows.dict_row) as cursor:
            return cursor.execute(
                "SELECT refresh_id, start_time, end_time, status, action, initiated_by, reason, rows_in, rows_inserted,"
                " rows_deleted, phases, error, sqlstate FROM pgtrickle.pgt_visible_history WHERE pgt_id = %s"
                " ORDER BY refresh_id DESC LIMIT %s",
                (self.id_of(name), limit),
            ).fetchall()

    def id_of(self, name: str) -> int:
        return self._ids_of([name])[0]

    def _ids_of(self, names: Sequence[str]) -> list[int]:
        require_installed(self.conn)
        found = self.conn.execute(
            "SELECT n, pgtrickle._find(n) FROM unnest(%s::text[]) WITH ORDINALITY AS u(n, i) ORDER BY i", (list(names),)
        ).fetchall()
        for name, id_ in found:
            if id_ is None:
                known = ", ".join(table.name for table in self.stream_tables()) or "none"
                raise StreamTableNotFoundError(f"there is no stream table {name}", f"Stream tables here: {known}.")
        return [id_ for _, id_ in found]

    @staticmethod
    def _public(row: StreamTableRow) -> StreamTable:
        return StreamTable(
            row.pgt_id,
            row.label,
            row.defining_query,
            row.schedule,
            row.refresh_mode,
            row.effective_mode,
            row.mode_reason,
            row.status,
            row.status_reason,
            tuple(row.key_columns) if row.key_columns is not None else None,
            row.data_timestamp,
            row.owner,
        )


def _require_differential(name: str, compiled: Compiled) -> None:
    if compiled.program is None:
        part = f": {compiled.fragment}" if compiled.fragment else ""
        raise NotDifferentiableError(
            f"{name} cannot be maintained differentially: {compiled.reason}{part}",
            "Use refresh_mode AUTO or FULL, or change that part of the query.",
        )


def _require_placeable(name: str, compiled: Compiled) -> None:
    """What reads several databases is computed on Spark, or not at all."""
    reason, part = compiled.reason, compiled.fragment
    if compiled.program is not None:
        try:
            require_placeable(compiled.program)
        except AcrossDatabases as error:
            reason, part = str(error), None
        else:
            return
    raise NotDifferentiableError(
        f"{name} reads other databases, and no database can compute it alone: {reason}{f': {part}' if part else ''}",
        "Change that part of the query, or compute it in one of them: a stream table there can be read here."
        " In a Citus cluster, refresh_mode FULL has the coordinator compute it, at no moment common to all nodes.",
    )


def _storable_key(program: Program | None) -> Iterable[str] | None:
    """The query's key, where an index can hold it."""
    if program is None or program.key is None:
        return None
    types = {column.name: column.type for column in program.output}
    return program.key if all(types[name].groupable for name in program.key) else None
