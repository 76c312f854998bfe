"""Small pictures: bars, and lines over time, with the bound to reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def bars(path: Path, title: str, unit: str, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Groups of bars, one for each series."""
    series = list(dict.fromkeys(name for group in groups.values() for name in group))
    figure, axes = plt.subplots(figsize=(9, 3.5), layout="constrained")
    width = 0.8 / len(series)
    for k, name in enumerate(series):
        places = [i + (k - (len(series) - 1) / 2) * width for i in range(len(groups))]
        drawn = axes.bar(places, [group.get(name, 0.0) for group in groups.values()], width, label=name)
        axes.bar_label(drawn, fmt="{:,.3g}", fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(unit)
    if len(series) > 1:
        axes.legend(frameon=False)
    _save(path, title, figure, axes)


def over_time(
    path: Path, title: str, unit: str, series: Mapping[str, Iterable[tuple[float, float]]], bound: float | None = None
) -> None:
    """A line per series."""
    figure, axes = plt.subplots(figsize=(9, 3.5), layout="constrained")
    for name, samples in series.items():
        points = list(samples)
        axes.plot([at for at, _ in points], [value for _, value in points], linewidth=0.8, label=name)
    if bound is not None:
        axes.axhline(bound, color="#b00020", linestyle="--", linewidth=1)
    axes.set_xlabel("seconds")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    if len(series) > 1:
        axes.legend(frameon=False)
    _save(path, title, figure, axes)


def _save(path: Path, title: str, figure: Figure, axes: Axes) -> None:
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
