"""What refreshing together saves: one, ten and fifty stream tables on one source, in one call."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console

from bench.dataset import change, create_tables, same_rows
from bench.measure import median, seconds, warm_up
from bench.server import Bench
from bench.tables import ms, table
from bench.targets import Verdict

COUNTS = (1, 10, 50)
BOUNDS = {10: 4.0, 50: 16.0}
WARM_UP_CYCLES = 3

_AGGREGATES = (
    "SELECT region, sum(amount) AS total, count(*) AS cnt FROM src WHERE score < {n} GROUP BY region",
    "SELECT category, sum(score) AS total, count(*) AS cnt FROM src WHERE amount > {n} GROUP BY category",
)
_MIXED = (
    *_AGGREGATES,
    "SELECT id, region, amount FROM src WHERE amount > 9000 + {n}",
    "SELECT s.id, s.score, d.region_name FROM src s JOIN dim d ON s.region = d.region WHERE s.amount < 1000 + {n}",
    "SELECT d.region_name, sum(s.amount) AS total FROM src s JOIN dim d ON s.region = d.region"
    " WHERE s.score > {n} GROUP BY d.region_name",
)


@dataclass
class Family:
    """Stream tables of certain shapes, in groups of different size that all see the same changes."""

    name: str
    shapes: tuple[str, ...]
    times: dict[int, list[float]] = field(default_factory=lambda: {count: [] for count in COUNTS})

    @property
    def groups(self) -> dict[int, list[list[str]]]:
        """For each count the calls that are timed. One alone is timed for every shape, for shapes differ in cost."""
        return {
            count: [[f"{self.name}_{count}_{call}_{i}" for i in range(count)] for call in range(calls)]
            for count, calls in ((count, len(self.shapes) if count == 1 else 1) for count in COUNTS)
        }

    def query(self, name: str) -> str:
        _, count, call, i = name.rsplit("_", 3)
        number = int(call) if count == "1" else int(i)
        return self.shapes[number % len(self.shapes)].replace("{n}", str(40 + number))

    def ratio(self, count: int) -> float:
        """Against one alone, cycle by cycle."""
        return median([many / one for many, one in zip(self.times[count], self.times[1], strict=True)])


def run(bench: Bench, rows: int, changes: int, repeats: int, say: Callable[[str], None]) -> Iterator[Family]:
    """Measure one family after the other."""
    say("warming up Spark")
    warm_up()
    create_tables(bench.conn, rows)
    for family in (Family("aggregates", _AGGREGATES), Family("mixed", _MIXED)):
        _measure(bench, family, changes, repeats, say)
        yield family


def _measure(bench: Bench, family: Family, changes: int, repeats: int, say: Callable[[str], None]) -> None:
    names = [name for calls in family.groups.values() for call in calls for name in call]
    for i, name in enumerate(names):
        say(f"{family.name}: creating stream table {i + 1} of {len(names)}")
        bench.db.create_stream_table(name, family.query(name), refresh_mode="DIFFERENTIAL", initialize=False)
    say(f"{family.name}: filling the stream tables")
    bench.db.refresh(names)
    chance = random.Random(changes)
    for cycle in range(-WARM_UP_CYCLES, repeats):
        say(f"{family.name}: cycle {cycle + 1} of {repeats}")
        change(bench.conn, changes, chance)
        bench.settle()
        for count in COUNTS if cycle % 2 else COUNTS[::-1]:
            calls = family.groups[count]
            taken = sum(seconds(partial(bench.db.refresh, call)) for call in calls) / len(calls)
            if cycle >= 0:
                family.times[count].append(taken)
    for name in names:
        if not same_rows(bench.conn, name, family.query(name)):
            raise RuntimeError(f"{name} does not hold what its query gives")
        bench.db.drop_stream_table(name)


def show(console: Console, family: Family) -> None:
    lines = [[str(count), ms(median(family.times[count])), f"{family.ratio(count):.2f}"] for count in COUNTS]
    table(console, f"Stream tables refreshed in one call: {family.name}", ["stream tables", "ms", "× one"], lines)


def verdicts(family: Family) -> list[Verdict]:
    return [
        Verdict(f"{family.name}: {count} stream tables × one", bound, "at most", family.ratio(count))
        for count, bound in BOUNDS.items()
    ]
