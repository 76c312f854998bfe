"""Cut and fetch: reading everything that a refresh needs, in one snapshot per database."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import psycopg
from psycopg import sql

from pgtrickle.catalog.analysis import Analysis, load_query
from pgtrickle.catalog.databases import is_node
from pgtrickle.catalog.problems import lacking
from pgtrickle.compile.placement import Placement
from pgtrickle.compile.postgres import compile_fragment
from pgtrickle.compile.sql_text import SHARDS
from pgtrickle.errors import (
    KeyLostError,
    NotDifferentiableError,
    PgtrickleError,
    SourceChangedError,
    SourceLockedError,
)
from pgtrickle.frontier.frontier import Frontier, Reflected
from pgtrickle.ivm.simplify import simplify
from pgtrickle.postgres import fence
from pgtrickle.postgres.connection import is_pooled
from pgtrickle.postgres.copying import ResultTooLargeError
from pgtrickle.postgres.transactions import CUT_LOCK_TIMEOUT, export, set_local
from pgtrickle.query.budget import Budget, OverBudget, planning_within
from pgtrickle.refresh.cut.cut import Cut, take_cut
from pgtrickle.refresh.cut.sources import Source, changed_sources
from pgtrickle.refresh.decide.cost import check_fuse, compare_costs, is_large
from pgtrickle.refresh.decide.decision import decide
from pgtrickle.refresh.fetch.brokered import take_brokered
from pgtrickle.refresh.fetch.fetcher import Fetcher
from pgtrickle.refresh.fetch.helper_process import HelperProcesses
from pgtrickle.refresh.fetch.medium import HelperRead, InMemory
from pgtrickle.refresh.fetch.reader import Reader
from pgtrickle.refresh.fetch.shared_scan import read_shared_scans
from pgtrickle.refresh.planning.jobs import Job, change_job, check_job, full_job, rows_job, state_job
from pgtrickle.refresh.planning.programs import Programs
from pgtrickle.refresh.work import Work
from pgtrickle.sites.citus.shards import Shards
from pgtrickle.sites.remote.cut import RemoteCut
from pgtrickle.sites.remote.cuts import RemoteCuts
from pgtrickle.sites.remote.databases import RemoteDatabases

log = logging.getLogger("pgtrickle.engine")

# Settings for printing values and reading them back; the stream table's own settings are added.
TRANSPORT = {
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "xmlbinary": "base64",
    "search_path": "pg_catalog, pg_temp",
}

# From this many bytes of table files on, rows bypass the driver: Spark's executors read and write them.
LARGE_BYTES = 64 << 20

PASSES = 4


@dataclass
class SnapshotReader:
    """Reads the sources for refreshes of the stream tables of one database."""

    conn: psycopg.Connection[Any]
    programs: Programs
    remote: RemoteDatabases
    on_step: Callable[[str], None]
    statements: list[str]  # that were sent to the sources
    large: int = LARGE_BYTES
    helpers: HelperProcesses | None = None  # set in a service
    _readers_of: Counter[int] = field(default_factory=Counter)  # readers per changed source in this cut

    def __post_init__(self) -> None:
        self.others = RemoteCuts(self.remote)

    def read(self, works: Sequence[Work]) -> None:
        """Read everything the refresh needs, in at most PASSES cuts.

        A stream table is read again if its plan turns out to be compiled for an earlier shape of its sources, or if
        databases must be read that were skipped because they had no news.
        """
        again = works
        for _ in range(PASSES):
            again = self._read_in_cut(again)
            self.remote.realign([work for work in again if work.reshaped])
            again = [work for work in again if work.error is None]
        for work in again:
            work.error = SourceChangedError(f"a source of {work.row.label} keeps being altered", "Refresh again later.")

    def _read_in_cut(self, works: Sequence[Work]) -> list[Work]:
        """Take the cut and fetch in its snapshot; return the works that must be read again."""
        if not works:
            return []
        self.compile_unknown(works)
        works = [work for work in works if work.error is None]
        begin = time.monotonic()
        with self.cut(works) as cut:
            self.on_step("cut")
            again = self.read_at(cut, works, begin)
        self.remote.want(works)
        return again

    @contextmanager
    def cut(self, works: Sequence[Work], *, writes: bool = False) -> Iterator[Cut]:
        """Cut all databases that these stream tables read, their own last: it does not wait for any other."""
        with self.others.cut(works) as others:
            views = [f"q_{work.row.pgt_id}" for work in works if work.error is None]
            hurried = self.others.barrier.is_up  # transactions of the whole cluster wait
            spread = {table for work in works if work.error is None for table in work.row.spread_here}
            with take_cut(self.conn, views, spread, writes=writes, hurried=hurried) as cut:
                self.others.barrier.lift()
                yield replace(cut, others=others)

    def compile_unknown(self, works: Sequence[Work]) -> None:
        """Compile the queries of which no plan is cached."""
        begin = time.monotonic()
        unknown = [work for work in works if self.programs.known(work.row.pgt_id) is None]
        shapes = self._shapes(unknown) if unknown else {}
        for work in unknown:
            self._compile(work, _shape_of(work, shapes))
            if isinstance(work.error, SourceChangedError) and work.row.databases:
                # What was missing may have reappeared by now.
                work.error, work.foreign = None, self.remote.sources([work])
                self.remote.realign([work])
                if work.error is None:
                    self._compile(work, _shape_of(work, self._shapes([work])))
        for work in works:
            work.phases.plan = (time.monotonic() - begin) / len(works)
            known = self.programs.plans.compiled.get(work.row.pgt_id)
            work.calls = known.functions if known is not None else ()

    def _compile(self, work: Work, shape: str) -> None:
        self._attempt(work, partial(self.programs.compile_for, work.row, shape))

    def read_at(self, cut: Cut, works: Sequence[Work], begin: float) -> list[Work]:
        """Fetch in the snapshot of a cut that was begun at `begin`; return the works that must be read again."""
        for work in works:
            if work.error is None and f"q_{work.row.pgt_id}" in cut.locked:
                work.error = cut.locked[f"q_{work.row.pgt_id}"] or SourceLockedError(
                    f"a table that {work.row.label} reads is locked by another session",
                    f"`pgtrickle refresh {work.row.label}` waits {CUT_LOCK_TIMEOUT} for it; a service tries again by itself.",
                )
        self._check_rights(works)
        works = [work for work in works if work.error is None]
        if not works:
            return []
        outdated: list[Work] = []
        shapes = self._shapes(works)
        sources = self._sources(works, cut)
        self._readers_of = Counter(one.relid for found in sources.values() for one in found if one.changed)
        cut_done = time.monotonic()
        media: dict[Any, InMemory] = {}
        for work in works:
            meaning, _, labels = shapes[work.row.pgt_id]
            others = _others(work, cut.others)
            work.frontier = Frontier(cut.node, cut.snapshot, meaning, others, _shards(work, others), labels)
            work.incarnations = {
                name: cut.others[name].incarnation for name in work.row.databases if name in cut.others
            }
            work.compiled = self.programs.known(work.row.pgt_id)
            assert work.compiled is not None
            work.cut_time, work.merge_mb = cut.time, cut.merge_mb
            work.sources = sources[work.row.pgt_id]
            shards = [cut.shards[table] for table in work.row.spread_here]
            work.shards = {name: relid for one in shards for name, relid in zip(one.names, one.relids, strict=True)}
            work.reshaped = work.compiled.shape != _shape_of(work, shapes) or _changed_shape(work, cut.others)
            if work.reshaped:
                self.programs.plans.forget(work.row.pgt_id)
                outdated.append(work)
                continue
            self._attempt(work, partial(self._prepare, work, cut, media))
        for work in works:
            if work.reshaped or work.needs_all:
                work.job = work.fetcher = work.large = None
        prepared = time.monotonic()
        self._take_brokered(works, cut)
        self._let_helpers_read(works, cut, media)
        self._read_shared_scans(works, media)
        together = (time.monotonic() - prepared) / len(works)
        for work in works:
            started = time.monotonic()
            if work.error is None and work.job is not None:
                self._attempt(work, partial(self._fetch, work))
            if isinstance(work.error, ResultTooLargeError) and not is_pooled(self.conn):
                self._attempt(work, partial(self._fetch_large, work, cut))
            if isinstance(work.error, psycopg.DataError) and self._may_start_over(work):
                self._attempt(work, partial(self._fetch_whole, work, cut, media))
            work.phases.fetch = time.monotonic() - started + together
            work.phases.plan += (prepared - cut_done) / len(works)
            work.phases.cut = (cut_done - begin) / len(works)
        self.on_step("fetch")
        # Databases that were skipped must be read after all, in another pass that cuts them too.
        return outdated + [w for w in works if w.error is None and w.needs_all and not w.reshaped]

    def _check_rights(self, works: Sequence[Work]) -> None:
        """Check in the cut that owners may read their sources. The cut's locks keep policies as they are after that."""
        rows = self.conn.execute(load_query("rights"), ([work.row.pgt_id for work in works],)).fetchall()
        found = {pgt_id: (problem, hidden) for pgt_id, problem, hidden in rows}
        for work in works:
            problem, hidden = found.get(work.row.pgt_id, (None, None))
            if work.error is None and problem is not None:
                work.row = replace(work.row, problem=problem)
                work.error = lacking(work.row.label, problem)
            elif hidden != work.row.hidden:
                work.row = replace(work.row, hidden=hidden)

    def _attempt(self, work: Work, step: Callable[[], None]) -> None:
        """Run a step of one stream table. If it fails, the others go on without that one."""
        try:
            step()
        except Exception as error:
            if self.conn.broken or self.conn.closed:
                raise
            if not isinstance(error, psycopg.Error | PgtrickleError):
                log.exception("a refresh failed unexpectedly", extra={"stream_table": work.row.label})
            work.error = error

    def _shapes(self, works: Sequence[Work]) -> dict[int, tuple[str, str, dict[str, str]]]:
        """For each stream table: the meaning of its query beyond the text, its shape, and the labels of its enums."""
        parameters = {"ids": [work.row.pgt_id for work in works], "views": [work.row.view_relid for work in works]}
        rows = self.conn.execute(load_query("meaning"), parameters).fetchall()
        return {row[0]: (row[1] or "", f"{row[1]}/{row[2]}/{row[3]}", row[3]) for row in rows}

    def _sources(self, works: Sequence[Work], cut: Cut) -> dict[int, list[Source]]:
        frontiers = {work.row.pgt_id: Frontier.from_json(work.row.frontier) for work in works}
        return changed_sources(cut, frontiers, cut.others, [source for work in works for source in work.foreign])

    def _prepare(self, work: Work, cut: Cut, media: dict[Any, InMemory]) -> None:
        """Decide on the action of the refresh, and announce what it will read."""
        assert work.compiled is not None
        assert work.frontier is not None
        _check_key(work)
        work.needs_all = _has_come_meanwhile(work)
        if work.needs_all:
            return
        work.decision = decide(work.row, work.compiled, work.sources, work.frontier)
        check_fuse(work, cut)
        compare_costs(work, cut)
        work.frontier = _as_far_as_read(work, work.frontier)
        self._announce(work, cut, media)

    def _announce(self, work: Work, cut: Cut, media: dict[Any, InMemory]) -> None:
        row = work.row
        if any(source.database and not source.attached for source in work.sources):
            return  # capture must be set up before these can be read
        work.job = self._job(work)
        if work.job is None:
            return
        work.settings = TRANSPORT | row.query_settings
        if not is_pooled(self.conn) and is_large(work, cut, self.large, self._readers_of):
            fetcher: Fetcher[Any] = self._on_executors(work, cut)
        else:
            key = (tuple(sorted(work.settings.items())), None if row.own else row.owner)
            medium = media.setdefault(key, InMemory(cut.conn, self.statements, work.settings))
            fetcher = Fetcher(self._readers(work, cut), work.windows, medium, work.joined)
        work.fetcher = fetcher
        work.job.announce(fetcher)
        work.needs_all = not fetcher.databases <= fetcher.readers.keys()

    def _on_executors(self, work: Work, cut: Cut) -> Fetcher[Any]:
        """Turn the work into a large refresh, and return its fetcher."""
        from pgtrickle.refresh.compute.large import LargeWork

        work.large = LargeWork(cut.conn, work.settings, self.statements)
        return work.large.fetcher(self._readers(work, cut), work.windows, work.joined)

    def _readers(self, work: Work, cut: Cut) -> dict[str, Reader]:
        row = work.row
        as_owner = None if row.own else sql.Identifier("pgtrickle_views", f"read_{row.pgt_id}")
        assert work.compiled is not None
        own_code = work.compiled.own_code
        if as_owner is not None:
            fence.enter(self.conn)
        here = {f"{SHARDS}{table}": cut.shards[table] for table in row.spread_here}
        return {"": Reader(self.conn, as_owner, own_code, shards=here)} | {
            name: Reader(
                cut.others[name].conn,
                database=name,
                settings=work.settings,
                shards=_shards_of(work, cut.others[name]),
            )
            for name in work.cut_databases
        }

    def _take_brokered(self, works: Sequence[Work], cut: Cut) -> None:
        """Take the changes that brokers have read, and note what they do not offer yet."""
        for work in works if self.remote.brokers is not None else ():
            if work.fetcher is None or work.large is not None or (work.compiled is not None and work.compiled.own_code):
                continue
            for database in [name for name in work.cut_databases if not is_node(name)]:
                shared_cut = cut.others[database].shared_cut
                names = {
                    one.relid: one.stable_name
                    for one in work.sources
                    if one.database == database and one.stable_name is not None
                }
                usable = shared_cut if shared_cut is not None and dict(shared_cut.settings) == work.settings else None
                wanted = take_brokered(work.fetcher, database, names, usable)
                if wanted:
                    work.lacking[database] = wanted

    def _let_helpers_read(self, works: Sequence[Work], cut: Cut, media: Mapping[Any, InMemory]) -> None:
        """Let helper processes read large numbers of changes; reading them here would block all other threads."""
        if self.helpers is None or not media or cut.writes or is_pooled(self.conn):
            return
        sources = [source for work in works for source in work.sources if source.changed and not source.database]
        many = frozenset(source.relid for source in sources if source.buffered > self.helpers.many)
        if many:
            exported = export(cut.conn)
            for medium in media.values():
                medium.helpers = HelperRead(self.helpers, exported, many)

    def _read_shared_scans(self, works: Sequence[Work], media: dict[Any, InMemory]) -> None:
        """Read shared changes once. If that fails, every stream table does its own reading, and fails on its own."""
        for medium in media.values():
            busy = [work for work in works if work.fetcher is not None and work.fetcher.medium is medium]
            if not busy:
                continue
            try:
                with self._ended_after(busy), self.conn.transaction(force_rollback=True):
                    set_local(self.conn, busy[0].settings)
                    read_shared_scans([work.fetcher for work in busy if work.fetcher is not None], medium)
            except (psycopg.Error, ResultTooLargeError):
                if self.conn.broken or self.conn.closed:
                    raise

    def _ended_after(self, works: Sequence[Work]) -> AbstractContextManager[None]:
        """A time limit for code of the works' owner, which may not end by itself. All works have the same owner."""
        if all(work.row.own for work in works):
            return nullcontext()
        return fence.read_as_owner(self.conn, [work.row.pgt_id for work in works])

    @contextmanager
    def _blamed_on_executors(self, work: Work) -> Iterator[None]:
        """Suspend the stream table if an executor had to terminate its code."""
        from pgtrickle.spark.executors import WENT_ON

        try:
            yield
        except PgtrickleError as error:
            if WENT_ON in str(error.__cause__):
                fence.suspend(self.conn, [work.row.pgt_id], fence.WENT_ON)
            raise

    def _fetch(self, work: Work) -> None:
        assert work.job is not None
        assert work.fetcher is not None
        if work.large is not None:
            with self._blamed_on_executors(work):
                work.rows_in, work.into_empty = work.large.fetch(work.job, work.fetcher)
            return
        medium = work.fetcher.medium
        assert isinstance(medium, InMemory)
        with (
            self._ended_after([work]),
            self.conn.transaction(force_rollback=True) if work.fetcher.missing else nullcontext(),
        ):
            if work.fetcher.missing:
                set_local(self.conn, work.settings)
            work.tables = work.job.fetch(work.fetcher)
        parts = {fragment: medium.part_of(table) for fragment, table in work.tables.items()}
        work.parts = {fragment: part for fragment, part in parts.items() if part is not None}
        work.rows_in = sum(table.num_rows for table in work.tables.values())
        work.into_empty = work.job.stored is not None and work.tables[work.job.stored].num_rows == 0

    def _fetch_large(self, work: Work, cut: Cut) -> None:
        """Fetch with executors, because the query's result is large although its sources are small."""
        assert work.job is not None
        work.error = None
        work.fetcher = self._on_executors(work, cut)
        work.job.announce(work.fetcher)
        self._fetch(work)

    @staticmethod
    def _may_start_over(work: Work) -> bool:
        return work.decision is not None and work.decision.action == "DIFFERENTIAL" and work.row.refresh_mode == "AUTO"

    def _fetch_whole(self, work: Work, cut: Cut, media: dict[Any, InMemory]) -> None:
        """Fetch for a full refresh, because an expression failed.

        For a delta, expressions are evaluated for all changed rows, even for those where the query would not do so.
        """
        assert work.decision is not None
        reason = f"an expression fails for changed rows that the query may not reach: {work.error}"
        work.error, work.large, work.fetcher = None, None, None
        work.decision = replace(work.decision, action="FULL", reason=reason.splitlines()[0])
        self._announce(work, cut, media)
        if not work.needs_all:
            self._fetch(work)

    def _job(self, work: Work) -> Job | None:
        """The stream table's part of the Spark job, cached by shape, placement, action and changed sources."""
        compiled, row = work.compiled, work.row
        assert work.decision is not None
        assert compiled is not None
        if work.decision.action == "NO_DATA":
            return None
        changed = frozenset(source.relid for source in work.sources if source.changed)
        key = (compiled.shape, row.placement, work.decision.action, changed)
        try:
            return self.programs.plans.job(row.pgt_id, key, lambda: self._plan_job(work, changed))
        except OverBudget as error:
            _plan_otherwise(work, error)
            return self._job(work)

    def _plan_job(self, work: Work, changed: frozenset[int]) -> Job | None:
        """Build a job within a planning budget, because the other stream tables of the refresh wait meanwhile."""
        with planning_within(Budget()):
            job = self._build_job(work, changed)
            if job is not None:
                check_job(job)
                for fragment in job.fragments:
                    compile_fragment(fragment.plan, ())  # cached for the fetch
            return job

    def _build_job(self, work: Work, changed: frozenset[int]) -> Job | None:
        assert work.decision is not None
        assert work.compiled is not None
        program = work.compiled.program
        placement: Placement = "spark" if work.row.placement == "spark" else "auto"
        if work.decision.action == "DIFFERENTIAL":
            assert program is not None
            assert program.change is not None
            change = simplify(program.change, changed)
            return None if change is None else change_job(program, change, placement)
        if program is not None and program.additive is not None:
            return state_job(program.additive, placement)
        if program is not None and program.finish and placement == "spark":
            return rows_job(program.core, program.core.columns, placement)
        with self.conn.transaction():
            storage = Analysis(self.conn).relations(work.row.relid)
        return full_job(work.compiled, next(iter(storage.values())), placement)


