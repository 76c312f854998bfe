"""Running stream tables that do not read each other through the stages of a refresh."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psycopg

from pgtrickle.catalog.query_files import load_query
from pgtrickle.errors import InvalidQueryError
from pgtrickle.postgres.connection import idle
from pgtrickle.postgres.fence import leave, write_as_owner
from pgtrickle.refresh.apply.record import Recorder
from pgtrickle.refresh.apply.transaction import apply
from pgtrickle.refresh.apply.writer import Diverged
from pgtrickle.refresh.claim.claims import Claims
from pgtrickle.refresh.compute.computing import compute
from pgtrickle.refresh.planning.programs import Plans
from pgtrickle.refresh.progress import OnStep, Progress, log
from pgtrickle.refresh.reading import SnapshotReader
from pgtrickle.refresh.recapture import altered_since, have_shards_moved, keeps_changing, mark_reinit, recapture
from pgtrickle.refresh.results import Outcome, RefreshResult
from pgtrickle.refresh.stages import Claimed, Computed, Decided
from pgtrickle.sites.home_only import HomeOnly
from pgtrickle.sites.outside import OutsideSites
from pgtrickle.sites.protocol import Sites

_UNDEFINED = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.UndefinedObject,
    psycopg.errors.InvalidSchemaName,
)


@dataclass(frozen=True)
class Pipeline:
    """Runs stream tables through the stages, and cleans up after those that fail."""

    conn: psycopg.Connection[Any]
    claims: Claims
    reading: SnapshotReader
    outside: OutsideSites
    recorder: Recorder
    on_step: OnStep

    @property
    def plans(self) -> Plans:
        return self.reading.planner.programs.plans

    def sites_of(self, tables: Iterable[Claimed]) -> Sites:
        """The sites that take part in the refresh of these stream tables."""
        if any(table.row.in_parts or table.row.on_citus for table in tables):
            return self.outside
        return HomeOnly()

    def refresh_level(self, ids: Sequence[int], outcome: Outcome) -> None:
        """Refresh stream tables that do not read each other. Those whose sources were altered are refreshed again."""
        for is_last in (False, True):
            ids = self._refresh_once(ids, outcome, is_last=is_last)
            if not ids:
                return

    def _refresh_once(self, ids: Sequence[int], outcome: Outcome, *, is_last: bool) -> list[int]:
        """Refresh with one cut, one Spark job and an apply for each; return the stream tables to be refreshed again."""
        progress = Progress(self.conn, self.on_step)
        claimed: list[Claimed] = []
        applied: list[Computed] = []
        again: list[int] = []
        with progress.resources:
            try:
                claimed, taken = self.claims.claim(ids, all_or_none=False)
                outcome.taken += taken
                progress.note_claims(claimed)
                sites = self.sites_of(claimed)
                claimed = self._follow(claimed, sites, progress)
                self.check_parts(claimed, progress)
                fetched = self.reading.read(progress.failed.healthy(claimed), sites, progress)
                stale = self._recapture_or_fail([table.decided for table in fetched], sites, progress, is_last=is_last)
                again = list(dict.fromkeys(table.row.pgt_id for table in stale))
                fetched = [table for table in fetched if table.row.pgt_id not in again]
                computed = compute(progress.failed.healthy(fetched), progress)
                del fetched  # frees the rows before the applies
                sites.prove([table.decided for table in computed], progress.failed)
                for table in progress.failed.healthy(computed):
                    result = progress.attempt(table, partial(self.apply, table, progress))
                    if result is not None:
                        outcome.results.append(result)
                        applied.append(table)
                        progress.on_step("committed")
                again += self._reinitialize_diverged(computed, progress, is_last=is_last)
                again += self._retry_moved_shards(claimed, progress, is_last=is_last)
            except BaseException as error:
                done = {table.row.pgt_id for table in applied}
                self.give_up([one for one in claimed if one.row.pgt_id not in done], progress, error, ids)
                raise
        failed = [table for table in claimed if progress.failed.of(table) is not None]
        self.give_up(failed, progress)
        outcome.failures |= {table.row.pgt_id: progress.failed.errors[table.row.pgt_id] for table in failed}
        outcome.names |= {table.row.pgt_id: table.row.label for table in failed}
        self.finish(applied, sites)
        return again

    def apply(self, table: Computed, progress: Progress) -> RefreshResult:
        """Apply the delta of one stream table."""
        phases = progress.phases[table.row.pgt_id]
        result = apply(self.conn, table, phases, self.recorder, progress.on_step)
        progress.reached(
            "apply", table, action=result.action, inserted=result.rows_inserted, deleted=result.rows_deleted
        )
        return result

    def _follow(self, claimed: Sequence[Claimed], sites: Sites, progress: Progress) -> list[Claimed]:
        """The stream tables, bound again to sources that have changed their site."""
        rows = sites.follow_placements(claimed, progress.failed)
        for pgt_id in rows:
            self.plans.forget(pgt_id)
        return [replace(table, row=rows.get(table.row.pgt_id, table.row)) for table in claimed]

    def _recapture_or_fail(
        self, tables: Sequence[Decided], sites: Sites, progress: Progress, *, is_last: bool
    ) -> list[Decided]:
        """Stream tables to be read again, because capture had to be adapted or their sources were altered meanwhile."""
        tables = progress.failed.healthy(tables)
        found = [] if is_last else recapture(self.conn, tables, sites, self.plans, progress)
        ids = {table.row.pgt_id for table in found}
        rest = [table for table in progress.failed.healthy(tables) if table.row.pgt_id not in ids]
        altered = [*altered_since(self.conn, rest), *sites.altered(rest, progress.failed)]
        if is_last and altered:
            for table in altered:
                error = keeps_changing(f"partitions, shards or capture triggers below {table.row.label}")
                progress.failed.add(error, [table])
            return found
        return [*found, *progress.failed.healthy(altered)]

    def _reinitialize_diverged(self, tables: Sequence[Computed], progress: Progress, *, is_last: bool) -> list[int]:
        """Stream tables that do not hold the rows they should, to be re-initialized at once."""
        found = [table for table in tables if isinstance(progress.failed.of(table), Diverged)]
        if is_last:
            return []
        for table in found:
            mark_reinit(self.conn, table.row.pgt_id, str(progress.failed.of(table)))
            progress.failed.forgive(table)
        return [table.row.pgt_id for table in found]

    def _retry_moved_shards(self, tables: Sequence[Claimed], progress: Progress, *, is_last: bool) -> list[int]:
        """Stream tables that failed because shards were moved away while they were read, to be read again once."""
        again = []
        for table in tables:
            decided = progress.decided.get(table.row.pgt_id)
            if progress.failed.of(table) is None or decided is None or table.row.pgt_id in progress.staged:
                continue
            if have_shards_moved(self.conn, decided):
                progress.failed.forgive(table)
                if is_last:
                    progress.failed.add(keeps_changing(f"shards below {table.row.label}"), [table])
                else:
                    again.append(table.row.pgt_id)
        return again

    def give_up(
        self,
        tables: Sequence[Claimed],
        progress: Progress,
        cause: BaseException | None = None,
        ids: Sequence[int] = (),
    ) -> None:
        """Release the claims and record the failures.

        If the connection is lost, neither happens, and the next process takes over.
        """
        if (not tables and not ids) or self.conn.broken or self.conn.closed:
            return
        with idle(self.conn) as conn:
            for table in tables:
                error = self._with_search_path(table, progress.failed.of(table))
                if error is not None:
                    progress.failed.add(error, [table])
                if table.row.pgt_id in progress.staged:
                    progress.staged[table.row.pgt_id].drop(conn)
                progress.reached("failed", table, error=type(error or cause).__name__)
                try:
                    self.recorder.record_failure(conn, table, error or cause)
                except psycopg.errors.LockNotAvailable:  # held by its owner, for example; the others must not wait
                    log.warning("a failure cannot be recorded", extra={"stream_table": table.row.label})
                    continue
                problem = progress.failed.problems.get(table.row.pgt_id)
                if problem is not None:
                    conn.execute(
                        "UPDATE pgtrickle.pgt_stream_tables SET status = 'SUSPENDED', status_reason = %s"
                        " WHERE pgt_id = %s",
                        (problem, table.row.pgt_id),
                    )
            self.claims.release(conn, ids)  # also those taken when an interruption came during the claim

    def _with_search_path(self, table: Claimed, error: Exception | None) -> Exception | None:
        """The error of a refresh. If a function of the query may have missed a name, it explains its search_path."""
        compiled = self.plans.compiled.get(table.row.pgt_id)
        if not isinstance(error, _UNDEFINED) or compiled is None or not compiled.own_code:
            return error
        path = table.row.session_settings.get("search_path")
        clear = InvalidQueryError(
            f"{table.row.label} cannot be refreshed: {error.diag.message_primary or error}",
            "A refresh runs the functions of a query with search_path = pg_catalog, pg_temp. If one of them names it,"
            f" write the schema before it, or ALTER FUNCTION ... SET search_path = {path};",
        )
        clear.__cause__ = error
        return clear

    def check_parts(self, tables: Sequence[Claimed], progress: Progress) -> None:
        """Let stream tables fail that lack a part or a right. `give_up()` suspends them: a retry cannot help."""
        for table in progress.failed.healthy(tables):
            if table.row.problem is not None:
                progress.failed.suspend(table, table.row.problem)
            elif table.row.outdated:
                progress.attempt(table, partial(self._renew_functions, table.row.pgt_id))

    def _renew_functions(self, pgt_id: int) -> None:
        """Replace owner functions that an earlier version made. The old functions run the commands, as the owner."""
        with self.conn.transaction():
            rows = self.conn.execute("SELECT pgtrickle._renew_owner_functions(%s)", (pgt_id,)).fetchall()
            for (command,) in rows:
                write_as_owner(self.conn, pgt_id, command, None, {})
            self.conn.execute("SELECT pgtrickle._end_renewal(%s)", (pgt_id,))
            leave(self.conn, {}, ddl=True)

    def finish(self, tables: Sequence[Computed], sites: Sites) -> None:
        """After the applies: stretch schedules that are too short, and purge changes that all readers have applied."""
        if tables and self.recorder.policy.backoff:
            seconds = time.monotonic() - min(table.decided.claimed.started for table in tables)
            parameters = {"ids": [table.row.pgt_id for table in tables], "seconds": seconds}
            self.conn.execute(load_query("stretch"), parameters)
        decided = [table.decided for table in tables]
        sources = [source for table in decided for source in table.sources if not source.database]
        for name in sorted({source.stable_name for source in sources if source.stable_name}):
            self.conn.execute("SELECT pgtrickle._purge(%s)", (name,))
        sites.finish(decided)
