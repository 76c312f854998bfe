"""Pictures of the results."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.dataset import QUERIES
from bench.measure import median
from bench.refresh import FULL, METHODS, PHASES, PLACEMENTS, Report

_COLOURS = {"auto": "#1f77b4", "spark": "#e8842c", FULL: "#9a9a9a"}
_LABELS = {"auto": "pgtrickle, auto", "spark": "pgtrickle, spark", FULL: "REFRESH MATERIALIZED VIEW"}


def plot_times(report: Report, path: Path) -> None:
    """Refresh times per query: a row of panels per table size, a column per size of the change."""
    sizes = list(dict.fromkeys(cell.rows for cell in report.cells))
    labels = list(dict.fromkeys(cell.label for cell in report.cells))
    figure, panels = plt.subplots(
        len(sizes),
        len(labels),
        figsize=(1 + 4.6 * len(labels), 1.2 + 3.3 * len(sizes)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for line, rows in zip(panels, sizes, strict=True):
        for panel, label in zip(line, labels, strict=True):
            _draw_panel(panel, report, rows, label)
        line[0].set_ylabel("milliseconds (logarithmic)")
    # The axis is shared: a limit set while panels are drawn would cut off the bars of later ones.
    panels[0][0].set_ylim(10, 1600 * max(cell.seconds for cell in report.cells))
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_panel(panel: Axes, report: Report, rows: int, label: str) -> None:
    width = 0.8 / len(METHODS)
    for k, method in enumerate(METHODS):
        cells = [report.cell(rows, label, query, method) for query in QUERIES]
        values = [cell.seconds * 1000 for cell in cells if cell is not None]
        places = [i + (k - 1) * width for i in range(len(values))]
        bars = panel.bar(places, values, width, color=_COLOURS[method], label=_LABELS[method])
        panel.bar_label(bars, [f"{value:,.0f}" for value in values], fontsize=6, padding=1)
    base = median(report.references) * 1000
    panel.axhline(base, color="#b00020", linewidth=1, linestyle="--", label=f"Spark reference, {base:.0f} ms")
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0,)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_xticks(range(len(QUERIES)), list(QUERIES))
    panel.set_title(f"{rows:,} rows, {label} changes", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)


def plot_phases(report: Report, path: Path) -> None:
    """Where the time goes, for the first change asked for and the largest table measured."""
    rows = max(cell.rows for cell in report.cells)
    label = report.cells[0].label
    found = {(query, p): report.cell(rows, label, query, p) for query in QUERIES for p in PLACEMENTS}
    bars = {f"{query}\n{placement}": cell for (query, placement), cell in found.items() if cell is not None}
    figure, panel = plt.subplots(figsize=(10, 4.2), layout="constrained")
    bottoms = [0.0] * len(bars)
    for phase in (*PHASES, "other"):
        heights = [cell.phase(phase) * 1000 for cell in bars.values()]
        panel.bar(list(bars), heights, 0.7, bottom=bottoms, label=phase)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    base = median(report.references) * 1000
    panel.axhline(base, color="#b00020", linewidth=1, linestyle="--", label="Spark reference")
    panel.set_ylabel("milliseconds")
    panel.set_title(f"{rows:,} rows, {label} changes: time per phase", fontsize=10)
    panel.tick_params(axis="x", labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", frameon=False, ncols=7, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