def _plan_otherwise(work: Work, error: OverBudget) -> None:
    """Fall back to a full refresh, or from Spark to PostgreSQL in a full refresh, because planning exceeded its budget.

    Raises NotDifferentiableError if neither is allowed.
    """
    decision, row = work.decision, work.row
    assert decision is not None
    if decision.action == "DIFFERENTIAL" and row.refresh_mode == "AUTO":
        work.decision = replace(decision, action="FULL", reason=error.reason)
    elif decision.action != "DIFFERENTIAL" and row.placement == "spark" and not row.in_parts:
        work.row = replace(row, placement="auto")
    else:
        raise NotDifferentiableError(
            f"{row.label} cannot be refreshed: {error.reason}",
            "Use refresh_mode AUTO or FULL, or make several stream tables of it that read each other.",
        ) from error


def _shape_of(work: Work, shapes: Mapping[int, tuple[str, str, dict[str, str]]]) -> str:
    """What a plan is compiled for: the shape of the query's sources, and which of them only PostgreSQL may read."""
    return f"{shapes[work.row.pgt_id][1]}/{work.row.hidden or ''}"


def _check_key(work: Work) -> None:
    """Raise KeyLostError if the stream table's key is no longer a key of its query: rows would overwrite each other."""
    program = work.compiled.program if work.compiled is not None else None
    stored = work.row.key_columns
    if stored is None or program is None or (program.key is not None and set(program.key) <= set(stored)):
        return
    raise KeyLostError(
        f"{work.row.label} has the key ({', '.join(stored)}), which is no longer one of its query",
        "The query or the key of a source was changed. Give the source its key back and resume the stream table,"
        " or drop it and create it again.",
    )


