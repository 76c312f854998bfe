"""The stages of a refresh: one value for a stream table after each of them, made from the one before.

claim → plan → cut → decide → fetch → compute → apply
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.frontier.frontier import Frontier
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.query.plan import Fragment
from pgtrickle.refresh.apply.load import Delta
from pgtrickle.refresh.decide.decision import Decision
from pgtrickle.refresh.fetch.medium import Part
from pgtrickle.refresh.planning.compiled import Compiled
from pgtrickle.refresh.planning.jobs import Job
from pgtrickle.sites.source import Source
from pgtrickle.sites.stream_tables import RemoteReading

if TYPE_CHECKING:
    from pgtrickle.refresh.compute.large import LargeRefresh


@dataclass(frozen=True)
class Claimed:
    """A stream table that this process may refresh."""

    row: StreamTableRow
    token: int  # fences off processes whose claim has ended
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Planned:
    """A claimed stream table with its compiled query."""

    claimed: Claimed
    compiled: Compiled
    whole: bool = False  # databases without news must be read, too

    @property
    def row(self) -> StreamTableRow:
        return self.claimed.row

    @property
    def functions(self) -> tuple[str, ...]:
        return self.compiled.functions

    def with_row(self, row: StreamTableRow) -> Planned:
        return replace(self, claimed=replace(self.claimed, row=row))


@dataclass(frozen=True)
class AtCut:
    """A planned stream table at the cut: what has happened to its sources since its stored frontier."""

    planned: Planned
    frontier: Frontier  # of the cut
    sources: tuple[Source, ...]
    time: datetime
    merge_mb: str  # memory for sorts and hashes of the apply
    remote: RemoteReading = field(default_factory=RemoteReading)
    shards: Mapping[str, int | None] = field(default_factory=dict)  # that the coordinator reads: OIDs by name

    @property
    def row(self) -> StreamTableRow:
        return self.planned.row

    @property
    def compiled(self) -> Compiled:
        return self.planned.compiled

    @property
    def joined(self) -> frozenset[str]:
        """Databases that joined a set since the last refresh, and whose tables are read in full."""
        return frozenset(source.database for source in self.sources if source.joined)

    @property
    def windows(self) -> dict[str, Snapshot]:
        """For each database the stored frontier's snapshot; the changes to read are those that it does not see."""
        known = self.row.stored_frontier
        if known is None:
            return {}
        return {"": known.snapshot} | {name: one.snapshot for name, one in known.databases.items()}


@dataclass(frozen=True)
class Decided:
    """A stream table whose action is decided, with the job that carries it out."""

    at_cut: AtCut
    decision: Decision
    frontier: Frontier  # to store, as far as this action reads
    placement: str  # of the job
    job: Job | None  # None if nothing has to be read
    changes: int = 0  # pending in the change buffers; counted only if there are many

    @property
    def row(self) -> StreamTableRow:
        return self.at_cut.row

    @property
    def claimed(self) -> Claimed:
        return self.at_cut.planned.claimed

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.at_cut.sources

    @property
    def remote(self) -> RemoteReading:
        return self.at_cut.remote


@dataclass(frozen=True)
class Fetched:
    """A stream table for which everything was read that its job needs."""

    decided: Decided
    tables: Mapping[Fragment, pa.Table] = field(default_factory=dict)
    parts: Mapping[Fragment, Part] = field(default_factory=dict)  # of the tables that are slices of a shared read
    large: LargeRefresh | None = None  # holds the rows on Spark's executors instead
    rows_in: int = 0
    into_empty: bool = False  # the stream table has no rows yet

    @property
    def row(self) -> StreamTableRow:
        return self.decided.row


@dataclass(frozen=True)
class Computed:
    """A stream table with the delta to apply."""

    fetched: Fetched
    delta: Delta | None  # None if it is empty
    transaction: int | None = None  # of a group that is refreshed together: what it writes counts as read

    @property
    def decided(self) -> Decided:
        return self.fetched.decided

    @property
    def row(self) -> StreamTableRow:
        return self.fetched.row

    @property
    def frontier(self) -> Frontier:
        """The frontier to store."""
        frontier = self.decided.frontier
        if self.transaction is None:
            return frontier
        return replace(frontier, snapshot=replace(frontier.snapshot, passed=self.transaction))
