"""Refreshing several stream tables in one transaction: readers see all of them before the refresh or all after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import psycopg

from pgtrickle.enums import Storage
from pgtrickle.errors import PgtrickleError
from pgtrickle.postgres.connection import another, is_pooled
from pgtrickle.refresh.apply.writer import Diverged
from pgtrickle.refresh.compute.computing import compute
from pgtrickle.refresh.cut.cut import Cut
from pgtrickle.refresh.pipeline import Pipeline
from pgtrickle.refresh.progress import Progress
from pgtrickle.refresh.recapture import altered_since, mark_reinit
from pgtrickle.refresh.results import Outcome, RefreshResult
from pgtrickle.refresh.stages import Claimed, Computed, Decided, Planned
from pgtrickle.sites.protocol import Sites
from pgtrickle.sites.stream_tables import StreamTable

# Called for each stream table once all are written, in the transaction that commits them.
BeforeCommit = Callable[[Computed], None]


class NotAtomicError(Exception):
    """A group of stream tables cannot be refreshed in one transaction this time."""


def refresh_atomically(
    pipeline: Pipeline, levels: Sequence[Sequence[int]], before_commit: BeforeCommit | None = None
) -> Outcome | None:
    """Refresh all levels in one transaction, at the same snapshot. If one stream table fails, all of them do.

    A later level reads the uncommitted rows of an earlier one. Returns None if that is not possible this time, for
    example for a large refresh (whose rows are read over other connections) or if sources were altered. The caller then
    refreshes level by level, each with its own commits.
    """
    ids = [id_ for level in levels for id_ in level]
    if is_pooled(pipeline.conn):
        return None  # it takes a second connection to see whether partitions were attached or detached
    claimed, taken = pipeline.claims.claim(ids, all_or_none=True)
    if taken:
        return Outcome(taken=taken)
    progress = Progress(pipeline.conn, pipeline.on_step)
    progress.note_claims(claimed)
    outcome: Outcome | None = None
    with progress.resources:
        try:
            if any(table.row.st_placement != Storage.LOCAL or table.row.on_nodes for table in claimed):
                raise NotAtomicError("what is written on other nodes is not seen before it is committed")
            pipeline.check_parts(claimed, progress)
            _raise_first(claimed, progress)
            sites = pipeline.sites_of(claimed)
            results, computed = _Group(pipeline, sites, progress).refresh(levels, claimed, before_commit)
            outcome = Outcome(results)
            progress.on_step("committed")
            pipeline.finish(computed, sites)
            return outcome
        except NotAtomicError:
            return None
        except Diverged as error:
            diverged = next(table for table in claimed if progress.failed.of(table) is error)
            mark_reinit(pipeline.conn, diverged.row.pgt_id, str(error))
            progress.failed.forgive(diverged)
            return None
        except (psycopg.Error, PgtrickleError) as error:
            if _lost(pipeline.conn):
                raise
            _blame(claimed, error, progress)
        finally:
            if outcome is None and not _lost(pipeline.conn):
                failed = [table for table in claimed if progress.failed.of(table) is not None]
                pipeline.give_up(failed, progress, ids=ids)
    _put_off(pipeline.conn, ids, list(progress.failed.errors))
    return Outcome(failures=dict(progress.failed.errors))


def _lost(conn: psycopg.Connection[Any]) -> bool:
    return conn.broken or conn.closed


def _put_off(conn: psycopg.Connection[Any], ids: Sequence[int], failed: Sequence[int]) -> None:
    """Postpone the healthy members until the failed ones are due; otherwise they would trigger a retry too early."""
    conn.execute(
        "UPDATE pgtrickle.pgt_stream_tables SET next_due = greatest(next_due, (SELECT max(f.next_due)"
        " FROM pgtrickle.pgt_stream_tables f WHERE f.pgt_id = ANY (%(failed)s) AND f.status <> 'SUSPENDED'))"
        " WHERE pgt_id = ANY (%(ids)s) AND pgt_id <> ALL (%(failed)s)",
        {"ids": list(ids), "failed": list(failed)},
    )


class _Group:
    """The stages of a group, all in one transaction."""

    def __init__(self, pipeline: Pipeline, sites: Sites, progress: Progress) -> None:
        self.pipeline = pipeline
        self.sites = sites
        self.progress = progress

    def refresh(
        self, levels: Sequence[Sequence[int]], claimed: Sequence[Claimed], before_commit: BeforeCommit | None
    ) -> tuple[list[RefreshResult], list[Computed]]:
        """Refresh all levels; return their results."""
        results: list[RefreshResult] = []
        computed: list[Computed] = []
        reading = self.pipeline.reading
        planned = reading.planner.plan(claimed, self.sites, self.progress)
        _raise_first(claimed, self.progress)
        begin = time.monotonic()
        with reading.cut(planned, self.sites, self.progress, writes=True) as (cut, readable):
            self.progress.on_step("cut")
            _raise_first(claimed, self.progress)
            for level in levels:
                tables = [table for table in readable if table.row.pgt_id in level]
                for table in self._compute(tables, cut, begin):
                    computed.append(table)
                    results.append(self._apply(table))
                begin = time.monotonic()
            if before_commit is not None:
                for table in computed:
                    before_commit(table)
            decided = [table.decided for table in computed]
            self._check_passed(decided)
            self.sites.prove(decided, self.progress.failed)
            _raise_first(decided, self.progress)
        return results, computed

    def _compute(self, tables: Sequence[Planned], cut: Cut, begin: float) -> list[Computed]:
        """Read and compute one level of the group."""
        pipeline, progress = self.pipeline, self.progress
        try:
            read = pipeline.reading.read_at(cut, tables, self.sites, progress, begin)
            _raise_first(tables, progress)
            if read.again or any(one.large is not None or one.decided.decision.retrack for one in read.fetched):
                raise NotAtomicError(tables[0].row.label)
            computed = compute(read.fetched, progress)
            _raise_first(tables, progress)
        except (psycopg.Error, PgtrickleError) as error:
            _blame(tables, error, progress)
            raise
        row = pipeline.conn.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        assert row is not None
        return [replace(table, transaction=row[0]) for table in computed]

    def _apply(self, table: Computed) -> RefreshResult:
        try:
            return self.pipeline.apply(table, self.progress)
        except (psycopg.Error, PgtrickleError) as error:
            self.progress.failed.add(error, [table])
            raise

    def _check_passed(self, tables: Sequence[Decided]) -> None:
        """Check before the commit that the frontier covers only changes that were read, and that no source was altered.

        Everything that this transaction wrote counts as read. But a user's trigger on a stream table may have written
        to a source, and that change must be read by a later refresh. Another connection looks for new partitions,
        because the snapshot of this one is too old to show them.
        """
        conn = self.pipeline.conn
        row = conn.execute(
            "SELECT count(*) FROM pgtrickle_changes.pgt_activity a WHERE a.xid = pg_current_xact_id()::text::bigint"
            " AND a.source_stable_name = ANY (%s) AND a.source_stable_name NOT IN (SELECT t.source_stable_name"
            " FROM pgtrickle.pgt_change_tracking t JOIN pgtrickle.pgt_stream_tables s ON s.pgt_relid = t.source_relid"
            " WHERE s.pgt_id = ANY (%s))",
            (
                [source.stable_name for table in tables for source in table.sources if not source.database],
                [table.row.pgt_id for table in tables],
            ),
        ).fetchone()
        if row != (0,):
            raise NotAtomicError("a trigger of the group writes into one of its sources")
        with another(conn) as fresh:
            # This also finds triggers that are newer than the snapshot of the group's transaction.
            if not all(table.row.own for table in tables):
                fresh.execute("SELECT pgtrickle._check_commit(%s)", (conn.info.backend_pid,))
            if altered_since(fresh, tables) or self.sites.altered(tables, self.progress.failed):
                raise NotAtomicError("partitions came or went")


def _blame(tables: Sequence[StreamTable], error: Exception, progress: Progress) -> None:
    """Let all of these stream tables fail with an error that belongs to none of them in particular."""
    if len(progress.failed.healthy(tables)) == len(tables):
        progress.failed.add(error, tables)


def _raise_first(tables: Sequence[StreamTable], progress: Progress) -> None:
    for table in tables:
        error = progress.failed.of(table)
        if error is not None:
            raise error
