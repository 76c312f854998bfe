"""Values that travel through a refresh."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from pgtrickle.compile.text import ident
from pgtrickle.engine.load import Delta
from pgtrickle.engine.reach import is_node


@dataclass(frozen=True)
class StreamTableRow:
    """A stream table as the catalog has it."""

    pgt_id: int
    pgt_schema: str
    pgt_name: str
    relid: int
    view_relid: int
    refresh_mode: str
    effective_mode: str | None
    mode_reason: str | None
    status: str
    status_reason: str | None
    schedule: str
    key_columns: list[str] | None
    frontier: dict[str, Any] | None
    data_timestamp: datetime | None
    reinit_reason: str | None
    fencing_token: int
    consecutive_errors: int
    full_seconds: float | None  # what the last refresh in full cost
    row_seconds: float | None  # what a changed row costs
    fuse_ceiling: int  # more changes than that at once are not applied; 0 for no limit
    placement: str
    pooler_compatibility_mode: bool  # refreshed without anything that outlives a transaction
    lost_members: str  # of a set: waited for, or kept as they were last read
    st_placement: str  # of its table in a Citus cluster
    output_distribution_column: str | None
    databases: list[str]  # others that it reads
    reads_here: bool  # tables of this one too, apart from those
    spread_here: list[int]  # distributed tables: this database, the coordinator, may have shards of them
    on_citus: bool  # the database has Citus
    session_settings: dict[str, str]
    defining_query: str
    owner: str | None
    own: bool | None
    problem: str | None  # a part that is missing, or a right that the owner no longer has

    @property
    def label(self) -> str:
        """The name as it is written in SQL."""
        return f"{_written(self.pgt_schema)}.{_written(self.pgt_name)}"

    @property
    def on_nodes(self) -> bool:
        """Whether it reads distributed tables from the nodes of the cluster, of which this database may be one."""
        return bool(self.spread_here) or any(map(is_node, self.databases))

    @property
    def in_parts(self) -> bool:
        """Whether no query of this database alone reads all that it reads."""
        return bool(self.databases or self.spread_here)


def _written(name: str) -> str:
    return name if re.fullmatch(r"[a-z_][a-z0-9_$]*", name) else ident(name)


@dataclass
class Phases:
    """Seconds per phase, and the delta between Spark and apply."""

    cut: float = 0.0
    fetch: float = 0.0
    plan: float = 0.0
    spark: float = 0.0
    apply: float = 0.0
    delta: Delta | None = None

    def seconds(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 6) for name in ("cut", "fetch", "plan", "spark", "apply")}


@dataclass(frozen=True)
class RefreshResult:
    """What a refresh did."""

    pgt_id: int
    name: str
    action: str  # NO_DATA, DIFFERENTIAL, FULL or REINITIALIZE
    reason: str | None
    rows_in: int
    rows_inserted: int
    rows_deleted: int
    phases: dict[str, float]
    refresh_id: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Outcome:
    """What became of several stream tables that were to be refreshed together."""

    results: list[RefreshResult] = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)  # names of those that another process is refreshing

    def __iadd__(self, other: Outcome) -> Outcome:
        self.results += other.results
        self.failures |= other.failures
        self.taken += other.taken
        return self
