"""Refreshing several stream tables in one transaction: readers see all of them before the refresh or all after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg

from pgtrickle.errors import PgtrickleError
from pgtrickle.postgres.connection import another, is_pooled
from pgtrickle.refresh.apply.transaction import Diverged
from pgtrickle.refresh.cut.cut import Cut
from pgtrickle.refresh.results import Outcome, RefreshResult
from pgtrickle.refresh.work import Work

if TYPE_CHECKING:
    from pgtrickle.refresh.pipeline import Engine


# Called for each stream table once all are written, in the transaction that commits them.
BeforeCommit = Callable[[Work], None]


class NotAtomicError(Exception):
    """A group of stream tables cannot be refreshed in one transaction this time."""


def refresh_atomically(
    engine: Engine, levels: Sequence[Sequence[int]], initiated_by: str, before_commit: BeforeCommit | None = None
) -> Outcome | None:
    """Refresh all levels in one transaction, at the same snapshot. If one stream table fails, all of them do.

    A later level reads the uncommitted rows of an earlier one. Returns None if that is not possible this time, for
    example for a large refresh (whose rows are read over other connections) or if sources were altered. The caller then
    refreshes level by level, each with its own commits.
    """
    ids = [id_ for level in levels for id_ in level]
    if is_pooled(engine.conn):
        return None  # it takes a second connection to see whether partitions were attached or detached
    works, taken = engine.claim(ids, all_or_none=True)
    if taken:
        return Outcome(taken=taken)
    outcome: Outcome | None = None
    try:
        if any(work.row.st_placement != "local" or work.row.on_nodes for work in works):
            raise NotAtomicError("what is written on other nodes is not seen before it is committed")
        engine.check_parts(works)
        if all(work.error is None for work in works):
            outcome = Outcome(_apply_levels(engine, levels, works, initiated_by, before_commit))
            engine.on_step("committed")
            engine.finish(works)
            return outcome
    except NotAtomicError:
        return None
    except Diverged as error:
        engine.mark_reinit(next(work.row.pgt_id for work in works if work.error is error), str(error))
        return None
    except (psycopg.Error, PgtrickleError) as error:
        if _lost(engine.conn):
            raise
        _blame(works, error)
    finally:
        if outcome is None and not _lost(engine.conn):
            failed = [work for work in works if work.error is not None and not isinstance(work.error, Diverged)]
            engine.give_up(failed, None, initiated_by, ids)
    failures = {work.row.pgt_id: work.error for work in works if work.error is not None}
    _put_off(engine.conn, ids, list(failures))
    return Outcome(failures=failures)


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


def _apply_levels(
    engine: Engine,
    levels: Sequence[Sequence[int]],
    works: Sequence[Work],
    initiated_by: str,
    before_commit: BeforeCommit | None,
) -> list[RefreshResult]:
    """Run cut, fetch, Spark and apply for all levels of a group in one transaction."""
    results: list[RefreshResult] = []
    engine.reading.compile_unknown(works)
    begin = time.monotonic()
    ids = [work.row.pgt_id for work in works]
    with engine.reading.cut(works, writes=True) as cut:
        engine.on_step("cut")
        for level in levels:
            results += _apply_level(engine, [w for w in works if w.row.pgt_id in level], cut, begin, initiated_by)
            begin = time.monotonic()
        if before_commit is not None:
            for work in works:
                before_commit(work)
        _check_passed(engine, works, ids)
        engine.remote.prove(works)
        _raise_first(works)
    return results


def _apply_level(
    engine: Engine, works: Sequence[Work], cut: Cut, begin: float, initiated_by: str
) -> list[RefreshResult]:
    """Refresh one level of a group inside the group's transaction."""
    try:
        outdated = engine.reading.read_at(cut, works, begin)
        _raise_first(works)
        if outdated or any(work.large is not None or (work.decision and work.decision.retrack) for work in works):
            raise NotAtomicError(works[0].row.label)
        engine.compute(works)
        _raise_first(works)
    except (psycopg.Error, PgtrickleError) as error:
        _blame(works, error)
        raise
    row = engine.conn.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
    assert row is not None
    results = []
    for work in works:
        assert work.frontier is not None
        work.frontier = replace(work.frontier, snapshot=replace(work.frontier.snapshot, passed=row[0]))
        try:
            results.append(engine.apply(work, initiated_by))
        except (psycopg.Error, PgtrickleError) as error:
            work.error = error
            raise
    return results


def _check_passed(engine: Engine, works: Sequence[Work], ids: Sequence[int]) -> None:
    """Check before the commit that the frontier covers only changes that were read, and that no source was altered.

    Everything that this transaction wrote counts as read. But a user's trigger on a stream table may have written to a
    source, and that change must be read by a later refresh. Another connection looks for new partitions, because the
    snapshot of this one is too old to show them.
    """
    row = engine.conn.execute(
        "SELECT count(*) FROM pgtrickle_changes.pgt_activity a WHERE a.xid = pg_current_xact_id()::text::bigint"
        " AND a.source_stable_name = ANY (%s) AND a.source_stable_name NOT IN (SELECT t.source_stable_name"
        " FROM pgtrickle.pgt_change_tracking t JOIN pgtrickle.pgt_stream_tables s ON s.pgt_relid = t.source_relid"
        " WHERE s.pgt_id = ANY (%s))",
        ([source.stable_name for work in works for source in work.sources if not source.database], list(ids)),
    ).fetchone()
    if row != (0,):
        raise NotAtomicError("a trigger of the group writes into one of its sources")
    with another(engine.conn) as fresh:
        # This also finds triggers that are newer than the snapshot of the group's transaction.
        if not all(work.row.own for work in works):
            fresh.execute("SELECT pgtrickle._check_commit(%s)", (engine.conn.info.backend_pid,))
        if engine.altered(fresh, works) or engine.remote.altered(works):
            raise NotAtomicError("partitions came or went")


def _blame(works: Sequence[Work], error: Exception) -> None:
    """Set an error that belongs to no stream table in particular on all of them."""
    if all(work.error is None for work in works):
        for work in works:
            work.error = error


def _raise_first(works: Sequence[Work]) -> None:
    for work in works:
        if work.error is not None:
            raise work.error
