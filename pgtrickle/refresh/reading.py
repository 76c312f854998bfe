"""Reading everything that refreshes need, in one cut of all their databases: the stages from plan to fetch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import psycopg

from pgtrickle.errors import SourceChangedError
from pgtrickle.refresh.cut.cut import Cut, take_cut
from pgtrickle.refresh.cut.inspection import inspect
from pgtrickle.refresh.decide.decider import Decider
from pgtrickle.refresh.fetch.fetch_stage import Announced, FetchStage
from pgtrickle.refresh.fetch.helper_process import HelperProcesses
from pgtrickle.refresh.planning.job_planner import JobPlanner
from pgtrickle.refresh.planning.planner import Planner
from pgtrickle.refresh.progress import Progress
from pgtrickle.refresh.stages import AtCut, Claimed, Fetched, Planned
from pgtrickle.sites.protocol import Interests, Sites

# From this many bytes of table files on, rows bypass the driver: Spark's executors read and write them.
LARGE_BYTES = 64 << 20

MOST_CUTS = 4


@dataclass
class Read:
    """What came of one cut."""

    fetched: list[Fetched] = field(default_factory=list)
    outdated: list[AtCut] = field(default_factory=list)  # the plan was compiled for another shape of the sources
    incomplete: list[AtCut] = field(default_factory=list)  # databases that were skipped must be read after all
    wanted: Interests = ()  # what brokers did not offer

    @property
    def again(self) -> list[AtCut]:
        return [*self.outdated, *self.incomplete]


@dataclass
class SnapshotReader:
    """Reads the sources for refreshes of the stream tables of one database."""

    conn: psycopg.Connection[Any]
    planner: Planner
    statements: list[str]  # that were sent to the sources
    large: int = LARGE_BYTES
    helpers: HelperProcesses | None = None  # set in a service

    def read(self, claimed: Sequence[Claimed], sites: Sites, progress: Progress) -> list[Fetched]:
        """Read everything the refreshes need, in at most MOST_CUTS cuts.

        A stream table is read again if its plan turns out to be compiled for an earlier shape of its sources, or if
        databases must be read that were skipped because they had no news.
        """
        fetched: list[Fetched] = []
        whole: set[int] = set()
        for _ in range(MOST_CUTS):
            if not claimed:
                return fetched
            found = self._read_in_cut(claimed, sites, progress, whole)
            fetched += found.fetched
            sites.realign(found.outdated, progress.failed)
            whole |= {table.row.pgt_id for table in found.incomplete}
            claimed = [table.planned.claimed for table in progress.failed.healthy(found.again)]
        for table in claimed:
            label = table.row.label
            error = SourceChangedError(f"a source of {label} keeps being altered", "Refresh again later.")
            progress.failed.add(error, [table])
        return fetched

    def _read_in_cut(self, claimed: Sequence[Claimed], sites: Sites, progress: Progress, whole: set[int]) -> Read:
        planned = self.planner.plan(claimed, sites, progress, whole)
        if not planned:
            return Read()
        begin = time.monotonic()
        with self.cut(planned, sites, progress) as (cut, readable):
            progress.on_step("cut")
            found = self.read_at(cut, readable, sites, progress, begin)
        sites.want(found.wanted)
        return found

    @contextmanager
    def cut(
        self, planned: Sequence[Planned], sites: Sites, progress: Progress, *, writes: bool = False
    ) -> Iterator[tuple[Cut, list[Planned]]]:
        """Cut all databases that these stream tables read, their own last: it does not wait for any other.

        Yields the stream tables with the rows that they have then.
        """
        rows = sites.resolve_redirected(planned, progress.failed)
        planned = [table.with_row(rows.get(table.row.pgt_id, table.row)) for table in planned]
        with sites.cut(progress.failed.healthy(planned), progress.failed) as others:
            planned = progress.failed.healthy(planned)
            views = [f"q_{table.row.pgt_id}" for table in planned]
            spread = {relid for table in planned for relid in table.row.spread_here}
            with take_cut(self.conn, views, spread, writes=writes, hurried=others.hurried) as cut:
                others.lift()
                yield replace(cut, others=others.cuts, readings=others.readings), planned

    def read_at(self, cut: Cut, planned: Sequence[Planned], sites: Sites, progress: Progress, begin: float) -> Read:
        """Read in the snapshot of a cut that was begun at `begin`."""
        found = inspect(cut, planned, self.planner, progress)
        tables = found.at_cut
        read = Read(outdated=list(found.outdated))
        if not tables:
            return read
        readers_of = Counter(one.relid for table in tables for one in table.sources if one.changed)
        decider = Decider(cut, JobPlanner(self.conn, self.planner.programs.plans))
        stage = FetchStage(self.conn, cut, decider, progress, self.statements, self.large, self.helpers, readers_of)
        cut_done = time.monotonic()
        announced: list[Announced] = []
        for table in tables:
            one = progress.attempt(table, partial(_announce, table, decider, stage, progress))
            if one is not None and one.is_complete:
                announced.append(one)
            elif progress.failed.of(table) is None:
                read.incomplete.append(table)
        prepared = time.monotonic()
        stage.read_together(announced, brokered=sites.brokered)
        together = (time.monotonic() - prepared) / len(tables)
        for one in announced:
            started = time.monotonic()
            fetched = progress.attempt(one, partial(stage.fetch, one))
            progress.phases[one.row.pgt_id].fetch = time.monotonic() - started + together
            if fetched is not None:
                read.fetched.append(fetched)
                progress.reached("fetch", one, rows=fetched.rows_in)
            elif progress.failed.of(one) is None:
                read.incomplete.append(one.decided.at_cut)
        for table in tables:
            phases = progress.phases[table.row.pgt_id]
            phases.plan += (prepared - cut_done) / len(tables)
            phases.cut = (cut_done - begin) / len(tables)
        progress.on_step("fetch")
        read.wanted = stage.wanted
        return read


def _announce(table: AtCut, decider: Decider, stage: FetchStage, progress: Progress) -> Announced | None:
    """Decide on the action of a refresh, and announce what it reads; None if that takes databases that were not cut."""
    if _has_come_meanwhile(table):
        return None
    decided = decider.decide(table)
    progress.decided[table.row.pgt_id] = decided
    progress.reached("decide", table, action=decided.decision.action, mode=decided.decision.mode)
    return stage.announce(decided)


def _has_come_meanwhile(table: AtCut) -> bool:
    """Whether the coordinator's shards changed although nodes were skipped because they had no news.

    The nodes may have changes of the same transactions by now.
    """
    changed = any(source.spread and source.changed and not source.database for source in table.sources)
    return changed and any(source.spread and source.resting for source in table.sources)