def _has_come_meanwhile(work: Work) -> bool:
    """Whether the coordinator's shards changed although nodes were skipped because they had no news.

    The nodes may have changes of the same transactions by now.
    """
    changed = any(source.spread and source.changed and not source.database for source in work.sources)
    return changed and any(source.spread and source.resting for source in work.sources)


def _others(work: Work, cuts: Mapping[str, RemoteCut]) -> dict[str, Reflected]:
    """The frontier's entries for remote databases at these cuts. Databases that were not cut keep their stored ones."""
    known = Frontier.from_json(work.row.frontier)
    found = {
        name: Reflected(cuts[name].node, cuts[name].snapshot, cuts[name].proof)
        for name in work.row.databases
        if name in cuts
    }
    kept = known.databases if known is not None else {}
    return {name: kept[name] for name in work.row.databases if name in kept} | found


def _shards_of(work: Work, cut: RemoteCut) -> dict[str, Shards]:
    """A node's shards of the distributed tables that a stream table reads, by their placeholders in its fragments."""
    return {
        f"{SHARDS}{source.relid}": cut.shards[source.there]
        for source in work.foreign
        if source.database == cut.database and source.there in cut.shards
    }


def _shards(work: Work, others: Mapping[str, Reflected]) -> frozenset[int]:
    """The set members' tables that the frontier covers. Those of members not reached since they joined are missing."""
    return frozenset(source.relid for source in work.foreign if source.shard and source.database in others)


def _changed_shape(work: Work, cuts: Mapping[str, RemoteCut]) -> bool:
    """Whether a remote table no longer has the shape that the query was compiled for."""
    for source in work.foreign:
        if source.database not in cuts:
            continue
        found = cuts[source.database].consumed.get((source.consumer, source.there))
        if found is not None and found.shape != source.shape:
            return True
    return False


def _as_far_as_read(work: Work, now: Frontier) -> Frontier:
    """The frontier to store. A remote database without changes keeps its stored entry, and gets no new proof."""
    known = Frontier.from_json(work.row.frontier)
    assert work.decision is not None
    if known is None or work.decision.action not in {"DIFFERENTIAL", "NO_DATA"}:
        return now
    news = {source.database for source in work.sources if source.changed}
    return replace(
        now,
        databases={
            name: one if name in news or name not in known.databases else known.databases[name]
            for name, one in now.databases.items()
        },
    )
