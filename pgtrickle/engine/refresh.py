"""Refreshing stream tables: claim, cut, fetch, Spark, apply.

Everything that must be remembered is in the catalog. A process that dies between any two steps leaves the stream table as it
was; the next refresh starts from the frontier that is stored with its rows.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.rows import dict_row

from pgtrickle.capture.frontier import Frontier, Snapshot
from pgtrickle.catalog.analysis import Analysis, load_query
from pgtrickle.compile.place import Placement
from pgtrickle.delta.simplify import simplify
from pgtrickle.engine.apply import Diverged, apply_delta, record_failure, record_no_data, run_as_owner
from pgtrickle.engine.cut import Cut, set_local, take_cut
from pgtrickle.engine.decide import Decision, Source, changed_sources, decide
from pgtrickle.engine.fetch import Fetcher, InMemory, Part, Reader
from pgtrickle.engine.jobs import Job, full_job, linear_job, rows_job, state_job
from pgtrickle.engine.load import Staged
from pgtrickle.engine.programs import Compiled, Programs
from pgtrickle.engine.relations import Input
from pgtrickle.engine.spark import run_jobs
from pgtrickle.engine.together import read_together
from pgtrickle.engine.types import Phases, RefreshResult, StreamTableRow
from pgtrickle.errors import PgtrickleError, PrivilegeError, RefreshConflictError, RefreshError, SourceChangedError
from pgtrickle.query.plan import Fragment

if TYPE_CHECKING:
    from pgtrickle.engine.large import LargeWork

LEASE = timedelta(minutes=10)
# Settings under which values are printed and read back; those of the stream table come on top.
TRANSPORT = {"extra_float_digits": "1", "bytea_output": "hex", "xmlbinary": "base64", "search_path": ""}

# Bytes of tables' files from which rows pass by the driver: executors read and write them.
LARGE = 64 << 20

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
    parts: dict[Fragment, Part] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)  # under which it is read
    fetcher: Fetcher[pa.Table] | None = None
    sources: list[Source] = field(default_factory=list)
    frontier: Frontier | None = None
    cut_time: Any = None
    large: LargeWork | None = None
    into_empty: bool = False  # nothing is stored yet
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
    large: int = LARGE

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
        works: list[_Work] = []
        results: list[RefreshResult] = []
        again: list[int] = []
        try:
            works = self._claim(ids)
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
            self._give_up([work for work in works if not work.applied], error, initiated_by, ids)
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

    def _give_up(
        self, works: Sequence[_Work], cause: BaseException | None, initiated_by: str, ids: Sequence[int] = ()
    ) -> None:
        """Return the claims and write down why. A lost connection leaves both to whoever comes next."""
        if (not works and not ids) or self.conn.broken or self.conn.closed:
            return
        with _idle(self.conn) as conn:
            for work in works:
                if isinstance(work.phases.delta, Staged):
                    work.phases.delta.drop(conn)
                record_failure(conn, work.row, work.token, work.error or cause, initiated_by)
            self._release(conn, ids)  # also of an interruption while they were being claimed

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
            self._release(self.conn, list(tokens))
            raise RefreshConflictError(
                f"{', '.join(taken)} is being refreshed by another process",
                "Wait for it to finish; if that process died, its claim ends after ten minutes.",
            )
        return [_Work(row, tokens[row.pgt_id]) for row in rows]

    def _release(self, conn: psycopg.Connection[Any], ids: Sequence[int]) -> None:
        if ids:
            conn.execute(
                "UPDATE pgtrickle.pgt_stream_tables SET claimed_by = NULL, claim_expires = NULL"
                " WHERE claimed_by = %s AND pgt_id = ANY (%s)",
                (self.service_id, list(ids)),
            )

    # -- cut and fetch -------------------------------------------------------------------------------------------------

    def _read(self, works: Sequence[_Work]) -> None:
        """Read everything the refresh needs. A plan that turns out to be for an earlier shape is compiled anew, once."""
        for work in self._read_in_cut(self._read_in_cut(works)):
            work.error = SourceChangedError(f"a source of {work.row.label} keeps being altered", "Refresh again later.")

    def _read_in_cut(self, works: Sequence[_Work]) -> list[_Work]:
        """Take the cut and fetch in its snapshot; gives back the stream tables whose plan was not for their query."""
        outdated: list[_Work] = []
        if not works:
            return outdated
        begin = time.monotonic()
        unknown = [work for work in works if self.programs.known(work.row.pgt_id) is None]
        for pgt_id, (_, shape) in self._shapes(unknown).items() if unknown else ():
            view = next(work.row.view_relid for work in unknown if work.row.pgt_id == pgt_id)
            self.programs.compile_for(pgt_id, view, shape)
        planned = time.monotonic()
        with take_cut(self.conn, [f"q_{work.row.pgt_id}" for work in works]) as cut:
            self.on_step("cut")
            shapes = self._shapes(works)
            sources = self._sources(works, cut)
            cut_done = time.monotonic()
            media: dict[Any, InMemory] = {}
            for work in works:
                meaning, shape = shapes[work.row.pgt_id]
                work.frontier = Frontier(cut.node, cut.snapshot, meaning)
                work.compiled = self.programs.known(work.row.pgt_id)
                assert work.compiled is not None
                work.cut_time = cut.time
                work.sources = sources[work.row.pgt_id]
                if work.compiled.shape != shape:
                    self.programs.forget(work.row.pgt_id)
                    outdated.append(work)
                    continue
                self._attempt(work, partial(self._prepare, work, cut, media))
            prepared = time.monotonic()
            self._read_together(works, media)
            exported = cut.export() if any(work.large is not None for work in works) else ""
            together = (time.monotonic() - prepared) / len(works)
            for work in works:
                started = time.monotonic()
                if work.error is None and work.job is not None:
                    self._attempt(work, partial(self._fetch, work, exported))
                if isinstance(work.error, psycopg.DataError) and self._may_start_over(work):
                    self._attempt(work, partial(self._fetch_whole, work, cut, media))
                work.phases.fetch = time.monotonic() - started + together
                work.phases.plan = (planned - begin + prepared - cut_done) / len(works)
                work.phases.cut = (cut_done - planned) / len(works)
            self.on_step("fetch")
        return outdated

    def _attempt(self, work: _Work, step: Callable[[], None]) -> None:
        """A step that concerns one stream table only; the others go on without it."""
        try:
            step()
        except (psycopg.Error, PgtrickleError) as error:
            if self.conn.broken or self.conn.closed:
                raise
            work.error = error

    def _shapes(self, works: Sequence[_Work]) -> dict[int, tuple[str, str]]:
        """For each stream table what its query means beyond its text, and the shape that a plan is compiled for."""
        parameters = {"ids": [work.row.pgt_id for work in works], "views": [work.row.view_relid for work in works]}
        rows = self.conn.execute(load_query("meaning"), parameters).fetchall()
        return {row[0]: (row[1] or "", f"{row[1]}/{row[2]}") for row in rows}

    def _sources(self, works: Sequence[_Work], cut: Cut) -> dict[int, list[Source]]:
        frontiers = {work.row.pgt_id: Frontier.from_json(work.row.frontier) for work in works}
        return changed_sources(cut, frontiers)

    def _prepare(self, work: _Work, cut: Cut, media: dict[Any, InMemory]) -> None:
        """Decide what the refresh does, and announce what it will read."""
        assert work.compiled is not None
        assert work.frontier is not None
        _check_key(work)
        work.decision = decide(work.row, work.compiled, work.sources, work.frontier)
        self._announce(work, cut, media)

    def _announce(self, work: _Work, cut: Cut, media: dict[Any, InMemory]) -> None:
        row = work.row
        work.job = self._job(work)
        if work.job is None:
            return
        settings = {name: value for name, value in row.session_settings.items() if name != "search_path"}
        work.settings = TRANSPORT | settings
        if self._is_large(work):
            from pgtrickle.engine.large import LargeWork

            work.large = LargeWork(cut.conn, work.settings, self.statements)
            return
        key = (tuple(sorted(work.settings.items())), None if row.own else row.owner)
        medium = media.setdefault(key, InMemory(cut.conn, self.statements))
        work.fetcher = Fetcher(self._reader(work), _window(work), medium)
        work.job.announce(work.fetcher)

    def _reader(self, work: _Work) -> Reader:
        row = work.row
        return Reader(self.conn, None if row.own else sql.Identifier("pgtrickle_views", f"read_{row.pgt_id}"))

    def _read_together(self, works: Sequence[_Work], media: dict[Any, InMemory]) -> None:
        """Read shared changes once. Where that fails, every stream table reads for itself and fails for itself."""
        for medium in media.values():
            busy = [work for work in works if work.fetcher is not None and work.fetcher.medium is medium]
            try:
                with self.conn.transaction():
                    set_local(self.conn, busy[0].settings)
                    read_together([work.fetcher for work in busy if work.fetcher is not None], medium)
            except psycopg.Error:
                if self.conn.broken or self.conn.closed:
                    raise

    def _fetch(self, work: _Work, exported: str) -> None:
        assert work.job is not None
        if work.large is not None:
            with self.conn.transaction():
                set_local(self.conn, work.settings)
                work.rows_in, work.into_empty = work.large.fetch(work.job, self._reader(work), _window(work), exported)
            return
        assert work.fetcher is not None
        medium = work.fetcher.medium
        assert isinstance(medium, InMemory)
        with self.conn.transaction() if work.fetcher.missing else nullcontext():
            if work.fetcher.missing:
                set_local(self.conn, work.settings)
            work.tables = work.job.fetch(work.fetcher)
        parts = {fragment: medium.part_of(table) for fragment, table in work.tables.items()}
        work.parts = {fragment: part for fragment, part in parts.items() if part is not None}
        work.rows_in = sum(table.num_rows for table in work.tables.values())
        work.into_empty = work.job.stored is not None and work.tables[work.job.stored].num_rows == 0

    @staticmethod
    def _may_start_over(work: _Work) -> bool:
        return work.decision is not None and work.decision.action == "DIFFERENTIAL" and work.row.refresh_mode == "AUTO"

    def _fetch_whole(self, work: _Work, cut: Cut, media: dict[Any, InMemory]) -> None:
        """An expression is evaluated for all changed rows, also those that the query would not have come to."""
        assert work.decision is not None
        reason = f"an expression fails for changed rows that the query may not reach: {work.error}"
        work.error, work.large, work.fetcher = None, None, None
        work.decision = replace(work.decision, action="FULL", reason=reason.splitlines()[0])
        self._announce(work, cut, media)
        self._fetch(work, cut.export() if work.large is not None else "")

    def _is_large(self, work: _Work) -> bool:
        """Whether the refresh reads more than should pass through the driver."""
        assert work.decision is not None
        if work.decision.action == "DIFFERENTIAL":
            return sum(source.buffered for source in work.sources if source.changed) > self.large
        sources = [source.relid for source in work.sources] + [work.row.relid]
        row = self.conn.execute(load_query("sizes"), {"relations": sources}).fetchone()
        assert row is not None
        return int(row[0]) > self.large

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
        if program is not None and program.finish and placement == "spark":
            return rows_job(program.core, program.core.columns, placement)
        with self.conn.transaction():
            storage = Analysis(self.conn).relations(work.row.relid)
        return full_job(work.compiled, next(iter(storage.values())), placement)

    # -- Spark and apply -----------------------------------------------------------------------------------------------

    def _compute(self, works: Sequence[_Work]) -> None:
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

    def _compute_large(self, work: _Work) -> None:
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
    def _run(works: Sequence[_Work]) -> list[pa.Table | None]:
        """All jobs as one; where that fails, each alone, so that one stream table does not stop the others."""
        jobs = [Input(work.job, work.tables, work.parts) for work in works if work.job is not None]
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


@contextmanager
def _idle(conn: psycopg.Connection[Any]) -> Iterator[psycopg.Connection[Any]]:
    """The connection, or one like it where an interruption left it in the middle of a statement."""
    if conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        yield conn
        return
    dsn, password = conn.info.dsn, conn.info.password or None
    conn.cancel_safe(timeout=5)
    conn.close()
    with psycopg.connect(dsn, password=password, autocommit=True) as other:
        yield other


def _window(work: _Work) -> Snapshot | None:
    known = Frontier.from_json(work.row.frontier)
    return known.snapshot if known is not None else None


def _check_key(work: _Work) -> None:
    """The table's unique key must still be one of the query, or rows would overwrite each other."""
    program = work.compiled.program if work.compiled is not None else None
    stored = work.row.key_columns
    if stored is None or program is None or (program.key is not None and set(program.key) <= set(stored)):
        return
    raise PgtrickleError(
        f"{work.row.label} has the key ({', '.join(stored)}), which is no longer one of its query",
        "The query or the key of a source was changed. Drop the stream table and create it again.",
    )
