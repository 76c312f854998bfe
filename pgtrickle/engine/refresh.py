"""Refreshing stream tables: claim, cut, fetch, Spark, apply.

Everything that must be remembered is in the catalog. A process that dies between any two steps leaves the stream table as it
was; the next refresh starts from the frontier that is stored with its rows.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.rows import dict_row

from pgtrickle.capture.frontier import Frontier
from pgtrickle.catalog.analysis import Analysis, load_query
from pgtrickle.compile.place import Placement
from pgtrickle.delta.simplify import simplify
from pgtrickle.engine.apply import Diverged, apply_delta, record_failure, record_no_data, run_as_owner
from pgtrickle.engine.cut import Cut, set_local, take_cut
from pgtrickle.engine.decide import Decision, Source, changed_sources, decide
from pgtrickle.engine.fetch import Cache, Fetcher, Reader
from pgtrickle.engine.jobs import Job, full_job, linear_job, rows_job, state_job, whole_view
from pgtrickle.engine.programs import Compiled, Programs
from pgtrickle.engine.spark import run_jobs
from pgtrickle.engine.types import Phases, RefreshResult, StreamTableRow
from pgtrickle.errors import PgtrickleError, PrivilegeError, RefreshConflictError, RefreshError, SourceChangedError
from pgtrickle.query.plan import Fragment

LEASE = timedelta(minutes=10)
# Settings under which values are printed and read back; those of the stream table come on top.
TRANSPORT = {"extra_float_digits": "1", "bytea_output": "hex", "xmlbinary": "base64", "search_path": ""}

# Called with the name of each step as it is reached; tests stop a process there.
OnStep = Callable[[str], None]


@dataclass
class _Work:
    """One stream table on its way through a refresh."""

    row: StreamTableRow
    token: int
    started: float = field(default_factory=time.monotonic)
    phases: Phases = field(default_factory=Phases)
    decision: Decision | None = None
    compiled: Compiled | None = None
    job: Job | None = None
    tables: dict[Fragment, pa.Table] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    frontier: Frontier | None = None
    cut_time: Any = None
    rows_in: int = 0
    error: Exception | None = None
    applied: bool = False


@dataclass
class Engine:
    """Refreshes the stream tables of one database over one connection."""

    conn: psycopg.Connection[Any]
    service_id: uuid.UUID = field(default_factory=uuid.uuid4)
    on_step: OnStep = lambda name: None
    statements: list[str] = field(default_factory=list)  # what the last refresh sent to the sources

    def __post_init__(self) -> None:
        self.programs = Programs(self.conn)
        self._jobs: dict[tuple[Any, ...], Job | None] = {}

    def refresh(self, ids: Sequence[int], initiated_by: str = "MANUAL") -> list[RefreshResult]:
        """Bring the given stream tables up to date, sources before those that read them."""
        self.statements.clear()
        results: dict[int, RefreshResult] = {}
        for level in self._levels(ids):
            for result in self._refresh_level(level, initiated_by, retry=True):
                results[result.pgt_id] = result
        return [results[id_] for id_ in ids]

    def rows(self, ids: Sequence[int] | None = None) -> list[StreamTableRow]:
        """Stream tables as the catalog has them."""
        with self.conn.cursor(row_factory=dict_row) as cursor:
            rows = cursor.execute(load_query("stream_tables"), {"ids": list(ids) if ids is not None else None})
            return [StreamTableRow(**row) for row in rows]

    def _levels(self, ids: Sequence[int]) -> list[list[int]]:
        """The stream tables in groups that do not read each other, in order."""
        edges = self.conn.execute(
            "SELECT d.pgt_id, u.pgt_id FROM pgtrickle.pgt_dependencies d"
            " JOIN pgtrickle.pgt_stream_tables u ON u.pgt_relid = d.source_relid WHERE d.pgt_id = ANY (%s)",
            (list(ids),),
        ).fetchall()
        depth = dict.fromkeys(ids, 0)
        for _ in ids:
            for reader, source in edges:
                if source in depth:
                    depth[reader] = max(depth[reader], depth[source] + 1)
        return [[id_ for id_ in ids if depth[id_] == level] for level in range(max(depth.values(), default=-1) + 1)]

    def _refresh_level(self, ids: Sequence[int], initiated_by: str, *, retry: bool) -> list[RefreshResult]:
        works = self._claim(ids)
        results: list[RefreshResult] = []
        again: list[int] = []
        try:
            self._check_parts(works)
            self._read([work for work in works if work.error is None])
            healthy = [work for work in works if work.error is None]
            again = self._retrack(healthy) if retry else []
            again += self._altered_meanwhile([work for work in healthy if work.row.pgt_id not in again], retry=retry)
            self._compute([work for work in works if work.error is None and work.row.pgt_id not in again])
            for work in works:
                if work.error is not None or work.row.pgt_id in again:
                    continue
                try:
                    results.append(self._apply(work, initiated_by))
                except Diverged as error:
                    if not retry:
                        work.error = error
                        continue
                    self._mark_reinit(work.row.pgt_id, str(error))
                    again.append(work.row.pgt_id)
                except (psycopg.Error, PgtrickleError) as error:
                    work.error = error
        except BaseException as error:
            self._give_up([work for work in works if not work.applied], error, initiated_by)
            raise
        failed = [work for work in works if work.error is not None]
        self._give_up(failed, None, initiated_by)
        self._purge([work for work in works if work.applied])
        if again:
            results += self._refresh_level(again, initiated_by, retry=False)
        if failed:
            # The others are refreshed all the same.
            assert failed[0].error is not None
            raise failed[0].error
        return results

    def _retrack(self, works: Sequence[_Work]) -> list[int]:
        """Fit the capture to sources that were altered, before the stream tables on them start over."""
        found = []
        for work in works:
            known = Frontier.from_json(work.row.frontier)
            if known is not None and work.decision is not None and work.decision.retrack:
                for relid in work.decision.retrack:
                    run_as_owner(self.conn, work.row, f"SELECT pgtrickle._retrack({relid:d}::oid::regclass)")
                if work.frontier is not None and known.node != work.frontier.node:
                    for source in work.sources:
                        self.conn.execute("SELECT pgtrickle._drop_foreign_changes(%s)", (source.stable_name,))
                self.programs.forget(work.row.pgt_id)
                found.append(work.row.pgt_id)
        return found

    def _altered_meanwhile(self, works: Sequence[_Work], *, retry: bool) -> list[int]:
        """Stream tables whose sources got or lost a partition while they were read: the cut's lock does not stop that."""
        names = {source.relid: source.signature for work in works for source in work.sources if source.captured}
        if not names:
            return []
        rows = self.conn.execute(
            "SELECT r, pgtrickle._capture_signature(r::oid::regclass) FROM unnest(%s::bigint[]) AS r", (list(names),)
        ).fetchall()
        altered = {relid for relid, signature in rows if signature != names[relid]}
        found = [work for work in works if any(source.relid in altered for source in work.sources)]
        if found and not retry:
            raise SourceChangedError(
                f"partitions or capture triggers below {found[0].row.label} keep changing", "Refresh again later."
            )
        return [work.row.pgt_id for work in found]

    def _give_up(self, works: Sequence[_Work], cause: BaseException | None, initiated_by: str) -> None:
        """Return the claims and write down why. A lost connection leaves both to whoever comes next."""
        for work in works:
            if not self.conn.broken and not self.conn.closed:
                record_failure(self.conn, work.row, work.token, work.error or cause, initiated_by)

    def _check_parts(self, works: Sequence[_Work]) -> None:
        """Stream tables that lack a part or a right are suspended; nothing else can help them."""
        for work in works:
            if work.row.problem is not None:
                self.conn.execute(
                    "UPDATE pgtrickle.pgt_stream_tables SET status = 'SUSPENDED', status_reason = %s WHERE pgt_id = %s",
                    (work.row.problem, work.row.pgt_id),
                )
                work.error = PrivilegeError(
                    f"{work.row.label} cannot be refreshed: {work.row.problem}",
                    "Give the right back, or drop and create the stream table again; then set its status to ACTIVE.",
                )

    def _claim(self, ids: Sequence[int]) -> list[_Work]:
        parameters = {"service": self.service_id, "lease": LEASE, "ids": list(ids)}
        with self.conn.transaction():
            tokens = dict(self.conn.execute(load_query("claim"), parameters).fetchall())
        rows = self.rows(ids)
        taken = [row.label for row in rows if row.pgt_id not in tokens]
        if taken:
            self.conn.execute(
                "UPDATE pgtrickle.pgt_stream_tables SET claimed_by = NULL WHERE claimed_by = %s AND pgt_id = ANY (%s)",
                (self.service_id, list(tokens)),
            )
            raise RefreshConflictError(
                f"{', '.join(taken)} is being refreshed by another process",
                "Wait for it to finish; if that process died, its claim ends after ten minutes.",
            )
        return [_Work(row, tokens[row.pgt_id]) for row in rows]

    # -- cut and fetch -------------------------------------------------------------------------------------------------

    def _read(self, works: Sequence[_Work]) -> None:
        """Take the cut and fetch, in its snapshot, everything the refresh needs."""
        if not works:
            return
        begin = time.monotonic()
        shapes = self._shapes(works)
        for work in works:
            shape = "/".join(shapes[work.row.pgt_id])
            work.compiled = self.programs.get(work.row.pgt_id, work.row.view_relid, shape)
        planned = time.monotonic()
        with take_cut(self.conn, [f"q_{work.row.pgt_id}" for work in works]) as cut:
            self.on_step("cut")
            shapes = self._shapes(works)
            sources = self._sources(works, cut)
            cut_done = time.monotonic()
            cache: dict[Any, Cache] = {}
            for work in works:
                meaning, shape = shapes[work.row.pgt_id]
                work.frontier = Frontier(cut.node, cut.snapshot, meaning)
                _check_key(work)
                work.cut_time = cut.time
                work.sources = sources[work.row.pgt_id]
                assert work.compiled is not None
                if work.compiled.shape != f"{meaning}/{shape}":
                    self.programs.forget(work.row.pgt_id)
                    work.error = PgtrickleError(
                        f"a source of {work.row.label} was altered during the refresh", "Refresh again."
                    )
                    continue
                if work.error is not None:
                    continue
                started = time.monotonic()
                try:
                    with self.conn.transaction():
                        self._fetch(work, cut, cache)
                except (psycopg.Error, PgtrickleError) as error:
                    if self.conn.broken or self.conn.closed:
                        raise
                    work.error = error
                work.phases.fetch = time.monotonic() - started
                work.phases.plan = (planned - begin) / len(works)
                work.phases.cut = (cut_done - planned) / len(works)
            self.on_step("fetch")

    def _shapes(self, works: Sequence[_Work]) -> dict[int, tuple[str, str]]:
        parameters = {"ids": [work.row.pgt_id for work in works], "views": [work.row.view_relid for work in works]}
        rows = self.conn.execute(load_query("meaning"), parameters).fetchall()
        return {row[0]: (row[1] or "", row[2] or "") for row in rows}

    def _sources(self, works: Sequence[_Work], cut: Cut) -> dict[int, list[Source]]:
        frontiers = {work.row.pgt_id: Frontier.from_json(work.row.frontier) for work in works}
        return changed_sources(cut, frontiers)

    def _fetch(self, work: _Work, cut: Cut, cache: dict[Any, Cache]) -> None:
        row, compiled = work.row, work.compiled
        assert compiled is not None
        assert work.frontier is not None
        work.decision = decide(row, compiled, work.sources, work.frontier)
        work.job = self._job(work)
        if work.job is None:
            return
        settings = TRANSPORT | {name: value for name, value in row.session_settings.items() if name != "search_path"}
        set_local(self.conn, settings)
        known = Frontier.from_json(row.frontier)
        as_owner = None if row.own else sql.Identifier("pgtrickle_views", f"read_{row.pgt_id}")
        fetcher = Fetcher(
            Reader(cut.conn, as_owner),
            known.snapshot if known is not None else None,
            cache.setdefault((tuple(sorted(settings.items())), as_owner and row.owner), Cache()),
        )
        work.job.announce(fetcher)
        work.tables = work.job.fetch(fetcher)
        work.rows_in = sum(table.num_rows for table in work.tables.values())
        self.statements += fetcher.statements

    def _job(self, work: _Work) -> Job | None:
        """The stream table's part of the Spark job; compiled anew only when other tables changed than last time."""
        decision, compiled, row = work.decision, work.compiled, work.row
        assert decision is not None
        assert compiled is not None
        if decision.action == "NO_DATA":
            return None
        changed = frozenset(source.relid for source in work.sources if source.changed)
        key = (row.pgt_id, compiled.shape, row.placement, decision.action, changed)
        if key not in self._jobs:
            self._jobs[key] = self._build_job(work, changed)
        return self._jobs[key]

    def _build_job(self, work: _Work, changed: frozenset[int]) -> Job | None:
        assert work.decision is not None
        assert work.compiled is not None
        program = work.compiled.program
        placement: Placement = "spark" if work.row.placement == "spark" else "auto"
        if work.decision.action == "DIFFERENTIAL":
            assert program is not None
            assert program.change is not None
            change = simplify(program.change, changed)
            if change is None:
                return None
            if program.linear is not None:
                return linear_job(program.linear, change, placement)
            return rows_job(change, program.core.columns, placement)
        if program is not None and program.linear is not None:
            return state_job(program.linear, placement)
        plan, columns = whole_view(work.compiled.view)
        on_spark = placement == "spark" and program is not None
        if on_spark and program is not None:
            if program.finish:
                return rows_job(program.core, program.core.columns, placement)
            plan, columns = program.plan, program.output
        storage = Analysis(self.conn).relations(work.row.relid)
        return full_job(plan, columns, next(iter(storage.values())), placement, query=on_spark)

    # -- Spark and apply -----------------------------------------------------------------------------------------------

    def _compute(self, works: Sequence[_Work]) -> None:
        busy = [work for work in works if work.job is not None]
        if not busy:
            return
        started = time.monotonic()
        self.on_step("spark")
        deltas = self._run(busy)
        seconds = time.monotonic() - started
        for work, delta in zip(busy, deltas, strict=True):
            work.tables = {}
            work.phases.spark = seconds / len(busy)
            work.phases.delta = delta

    @staticmethod
    def _run(works: Sequence[_Work]) -> list[pa.Table | None]:
        """All jobs as one; where that fails, each alone, so that one stream table does not stop the others."""
        jobs = [(work.job, work.tables) for work in works if work.job is not None]
        try:
            return run_jobs(jobs)
        except RefreshError:
            if len(works) == 1:
                raise
        deltas: list[pa.Table | None] = []
        for work, job in zip(works, jobs, strict=True):
            try:
                deltas += run_jobs([job])
            except RefreshError as error:
                work.error = error
                deltas.append(None)
        return deltas

    def _apply(self, work: _Work, initiated_by: str) -> RefreshResult:
        assert work.decision is not None
        assert work.compiled is not None
        assert work.frontier is not None
        delta = work.phases.delta
        if delta is None and work.decision.action != "REINITIALIZE" and work.decision.action != "FULL":
            result = record_no_data(self.conn, work, initiated_by)
        else:
            result = apply_delta(self.conn, work, delta, initiated_by, self.on_step)
        work.applied = True
        return result

    def _mark_reinit(self, pgt_id: int, reason: str) -> None:
        self.conn.execute(
            "UPDATE pgtrickle.pgt_stream_tables SET reinit_reason = %s WHERE pgt_id = %s", (reason, pgt_id)
        )

    def _purge(self, works: Sequence[_Work]) -> None:
        """Remove changes that every stream table on their source has passed."""
        names = sorted({source.stable_name for work in works for source in work.sources if source.stable_name})
        for name in names:
            self.conn.execute("SELECT pgtrickle._purge(%s)", (name,))


def _check_key(work: _Work) -> None:
    """The table's unique key must still be one of the query, or rows would overwrite each other."""
    program = work.compiled.program if work.compiled is not None else None
    stored = work.row.key_columns
    if stored is None or program is None or (program.key is not None and set(program.key) <= set(stored)):
        return
    work.error = PgtrickleError(
        f"{work.row.label} has the key ({', '.join(stored)}), which is no longer one of its query",
        "The query or the key of a source was changed. Drop the stream table and create it again.",
    )
