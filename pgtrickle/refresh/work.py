"""One stream table on its way through a refresh."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

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
from pgtrickle.refresh.stream_table import StreamTableRow
from pgtrickle.sites.broker import Interest
from pgtrickle.sites.remote.cut import ForeignSource

if TYPE_CHECKING:
    from pgtrickle.refresh.compute.large import LargeWork

# Called with the name of each step as it is reached; tests stop a process there.
OnStep = Callable[[str], None]


@dataclass
class Work:
    """What is known of it so far; every step adds its part."""

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
    apply_settings: dict[str, str] = field(default_factory=dict)  # under which it is written
    fetcher: Fetcher[Any] | None = None  # of Arrow tables, or of Spark's frames where it is a large one
    sources: list[Source] = field(default_factory=list)
    foreign: list[ForeignSource] = field(default_factory=list)
    shards: dict[str, int | None] = field(default_factory=dict)  # of the coordinator, that it reads: names and OIDs
    lacking: dict[str, dict[str, Interest]] = field(
        default_factory=dict
    )  # what no broker offered, by database and source
    looks: dict[str, str] = field(default_factory=dict)  # what each was like at the cut
    calls: tuple[str, ...] = ()  # functions that are not PostgreSQL's own
    functions: dict[str, dict[str, str]] = field(default_factory=dict)  # versions of what it calls elsewhere, by name
    incarnations: dict[str, str] = field(default_factory=dict)  # of other databases' servers, at the cut
    frontier: Frontier | None = None
    cut_time: datetime | None = None
    large: LargeWork | None = None
    into_empty: bool = False  # nothing is stored yet
    rows_in: int = 0
    changes: int = 0  # that waited in the buffers; counted only where there are many
    merge_mb: str = ""
    reshaped: bool = False  # its plan was for other tables than those of the cut
    needs_all: bool = False  # databases that have no news must be read nevertheless
    error: Exception | None = None
    applied: bool = False

    @property
    def joined(self) -> frozenset[str]:
        """Databases that are read for the first time, by themselves."""
        return frozenset(source.database for source in self.sources if source.joined)

    @property
    def cut_databases(self) -> list[str]:
        """The databases that it reads and that were cut for this refresh."""
        return sorted(self.incarnations)

    @property
    def windows(self) -> dict[str, Snapshot]:
        """For each database the snapshot behind which its changes lie."""
        known = Frontier.from_json(self.row.frontier)
        if known is None:
            return {}
        return {"": known.snapshot} | {name: one.snapshot for name, one in known.databases.items()}
