"""Durations, results and outcomes of refreshes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pgtrickle.errors import RefreshConflictError
from pgtrickle.refresh.failures import failure_of


@dataclass
class Phases:
    """Seconds per phase."""

    cut: float = 0.0
    fetch: float = 0.0
    plan: float = 0.0
    spark: float = 0.0
    apply: float = 0.0

    def seconds(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 6) for name in ("cut", "fetch", "plan", "spark", "apply")}


@dataclass(frozen=True)
class RefreshResult:
    """What one refresh of a stream table did."""

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
    """The results and failures of a call for several stream tables."""

    results: list[RefreshResult] = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)  # names of stream tables that another process has claimed
    names: dict[int, str] = field(default_factory=dict)  # of stream tables that failed
    atomic: bool = False  # all were refreshed in one transaction

    @property
    def problems(self) -> dict[str, Exception]:
        """Why stream tables were not refreshed: an error for each, by name."""
        taken = {
            name: RefreshConflictError(
                f"{name} is being refreshed, altered or dropped by another process",
                "Wait for it to finish; if that process died, its claim ends with its lease, within half a minute.",
            )
            for name in self.taken
        }
        return taken | {self.names.get(id_, f"stream table {id_}"): error for id_, error in self.failures.items()}

    def raise_problems(self, asked: int) -> None:
        """Raise one error if some of the `asked` stream tables were not refreshed."""
        if self.problems:
            raise failure_of(self.problems, asked)

    def __iadd__(self, other: Outcome) -> Outcome:
        self.results += other.results
        self.failures |= other.failures
        self.taken += other.taken
        self.names |= other.names
        return self
