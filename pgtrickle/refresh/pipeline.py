"""The refresh pipeline: claim, cut, fetch, Spark, apply.

All state that must survive is in the catalog. A process that dies between two steps leaves the stream table unchanged;
the next refresh starts from the frontier that is stored with the rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.rows import dict_row

from pgtrickle.catalog.analysis import load_query
from pgtrickle.catalog.problems import lacking
from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.errors import (
    InvalidQueryError,
    PgtrickleError,
    RefreshError,
    SourceChangedError,
    SourceLockedError,
    StreamTableNotFoundError,
)
from pgtrickle.frontier.frontier import Frontier
from pgtrickle.postgres.connection import be_pooled, idle, pooled_for_now, trusting_only_catalog
from pgtrickle.postgres.fence import leave, write_as_owner
from pgtrickle.refresh.apply.load import Staged
from pgtrickle.refresh.apply.transaction import Diverged, apply_delta, record_failure, record_no_data, run_as_owner
from pgtrickle.refresh.atomic_group import refresh_atomically
from pgtrickle.refresh.claim.claims import Claims
from pgtrickle.refresh.claim.lease import BorrowedLease, Lease
from pgtrickle.refresh.compute.shared_text import Input
from pgtrickle.refresh.compute.spark_jobs import run_jobs
from pgtrickle.refresh.failures import Policy
from pgtrickle.refresh.fetch.helper_process import HelperProcesses
from pgtrickle.refresh.planning.programs import Plans, Programs
from pgtrickle.refresh.results import Outcome, RefreshResult
from pgtrickle.refresh.snapshot_reader import SnapshotReader
from pgtrickle.refresh.work import OnStep, Work
from pgtrickle.sites.citus.cluster import Cluster
from pgtrickle.sites.remote.connections import Connections
from pgtrickle.sites.remote.databases import RemoteDatabases
from pgtrickle.sites.sets import Sets

log = logging.getLogger("pgtrickle.engine")

_UNDEFINED = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.UndefinedObject,
    psycopg.errors.InvalidSchemaName,
)


@dataclass
class Engine:
    """Refreshes the stream tables of one database over one connection."""

    conn: psycopg.Connection[Any]
    on_step: OnStep = lambda name: None
    lease: Lease | BorrowedLease | None = None
    policy: Policy = field(default_factory=Policy)
    plans: Plans = field(default_factory=Plans)  # of this database; several engines may share them
    connections: Connections = field(default_factory=Connections)  # to remote databases; all engines may share them
    helpers: HelperProcesses | None = None  # processes that read many changes; all engines may share them
    statements: list[str] = field(default_factory=list)  # that the last refresh sent to the sources

    def __post_init__(self) -> None:
        self.claims = Claims(self.conn, self.lease or Lease(self.conn))
        self.programs = Programs(self.conn, self.plans)
        self.remote = RemoteDatabases(self.conn, self.connections)
        self.sets = Sets(self.remote)
        self.cluster = Cluster(self.remote)
        self.reading = SnapshotReader(
            self.conn,
            self.programs,
            self.remote,
            lambda name: self.on_step(name),
            self.statements,
            helpers=self.helpers,
        )

    def refresh(
        self, ids: Sequence[int], initiated_by: str = "MANUAL", *, may_be_dropped: bool = False
    ) -> list[RefreshResult]:
        """Refresh the given stream tables, sources before their readers.

        Refreshes as many of them as possible, then raises the errors of the others.
        """
        names = self._names(ids)
        outcome = self.attempt(ids, initiated_by)
        outcome.raise_problems(len(ids))
        results = {result.pgt_id: result for result in outcome.results}
        for id_ in ids:
            if id_ not in results and not may_be_dropped:
                raise _dropped(names.get(id_, f"stream table {id_}"))
        return [results[id_] for id_ in ids if id_ in results]

    def attempt(
        self,
        ids: Sequence[int],
        initiated_by: str,
        *,
        atomic: bool = False,
        before_commit: Callable[[Work], None] | None = None,
    ) -> Outcome:
        """Refresh the stream tables that no other process has claimed.

        If one fails, the others are refreshed all the same, including those that read it. With `atomic`, all are
        refreshed in one transaction if that is possible this time, so that readers see all of them before the refresh
        or all after it. Only then is `before_commit` called, in that transaction and its snapshot.
        """
        self.statements.clear()
        with self.claims.lease.kept(), trusting_only_catalog(self.conn), pooled_for_now(self.conn):
            levels = self._levels(ids)
            if atomic and (len(ids) > 1 or before_commit is not None):
                result = refresh_atomically(self, levels, initiated_by, before_commit)
                if result is not None:
                    self._name_failures(result)
                    return replace(result, atomic=True)
            outcome = Outcome()
            for level in levels:
                try:
                    outcome += self._refresh_level(level, initiated_by, retry=True)
                except (psycopg.Error, PgtrickleError) as error:
                    if self.conn.broken or self.conn.closed:
                        raise
                    outcome.failures |= dict.fromkeys(level, error)
            self._name_failures(outcome)
            return outcome

    def _name_failures(self, outcome: Outcome) -> None:
        """Add the names of stream tables that failed, and replace the errors of those that were dropped meanwhile."""
        if not outcome.failures:
            return
        found = self._names(list(outcome.failures))
        outcome.names |= found
        for id_ in outcome.failures.keys() - found.keys():
            outcome.failures[id_] = _dropped(outcome.names.get(id_, f"stream table {id_}"))

    def _names(self, ids: Sequence[int]) -> dict[int, str]:
        """The names of stream tables, quoted as in SQL, by id."""
        query = "SELECT pgt_id, format('%%I.%%I', pgt_schema, pgt_name) FROM pgtrickle.pgt_stream_tables"
        return dict(self.conn.execute(f"{query} WHERE pgt_id = ANY (%s)", (list(ids),)).fetchall())

    def subscribe(self, pgt_id: int) -> None:
        """Start capture of the changes that a stream table reads in remote databases."""
        work = Work(self.row(pgt_id), 0)
        self.remote.subscribe(work, {source.relid for source in self.remote.sources([work])})
        if work.error is not None:
            raise work.error

    def rows(self, ids: Sequence[int] | None = None) -> list[StreamTableRow]:
        """The catalog rows of the given stream tables, or of all."""
        with trusting_only_catalog(self.conn), self.conn.cursor(row_factory=dict_row) as cursor:
            rows = cursor.execute(load_query("stream_tables"), {"ids": list(ids) if ids is not None else None})
            return [StreamTableRow(**row) for row in rows]

    def row(self, pgt_id: int, name: str | None = None) -> StreamTableRow:
        """The catalog row of one stream table; `name` is for the error if it was dropped meanwhile."""
        rows = self.rows([pgt_id])
        if not rows:
            raise StreamTableNotFoundError(f"{name or f'stream table {pgt_id}'} was dropped by another transaction")
        return rows[0]

    def _levels(self, ids: Sequence[int]) -> list[list[int]]:
        """The stream tables by level: those of one level do not read each other, and sources come before readers."""
        edges = self.conn.execute(
            "SELECT d.pgt_id, u.pgt_id FROM pgtrickle.pgt_dependencies d"
            " JOIN pgtrickle.pgt_stream_tables u ON u.pgt_relid = coalesce(d.through, d.source_relid)"
            " WHERE d.pgt_id = ANY (%s)",
            (list(ids),),
        ).fetchall()
        depth = dict.fromkeys(ids, 0)
        for _ in ids:
            for reader, source in edges:
                if source in depth:
                    depth[reader] = max(depth[reader], depth[source] + 1)
        return [[id_ for id_ in ids if depth[id_] == level] for level in range(max(depth.values(), default=-1) + 1)]

    def _refresh_level(self, ids: Sequence[int], initiated_by: str, *, retry: bool) -> Outcome:
        """Refresh stream tables that do not read each other, with one cut, one Spark job and an apply for each."""
        works: list[Work] = []
        outcome = Outcome()
        again: list[int] = []
        try:
            works, outcome.taken = self.claim(ids, all_or_none=False)
            works = self._follow_placements(works)
            self.check_parts(works)
            self.reading.read([work for work in works if work.error is None])
            healthy = [work for work in works if work.error is None]
            again = self._retrack(healthy) if retry else []
            again += self._altered_meanwhile([work for work in healthy if work.row.pgt_id not in again], retry=retry)
            self.compute([work for work in works if work.error is None and work.row.pgt_id not in again])
            self.remote.prove([work for work in works if work.row.pgt_id not in again])
            for work in works:
                if work.error is not None or work.row.pgt_id in again:
                    continue
                try:
                    outcome.results.append(self.apply(work, initiated_by))
                except Diverged as error:
                    if not retry:
                        work.error = error
                        continue
                    self.mark_reinit(work.row.pgt_id, str(error))
                    again.append(work.row.pgt_id)
                except (psycopg.Error, PgtrickleError) as error:
                    if self.conn.broken or self.conn.closed:
                        raise
                    work.error = error
        except BaseException as error:
            self.give_up([work for work in works if not work.applied], error, initiated_by, ids)
            raise
        finally:
            for work in works:
                if work.large is not None:
                    work.large.release()
        again += self._lost_shards(works, retry=retry)
        self.give_up([work for work in works if work.error is not None], None, initiated_by)
        outcome.failures = {work.row.pgt_id: work.error for work in works if work.error is not None}
        outcome.names = {work.row.pgt_id: work.row.label for work in works if work.error is not None}
        self.finish([work for work in works if work.applied])
        if again:
            outcome += self._refresh_level(again, initiated_by, retry=False)
        return outcome

    def _retrack(self, works: Sequence[Work]) -> list[int]:
        """Make capture fit sources that were altered, before the stream tables on them are re-initialized.

        Returns the ids of stream tables that must be read again after that.
        """
        found = []
        for work in works:
            known = Frontier.from_json(work.row.frontier)
            stale = work.decision.retrack if work.decision is not None else ()
            if known is None:  # nothing was read yet: capture is as it should be, unless it is missing
                missing = {source.relid for source in work.sources if not source.attached or source.lacking}
                stale = tuple(relid for relid in stale if relid in missing)
            remote = {source.relid for source in work.foreign if source.relid in stale}
            spread = {one.relid for one in work.sources if one.relid in stale and one.spread}
            if not stale or (spread and not self._respread(work)) or not self.remote.subscribe(work, remote):
                continue
            try:
                for relid in set(stale) - remote - spread:
                    run_as_owner(self.conn, work.row, f"SELECT pgtrickle._retrack({relid:d}::oid::regclass)")
            except psycopg.errors.LockNotAvailable as error:
                message = error.diag.message_primary or str(error)
                work.error = SourceLockedError(message, error.diag.message_hint or "A service tries again by itself.")
                continue
            except psycopg.Error as error:  # concerns this owner's stream table only
                if self.conn.broken or self.conn.closed:
                    raise
                work.error = error
                continue
            if known is not None and work.frontier is not None and known.node != work.frontier.node:
                self.conn.execute("SELECT pgtrickle._settle_copy()")
                for name in (source.stable_name for source in work.sources if not source.database):
                    self.conn.execute("SELECT pgtrickle._drop_foreign_changes(%s)", (name,))
            if remote and work.decision is not None and work.decision.reason is not None:
                # The new subscription no longer shows the reason.
                self.mark_reinit(work.row.pgt_id, work.decision.reason)
            self.programs.plans.forget(work.row.pgt_id)
            found.append(work.row.pgt_id)
        return found

    def _follow_placements(self, works: Sequence[Work]) -> list[Work]:
        """The works, bound again to their sources if Citus has changed the placement of these."""
        if not any(work.row.on_citus for work in works):
            return list(works)
        try:
            updated = self.cluster.update_nodes()
            moved = self.cluster.follow([work.row.pgt_id for work in works])
        except (psycopg.Error, PgtrickleError) as error:
            self._note_for_nodes(works, error)
            return list(works)
        if not moved and not updated:
            return list(works)
        rows = {row.pgt_id: row for row in self.rows([work.row.pgt_id for work in works])}
        for work in works:
            if work.row.pgt_id not in rows:
                work.error = _dropped(work.row.label)
                continue
            work.row = rows[work.row.pgt_id]
            if work.row.pgt_id not in moved:
                continue
            self.programs.plans.forget(work.row.pgt_id)
            try:
                for table in moved[work.row.pgt_id]:
                    run_as_owner(self.conn, work.row, f"SELECT pgtrickle._retrack({table:d}::oid::regclass)")
                self.cluster.finish(work.row.pgt_id)
            except (psycopg.Error, PgtrickleError) as error:
                self._note_for_nodes([work], error)
                continue
            foreign = {source.relid for source in self.remote.sources([work])}
            self.remote.subscribe(work, foreign)
        return list(works)

    def _note_for_nodes(self, works: Sequence[Work], error: Exception) -> None:
        """Set an error of a Citus node on the works that read distributed tables."""
        if self.conn.broken or self.conn.closed:
            raise error
        distributed = self.conn.execute(
            "SELECT DISTINCT pgt_id FROM pgtrickle.pgt_dependencies WHERE pgt_id = ANY (%s)"
            " AND pgtrickle._is_distributed(coalesce(through, source_relid))",
            ([work.row.pgt_id for work in works],),
        ).fetchall()
        for work in works:
            if (work.row.pgt_id,) in distributed:
                work.error = error

    def _respread(self, work: Work) -> bool:
        """Make the capture of the work's distributed tables fit them on all nodes; returns whether that succeeded."""
        try:
            for table in self.cluster.behind(work.row.pgt_id):
                self.cluster.spread([table])
                run_as_owner(self.conn, work.row, f"SELECT pgtrickle._retrack({table:d}::oid::regclass)")
            self.cluster.finish(work.row.pgt_id)
        except (psycopg.Error, PgtrickleError) as error:
            if self.conn.broken or self.conn.closed:
                raise
            work.error = error
        return work.error is None

    def _lost_shards(self, works: Sequence[Work], *, retry: bool) -> list[int]:
        """Stream tables that failed because shards were moved away while they were read, to be read again once."""
        failed = [work for work in works if work.error is not None and work.phases.delta is None]
        moved = [work for work in failed if self._moved(self.conn, work)]
        for work in moved:
            lost = SourceChangedError(f"shards below {work.row.label} keep moving", "A service tries again by itself.")
            work.error = None if retry else lost
        return [work.row.pgt_id for work in moved] if retry else []

    @staticmethod
    def _moved(conn: psycopg.Connection[Any], work: Work) -> bool:
        """Whether the coordinator's shards are no longer those that were read.

        The cut's lock on the distributed table does not prevent moves.
        """
        if not work.shards or work.job is None:
            return False
        rows = conn.execute(
            "SELECT n, to_regclass(n)::oid::bigint FROM unnest(%s::text[]) AS n", (list(work.shards),)
        ).fetchall()
        return None in work.shards.values() or dict(rows) != work.shards

    def _altered_meanwhile(self, works: Sequence[Work], *, retry: bool) -> list[int]:
        """Stream tables whose sources were altered while they were read, to be read again.

        The cut's lock does not keep partitions, shards and capture triggers from being added or removed.
        """
        found = [*self.altered(self.conn, works), *self.remote.altered(works)]
        if found and not retry:
            raise SourceChangedError(
                f"partitions, shards or capture triggers below {found[0].row.label} keep changing",
                "Refresh again later.",
            )
        return [work.row.pgt_id for work in found]

    @classmethod
    def altered(cls, conn: psycopg.Connection[Any], works: Sequence[Work]) -> list[Work]:
        """The works whose sources have other partitions, shards or capture triggers than when they were read."""
        names = {
            source.relid: source.signature
            for work in works
            for source in work.sources
            if source.attached and not source.database
        }
        if not names:
            return []
        rows = conn.execute(
            "SELECT r, pgtrickle._capture_signature(r::oid::regclass) FROM unnest(%s::bigint[]) AS r", (list(names),)
        ).fetchall()
        altered = {relid for relid, signature in rows if signature != names[relid]}
        return [
            work for work in works if any(source.relid in altered for source in work.sources) or cls._moved(conn, work)
        ]

    def give_up(
        self, works: Sequence[Work], cause: BaseException | None, initiated_by: str, ids: Sequence[int] = ()
    ) -> None:
        """Release the claims and record the failures.

        If the connection is lost, neither happens, and the next process takes over.
        """
        if (not works and not ids) or self.conn.broken or self.conn.closed:
            return
        with idle(self.conn) as conn:
            for work in works:
                work.error = _with_search_path(work)
                if isinstance(work.phases.delta, Staged):
                    work.phases.delta.drop(conn)
                try:
                    record_failure(conn, work, cause, initiated_by, self.policy)
                except psycopg.errors.LockNotAvailable:  # held by its owner, for example; the others must not wait
                    log.warning("a failure cannot be recorded", extra={"stream_table": work.row.label})
                    continue
                if work.row.problem is not None:
                    conn.execute(
                        "UPDATE pgtrickle.pgt_stream_tables SET status = 'SUSPENDED', status_reason = %s"
                        " WHERE pgt_id = %s",
                        (work.row.problem, work.row.pgt_id),
                    )
            self.claims.release(conn, ids)  # also those taken when an interruption came during the claim

    def check_parts(self, works: Sequence[Work]) -> None:
        """Set an error on works that lack a part or a right. `give_up()` suspends them, because a retry cannot help."""
        for work in works:
            if work.row.problem is None and work.row.outdated:
                self._renew_functions(work)
            if work.row.problem is not None:
                work.error = lacking(work.row.label, work.row.problem)

    def _renew_functions(self, work: Work) -> None:
        """Replace owner functions that an earlier version made. The old functions run the commands, as the owner."""
        id_ = work.row.pgt_id
        try:
            with self.conn.transaction():
                rows = self.conn.execute("SELECT pgtrickle._renew_owner_functions(%s)", (id_,)).fetchall()
                for (command,) in rows:
                    write_as_owner(self.conn, id_, command, None, {})
                self.conn.execute("SELECT pgtrickle._end_renewal(%s)", (id_,))
                leave(self.conn, {}, ddl=True)
        except psycopg.Error as error:
            if self.conn.broken or self.conn.closed:
                raise
            work.error = error

    def claim(self, ids: Sequence[int], *, all_or_none: bool) -> tuple[list[Work], list[str]]:
        """Works for the stream tables that could be claimed, and the names of the others."""
        tokens = self.claims.take(ids)
        rows = self.rows(ids)
        if any(row.pooler_compatibility_mode for row in rows):
            be_pooled(self.conn)
        taken = [row.label for row in rows if row.pgt_id not in tokens]
        if taken and all_or_none:
            self.claims.release(self.conn, list(tokens))
            return [], taken
        return [Work(row, tokens[row.pgt_id]) for row in rows if row.pgt_id in tokens], taken

    # -- Spark and apply -----------------------------------------------------------------------------------------------

    def compute(self, works: Sequence[Work]) -> None:
        for work in works:
            if work.large is not None:
                self._compute_large(work)
        busy = [work for work in works if work.job is not None and work.large is None]
        if not busy:
            return
        started = time.monotonic()
        self.on_step("spark")
        deltas = self._run(busy)
        seconds = time.monotonic() - started
        for work, delta in zip(busy, deltas, strict=True):
            work.tables, work.parts, work.fetcher = {}, {}, None
            work.phases.spark = seconds / len(busy)
            work.phases.delta = delta

    def _compute_large(self, work: Work) -> None:
        assert work.large is not None
        assert work.job is not None
        started = time.monotonic()
        self.on_step("spark")
        try:
            work.phases.delta = work.large.compute(work.job, f"stage_{work.row.pgt_id}_{work.token}")
        except RefreshError as error:
            work.error = error
        work.phases.spark = time.monotonic() - started

    @staticmethod
    def _run(works: Sequence[Work]) -> list[pa.Table | None]:
        """Run all jobs together; if that fails, run each alone, so that one stream table does not stop the others."""
        jobs = [Input(work.job, work.tables, work.parts) for work in works if work.job is not None]
        try:
            return run_jobs(jobs)
        except RefreshError as error:
            if len(works) == 1:
                works[0].error = error
                return [None]
        deltas: list[pa.Table | None] = []
        for work, job in zip(works, jobs, strict=True):
            try:
                deltas += run_jobs([job])
            except RefreshError as error:
                work.error = error
                deltas.append(None)
        return deltas

    def apply(self, work: Work, initiated_by: str) -> RefreshResult:
        assert work.decision is not None
        assert work.compiled is not None
        assert work.frontier is not None
        delta = work.phases.delta
        if delta is None and work.decision.action != "REINITIALIZE" and work.decision.action != "FULL":
            result = record_no_data(self.conn, work, initiated_by, self.policy)
        else:
            result = apply_delta(self.conn, work, delta, initiated_by, self.on_step, self.policy)
        work.applied = True
        return result

    def mark_reinit(self, pgt_id: int, reason: str) -> None:
        self.conn.execute(
            "UPDATE pgtrickle.pgt_stream_tables SET reinit_reason = %s WHERE pgt_id = %s", (reason, pgt_id)
        )

    def finish(self, works: Sequence[Work]) -> None:
        """After the applies: stretch schedules that are too short, and purge changes that all readers have applied."""
        if works and self.policy.backoff:
            seconds = time.monotonic() - min(work.started for work in works)
            parameters = {"ids": [work.row.pgt_id for work in works], "seconds": seconds}
            self.conn.execute(load_query("stretch"), parameters)
        self._purge(works)

    def _purge(self, works: Sequence[Work]) -> None:
        sources = [source for work in works for source in work.sources if not source.database]
        for name in sorted({source.stable_name for source in sources if source.stable_name}):
            self.conn.execute("SELECT pgtrickle._purge(%s)", (name,))
        self.remote.purge(works)
        self.reading.others.remember(works)


def _with_search_path(work: Work) -> Exception | None:
    """The error of a work. If a function of its query may have missed a name, the error explains its search_path."""
    error = work.error
    if not isinstance(error, _UNDEFINED) or work.compiled is None or not work.compiled.own_code:
        return error
    clear = InvalidQueryError(
        f"{work.row.label} cannot be refreshed: {error.diag.message_primary or error}",
        "A refresh runs the functions of a query with search_path = pg_catalog, pg_temp. If one of them names it,"
        f" write the schema before it, or ALTER FUNCTION ... SET search_path = {work.row.session_settings.get('search_path')};",
    )
    clear.__cause__ = error
    return clear


def _dropped(name: str) -> StreamTableNotFoundError:
    return StreamTableNotFoundError(f"{name} was dropped while it was to be refreshed")
