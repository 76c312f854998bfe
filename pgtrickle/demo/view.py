"""The output of the demo: a live table on a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pgtrickle.api.database import RefreshResult

PHASES = ("cut", "fetch", "spark", "apply")


@dataclass
class Shown:
    """The figures of one stream table."""

    kind: str
    as_of: float = 0.0  # when its last refresh began
    refreshes: int = 0
    rows: int = 0
    slowest: float = 0.0
    seconds: float = 0.0
    last: RefreshResult | None = None
    wrong: int | None = None  # rows that differ from the query at the last check

    def add(self, result: RefreshResult, as_of: float) -> None:
        took = sum(result.phases.values())
        self.as_of, self.last = as_of, result
        self.refreshes += 1
        self.rows += result.rows_inserted + result.rows_deleted
        self.seconds += took
        self.slowest = max(self.slowest, took)

    @property
    def verdict(self) -> str:
        return "" if self.wrong is None else "OK" if self.wrong == 0 else f"MISMATCH ({self.wrong} rows)"


@dataclass
class Board:
    """All figures of the demo."""

    tables: dict[str, Shown]
    psql: str
    started: float = field(default_factory=time.monotonic)
    written: int = 0
    checks: int = 0
    mismatches: int = 0

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def line(self) -> str:
        """A summary of the last refreshes as one line."""
        results = [shown.last for shown in self.tables.values() if shown.last is not None]
        phases = " ".join(f"{phase} {sum(r.phases[phase] for r in results):.3f}" for phase in PHASES)
        changed = sum(r.rows_inserted + r.rows_deleted for r in results)
        return f"{self.elapsed():5.1f} s  {self.written} rows written  {changed} rows refreshed  seconds: {phases}"

    def __rich__(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="bold")
        headings = ("stream table", "what", "fresh as of", "last", "rows changed", *PHASES, "check")
        for heading in headings:
            table.add_column(
                heading, justify="right" if heading in {"fresh as of", "rows changed", *PHASES} else "left"
            )
        for name, shown in self.tables.items():
            last = shown.last
            table.add_row(
                name,
                shown.kind,
                f"{time.monotonic() - shown.as_of:.1f} s ago" if last else "…",
                last.action.lower() if last else "",
                f"+{last.rows_inserted} −{last.rows_deleted}" if last else "",
                *(f"{last.phases[phase] * 1000:.0f} ms" if last else "" for phase in PHASES),
                _colored(shown.verdict),
            )
        heading = f"{self.elapsed():.0f} s, {self.written:,} rows written to the shop, {self.checks} checks"
        return Group(Text(heading, style="bold"), table, Text(f"connect to it: {self.psql}", style="dim"))

    def summary(self) -> Table:
        table = Table(title=f"{self.written:,} rows written in {self.elapsed():.0f} s", box=None, pad_edge=False)
        for heading in ("stream table", "what", "refreshes", "rows changed", "mean", "slowest", "equal to its query"):
            table.add_column(heading)
        for name, shown in self.tables.items():
            mean = shown.seconds / shown.refreshes if shown.refreshes else 0.0
            figures = (
                str(shown.refreshes),
                f"{shown.rows:,}",
                f"{mean * 1000:.0f} ms",
                f"{shown.slowest * 1000:.0f} ms",
            )
            table.add_row(name, shown.kind, *figures, _colored(shown.verdict))
        return table


def _colored(verdict: str) -> Text:
    return Text(verdict, style="green" if verdict == "OK" else "bold red")
