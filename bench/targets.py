"""What was promised, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bench.dataset import QUERIES
from bench.refresh import FULL, PLACEMENTS, Report

SMALL, LARGE = 1_000_000, 5_000_000
FEW = "1000"


@dataclass(frozen=True)
class Verdict:
    """One target beside its measurement; no measurement where the run did not include it."""

    what: str
    bound: float
    sense: Literal["at most", "at least"]
    measured: float | None

    @property
    def outcome(self) -> str:
        if self.measured is None:
            return "not measured"
        good = self.measured <= self.bound if self.sense == "at most" else self.measured >= self.bound
        return "reached" if good else "NOT REACHED"


def refresh_verdicts(report: Report) -> list[Verdict]:
    """The targets for refreshes, for every size that was measured."""
    return [*_against_spark(report), *_growth(report), *_against_full(report)]


def _against_spark(report: Report) -> Iterator[Verdict]:
    for rows in sorted({cell.rows for cell in report.cells}):
        for placement in PLACEMENTS:
            for query in QUERIES:
                bound = 4.0 if placement == "spark" else 1.5 if query == "aggregate" else 2.5
                cell = report.cell(rows, FEW, query, placement)
                measured = cell.in_references if cell is not None else None
                yield Verdict(
                    f"{query}, {placement}, {FEW} changes of {rows:,}: × Spark reference", bound, "at most", measured
                )


def _growth(report: Report) -> Iterator[Verdict]:
    """Both sizes in multiples of the reference, for they were measured minutes apart."""
    for placement in PLACEMENTS:
        for query in QUERIES:
            small, large = (report.cell(rows, FEW, query, placement) for rows in (SMALL, LARGE))
            measured = large.in_references / small.in_references if small is not None and large is not None else None
            yield Verdict(
                f"{query}, {placement}, {FEW} changes: {LARGE:,} rows × {SMALL:,} rows", 1.3, "at most", measured
            )


def _against_full(report: Report) -> Iterator[Verdict]:
    for label, bound in (("0.1%", 10.0), ("1%", 2.0)):
        for query in ("scan", "filter", "join"):
            ours, full = (report.cell(LARGE, label, query, method) for method in (PLACEMENTS[0], FULL))
            measured = ours.times_faster_than(full) if ours is not None and full is not None else None
            yield Verdict(
                f"{query}, auto, {label} of {LARGE:,} rows: times faster than {FULL}", bound, "at least", measured
            )
