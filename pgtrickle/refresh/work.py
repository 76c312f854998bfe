"""The state of one stream table during a refresh."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.frontier.frontier import Frontier
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.query.plan import Fragment
from pgtrickle.refresh.cut.sources import Source
from pgtrickle.refresh.decide.decision import Decision
from pgtrickle.refresh.fetch.fetcher import Fetcher
from pgtrickle.refresh.fetch.medium import Part
from pgtrickle.refresh.planning.compiled import Compiled
from pgtrickle.refresh.planning.jobs import Job
from pgtrickle.refresh.results import Phases
from pgtrickle.sites.broker import Interest
from pgtrickle.sites.remote.cut import ForeignSource

if TYPE_CHECKING:
    from pgtrickle.refresh.compute.large import LargeWork

# Called with the name of each step when it is reached. Tests use it to stop a process there.
OnStep = Callable[[str], None]


@dataclass
class Work:
    """The state of one stream table during a refresh; every step adds its part."""

    row: StreamTableRow
    token: int
    started: float = field(default_factory=time.monotonic)
    phases: Phases = field(default_factory=Phases)
    decision: Decision | None = None
    compiled: Compiled | None = None
    job: Job | None = None
    tables: dict[Fragment, pa.Table] = field(default_factory=dict)
    parts: dict[Fragment, Part] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)  # for reading the sources
    apply_settings: dict[str, str] = field(default_factory=dict)  # for writing the stream table
    fetcher: Fetcher[Any] | None = None  # of Arrow tables, or of Spark DataFrames in a large refresh
    sources: list[Source] = field(default_factory=list)
    foreign: list[ForeignSource] = field(default_factory=list)
    shards: dict[str, int | None] = field(default_factory=dict)  # shards of the coordinator that are read: name, OID
    # By database and source: expressions and conditions that no broker offered.
    lacking: dict[str, dict[str, Interest]] = field(default_factory=dict)
    looks: dict[str, str] = field(default_factory=dict)  # state of set members at the cut, as _look() describes it
    calls: tuple[str, ...] = ()  # user-defined functions, operators and types that the query uses
    # By database: the version there of everything in `calls`, by name.
    functions: dict[str, dict[str, str]] = field(default_factory=dict)
    incarnations: dict[str, str] = field(default_factory=dict)  # of the servers of remote databases, at the cut
    frontier: Frontier | None = None
    cut_time: datetime | None = None
    large: LargeWork | None = None
    into_empty: bool = False  # the stream table has no rows yet
    rows_in: int = 0
    changes: int = 0  # pending in the change buffers; counted only if there are many
    merge_mb: str = ""
    reshaped: bool = False  # the plan was compiled for another shape of the sources than that of the cut
    needs_all: bool = False  # databases that were skipped for lack of news must be read after all
    error: Exception | None = None
    applied: bool = False

    @property
    def joined(self) -> frozenset[str]:
        """Databases that joined a set since the last refresh, and whose tables are read in full."""
        return frozenset(source.database for source in self.sources if source.joined)

    @property
    def cut_databases(self) -> list[str]:
        """The remote databases that were cut for this refresh."""
        return sorted(self.incarnations)

    @property
    def windows(self) -> dict[str, Snapshot]:
        """For each database the stored frontier's snapshot; the changes to read are those that it does not see."""
        known = Frontier.from_json(self.row.frontier)
        if known is None:
            return {}
        return {"": known.snapshot} | {name: one.snapshot for name, one in known.databases.items()}
