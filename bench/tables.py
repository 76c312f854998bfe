"""Results as tables for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from bench.dataset import QUERIES
from bench.measure import median
from bench.refresh import FULL, METHODS, PHASES, PLACEMENTS, Report
from bench.targets import Verdict


def table(console: Console, title: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table whose first column is text and whose others are figures."""
    drawn = Table(title=title, title_justify="left", title_style="bold")
    for i, head in enumerate(heads):
        drawn.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    console.print(drawn)


def ms(value: float) -> str:
    return f"{value * 1000:,.1f}" if value < 1 else f"{value * 1000:,.0f}"


def print_refresh(console: Console, report: Report) -> None:
    """Everything a run of `refresh` measured."""
    base = median(report.references)
    console.print(
        f"Reference: a warm Spark aggregation over 1,000 Arrow rows, {ms(base)} ms"
        f" (median of {len(report.references)}, interleaved with everything else)"
    )
    _print_loads(console, report)
    for rows, label in dict.fromkeys((cell.rows, cell.label) for cell in report.cells):
        _print_times(console, report, rows, label)


def _print_loads(console: Console, report: Report) -> None:
    found = {(load.rows, load.query, load.method): load.seconds for load in report.loads}
    lines = []
    for rows, query in dict.fromkeys((load.rows, load.query) for load in report.loads if load.method == METHODS[-1]):
        taken = [found[rows, query, method] for method in METHODS]
        lines.append([f"{query}, {rows:,} rows", *map(ms, taken), *(f"{t / taken[-1]:.1f}" for t in taken[:-1])])
    heads = ["initial population", *(f"{m}, ms" for m in METHODS), *(f"{p} × {FULL}" for p in PLACEMENTS)]
    table(console, "First filling", heads, lines)


def _print_times(console: Console, report: Report, rows: int, label: str) -> None:
    times, phases = [], []
    for query in QUERIES:
        cells = {method: report.cell(rows, label, query, method) for method in METHODS}
        full = cells[FULL]
        if full is None:  # the run was interrupted before
            continue
        for placement in PLACEMENTS:
            cell = cells[placement]
            assert cell is not None
            name = f"{query}, {placement}"
            spread = f"{ms(min(cell.times))}–{ms(max(cell.times))}"
            ratios = f"{cell.in_references:.2f}", f"{cell.times_faster_than(full):.2f}"
            times.append([name, ms(cell.seconds), spread, ratios[0], ms(full.seconds), ratios[1]])
            job = cell.job
            phases.append(
                [name, *(ms(cell.phase(phase)) for phase in (*PHASES, "other"))]
                + ([str(job.rows_in), _operators(job.operators)] if job is not None else ["–", "–"])
            )
    title = f"{rows:,} rows, {label} changes"
    heads = ["refresh", "ms", "range", "× reference", f"{FULL}, ms", f"times faster than {FULL}"]
    table(console, title, heads, times)
    table(console, f"{title}: ms per phase", ["refresh", *PHASES, "other", "rows to Spark", "operators"], phases)


def _operators(names: Iterable[str]) -> str:
    """`12: 3 Project, 2 HashAggregate …`, the plan's headline left out."""
    counted = Counter(names)
    shown = ", ".join(f"{count} {name}" for name, count in counted.most_common(4))
    return f"{counted.total()}: {shown}{' …' if len(counted) > 4 else ''}"


def print_verdicts(console: Console, verdicts: Iterable[Verdict]) -> None:
    lines = [
        [v.what, f"{v.sense} {v.bound:g}", "–" if v.measured is None else f"{v.measured:.2f}", v.outcome]
        for v in verdicts
    ]
    table(console, "Targets", ["target", "bound", "measured", ""], lines)
