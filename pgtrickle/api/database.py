"""The public Python API: connect to a database, manage its stream tables, and refresh them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import psycopg

from pgtrickle.api.compiled import require_differential, require_placement, storable_key
from pgtrickle.api.connection import open_from
from pgtrickle.api.errors import clear_errors
from pgtrickle.api.models import StreamTable, StreamTableStatus
from pgtrickle.api.registry import OtherDatabases
from pgtrickle.catalog.gate import pass_gate
from pgtrickle.catalog.install import install, require_installed, require_owner, uninstall, upgrade
from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.enums import RefreshMode, Status
from pgtrickle.errors import (
    DatabaseFailedError,
    InvalidQueryError,
    NotInTimeError,
    PgtrickleError,
    RefreshError,
    StreamTableNotFoundError,
)
from pgtrickle.refresh.engine import Engine
from pgtrickle.refresh.planning.compiled import Compiled
from pgtrickle.refresh.planning.explain import explain_program
from pgtrickle.refresh.progress import OnStep
from pgtrickle.refresh.results import RefreshResult
from pgtrickle.refresh.verify import Verification, answer_requests, verify
from pgtrickle.sites.remote.functions import describe_functions, note_functions

__all__ = ["Database", "RefreshResult", "StreamTable", "StreamTableStatus", "Verification", "connect"]


def connect(dsn: str | None = None, *, on_step: OnStep | None = None) -> Database:
    """Connect to a database and return it as a context manager.

    Without a DSN, the environment variable `PGTRICKLE_DSN` or libpq's own variables determine the database. `on_step`
    is called with the name of each step of a refresh.
    """
    return Database(open_from(dsn), on_step)


class Database(OtherDatabases):
    """A PostgreSQL database and its stream tables.

    A context manager that closes the connection on exit. Do not use one `Database` in several threads at once.
    """

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
        """Release all claims and close the connections."""
        self.engine.claims.lease.end()
        self.engine.connections.close()
        self.conn.close()

    def install(self, *, service_role: str | None = None) -> int:
        """Create the catalog, or upgrade an existing one, and return its version.

        `service_role` is the login that refreshes the stream tables. If it is not given, it stays the same; initially
        it is the installing role.
        """
        version = install(self.conn, service_role=service_role)
        self.engine.cluster.install()
        return version

    def upgrade(self) -> int:
        """Upgrade the catalog to the version of this release and return that version."""
        version = upgrade(self.conn)
        self.engine.cluster.install()
        return version

    def uninstall(self, *, drop_tables: bool = False) -> list[str]:
        """Remove the catalog and return the statements that remain to be run by the owners of tables.

        Stream tables remain as plain tables unless `drop_tables` is set.
        """
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
        """Create a stream table, and fill it unless `initialize` is false.

        In a Citus cluster, `st_placement` determines where its rows are stored: `local`, `reference` or `distributed`.
        A distributed table is distributed by `output_distribution_column` if you pass one.
        """
        require_installed(self.conn)
        with self._tidy_where_refused(), clear_errors(name):
            in_parts = self._import_named(query, refresh_mode)
        with self._tidy_where_refused(), clear_errors(name), self.conn.transaction():
            compiled, key = self._compile(query, "spark" if in_parts else placement)
            if in_parts:
                require_placement(name, compiled)
            if refresh_mode.upper() == RefreshMode.DIFFERENTIAL:
                require_differential(name, compiled)
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
            differential = compiled.program is not None and refresh_mode.upper() != RefreshMode.FULL
            mode = RefreshMode.DIFFERENTIAL if differential else RefreshMode.FULL
            self._note_mode(id_, mode, compiled.reason)
            if in_parts:
                self.engine.subscribe(id_)
        self.engine.cluster.finish(id_)
        if initialize:
            self.engine.refresh([id_], "INITIAL")
        return self._public(self.engine.row(id_, name))

    @contextmanager
    def _tidy_where_refused(self) -> Iterator[None]:
        """Undo the preparations on the nodes of a Citus cluster if the block raises an error."""
        try:
            yield
        except (psycopg.Error, PgtrickleError):
            if not (self.conn.broken or self.conn.closed):
                self.engine.cluster.tidy()
            raise

    def _note_mode(self, id_: int, mode: str, reason: str | None) -> None:
        pass_gate(self.conn, "record_mode", id=id_, mode=mode, reason=reason)

    def _compile(self, query: str, placement: str | None) -> tuple[Compiled, list[str] | None]:
        """Compile a query that is not a stream table yet; return the result and the query's key."""
        row = self.conn.execute("SELECT coalesce(%s, pgtrickle._setting('placement'))", (placement,)).fetchone()
        on_spark = row is not None and row[0] == "spark"
        with self._candidate(query) as view:
            compiled = self.engine.programs.compile(view, "candidate", "spark" if on_spark else "auto")
            key = storable_key(compiled.program)
            if key is not None:
                return compiled, list(key)
            # A query without a differential plan can still have a key.
            found = self.conn.execute("SELECT pgtrickle._find_key(%s::oid::regclass)", (view,)).fetchone()
            assert found is not None
            return compiled, found[0] if compiled.program is None else None

    @contextmanager
    def _candidate(self, query: str) -> Iterator[int]:
        """Create a temporary view of a query, yield its OID, and roll back."""
        with self.conn.transaction(force_rollback=True):
            try:
                # The binary format forces the extended protocol, which accepts a single statement only. Otherwise a
                # COMMIT in the text would make everything after it permanent.
                local = self.conn.execute(
                    "SELECT pgtrickle._without_row_ids(pgtrickle._localized_query(%s), current_setting('search_path'))",
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
        """Change the properties that you pass.

        A new query takes effect at the next refresh, which re-initializes the table. It must have the same columns and
        key. `status` suspends or resumes the stream table. `lost_members` is `wait` or `keep`: while a database of a
        set cannot be reached, wait for it, or continue with what was last read from it.
        """
        id_ = self.id_of(name)
        with clear_errors(name):
            in_parts = query is not None and self._import_named(query)
        with clear_errors(name), self.conn.transaction():
            row = self.engine.row(id_, name)
            new_placement = "spark" if in_parts else placement or row.placement
            compiled, key = self._compile(query, new_placement) if query is not None else (None, None)
            if compiled is not None and in_parts:
                require_placement(name, compiled)
            if (refresh_mode or row.refresh_mode).upper() == RefreshMode.DIFFERENTIAL:
                stored = replace(row, placement=new_placement)
                require_differential(name, compiled or self.engine.programs.compile_stored(stored, "alter"))
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
        """Drop a stream table; with `cascade` also the stream tables and views that read it."""
        id_ = self.id_of(name)
        row = self.engine.row(id_, name)
        with clear_errors(name):
            self.conn.execute("SELECT pgtrickle.drop_stream_table(%s, %s)", (name, cascade))
        # If a remote database cannot be reached now, the service unsubscribes later.
        with suppress(DatabaseFailedError):
            self.engine.remote.unsubscribe_dropped(row.databases)
        if row.on_nodes:
            self.engine.cluster.tidy()

    def _import_named(self, query: str, refresh_mode: str = "AUTO") -> bool:
        """Import the tables of remote databases and Citus nodes that a query reads; return whether there are any."""
        rows = self.conn.execute(
            "SELECT database, format('%%I.%%I', schema, name) FROM pgtrickle._three_part_names(%s)", (query,)
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
        """Determine the registered databases behind the foreign tables of a query; return whether any was found."""
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
        """Set up capture on all Citus nodes for the distributed tables of a query; return whether there are any."""
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
        """The stream table with this name."""
        return self._public(self.engine.row(self.id_of(name), name))

    def refresh(self, name: str | Sequence[str]) -> list[RefreshResult]:
        """Refresh one or several stream tables, sources before their readers, with as few Spark jobs as possible.

        If some fail, all others are still refreshed. Then an error is raised that names all that failed.
        """
        names = [name] if isinstance(name, str) else list(name)
        return self.engine.refresh(self._ids_of(names))

    def refresh_all(self) -> list[RefreshResult]:
        """Refresh all stream tables of the database that are not suspended.

        If some fail, all others are still refreshed. Then an error is raised that names all that failed.
        """
        require_installed(self.conn)
        ids = [row.pgt_id for row in self.engine.rows() if row.status != Status.SUSPENDED]
        return self.engine.refresh(ids, may_be_dropped=True)

    def verify(self, name: str | Sequence[str]) -> list[Verification]:
        """Refresh stream tables one by one, and compare each with its query in the same snapshot.

        The results are recorded. Differences are not repaired.
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
        """The freshness and the last refresh of all stream tables."""
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
        """Seconds since the oldest change was committed that the stream table does not include yet.

        0 if there is no such change, `None` before the first refresh.
        """
        row = self.conn.execute("SELECT pgtrickle._staleness(%s)", (self.id_of(name),)).fetchone()
        return row[0] if row is not None else None

    def wait_until_fresh(self, name: str, timeout: float = 60.0) -> None:
        """Wait until the stream table includes everything that was committed before the call.

        Needs a running service.
        """
        require_installed(self.conn)
        with clear_errors(name):
            self.conn.execute(
                "CALL pgtrickle.wait_until_fresh(%s, make_interval(secs => %s))", (name, timeout), prepare=False
            )

    def request_refresh(self, name: str, *, key: str | None = None) -> int:
        """Request a refresh from the service and return the id of the request.

        If you pass a `key` that you have used before for this stream table, you get the same request again. A failed
        request is filed again.
        """
        require_installed(self.conn)
        with clear_errors(name):
            row = self.conn.execute("SELECT pgtrickle.manual_refresh(%s, %s)", (name, key)).fetchone()
        assert row is not None
        return int(row[0])

    def serve_requests(self, *, on_step: OnStep | None = None) -> dict[str, int]:
        """Serve the pending requests of all roles; return how many of them are now `DONE`, `FAILED` and `PENDING`.

        `on_step` is called with the name of each step of a refresh.
        """
        waiting = self.conn.execute(
            "SELECT request_id, pgt_id, kind FROM pgtrickle.pgt_requests WHERE status = 'PENDING' ORDER BY request_id"
        ).fetchall()
        refreshes, comparisons = (
            list(dict.fromkeys(pgt_id for _, pgt_id, asked in waiting if asked == kind))
            for kind in ("REFRESH", "VERIFY")
        )
        self.engine.policy = replace(self.engine.policy, backoff=False)
        self.engine.attempt(refreshes, "REQUEST", on_step=on_step)
        for pgt_id in comparisons:
            answer_requests(self.engine, pgt_id)
        states = self.conn.execute(
            "SELECT status, count(*)::int FROM pgtrickle.pgt_requests WHERE request_id = ANY (%s) GROUP BY 1",
            ([request for request, _, _ in waiting],),
        ).fetchall()
        return dict(states)

    def wait_for_request(self, name: str, request: int, timeout: float = 60.0) -> None:
        """Wait until a request is done.

        Raises `RefreshError` if the request failed, and `NotInTimeError` if it was not done in time.
        """
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
        """Stop services from starting refreshes in this database.

        Running refreshes finish, and changes continue to be captured.
        """
        self.conn.execute("SELECT pgtrickle.pause()")

    def resume(self) -> None:
        """Let services refresh again after `pause()` or `drain()`."""
        self.conn.execute("SELECT pgtrickle.resume()")

    def drain(self, timeout: float = 60.0) -> None:
        """Pause, and wait for running refreshes to finish."""
        self.conn.execute("CALL pgtrickle.drain(make_interval(secs => %s))", (timeout,))

    def explain(self, name: str) -> str:
        """The delta plan as a tree: what runs where, and why."""
        row = self.engine.row(self.id_of(name), name)
        compiled = self.engine.programs.compile_stored(row, "explain")
        return explain_program(row, compiled)

    def history(self, name: str, limit: int = 20) -> list[dict[str, Any]]:
        """The latest refreshes of a stream table, newest first."""
        with self.conn.cursor(row_factory=psycopg.rows.dict_row) as cursor:
            return cursor.execute(
                "SELECT refresh_id, start_time, end_time, status, action, initiated_by, reason, rows_in, rows_inserted,"
                " rows_deleted, phases, error, sqlstate FROM pgtrickle.pgt_visible_history WHERE pgt_id = %s"
                " ORDER BY refresh_id DESC LIMIT %s",
                (self.id_of(name), limit),
            ).fetchall()

    def id_of(self, name: str) -> int:
        """The `pgt_id` of a stream table."""
        return self._ids_of([name])[0]

    def _ids_of(self, names: Sequence[str]) -> list[int]:
        require_installed(self.conn)
        found = self.conn.execute(
            "SELECT n, pgtrickle._find_id(n) FROM unnest(%s::text[]) WITH ORDINALITY AS u(n, i) ORDER BY i",
            (list(names),),
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
