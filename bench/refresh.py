"""What a refresh costs beside REFRESH MATERIALIZED VIEW, by query, table size and size of the change."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from psycopg import sql

from bench.dataset import QUERIES, change, create_tables, same_rows
from bench.measure import SparkJob, median, reference, reference_rows, seconds, warm_up, watch_spark
from bench.server import Bench
from pgtrickle.api.database import RefreshResult

PLACEMENTS = ("auto", "spark")
FULL = "REFRESH"
METHODS = (*PLACEMENTS, FULL)
PHASES = ("plan", "cut", "fetch", "spark", "apply")
WARM_UP_CHANGES = 1000
WARM_UP_CYCLES = 3


@dataclass
class Cell:
    """All repeats of one measurement."""

    rows: int
    changes: int
    label: str  # the change as the caller gave it: 1000 or 0.1%
    query: str
    method: str
    times: list[float] = field(default_factory=list)
    references: list[float] = field(default_factory=list)  # Spark's aggregation, right before each of them
    phases: list[dict[str, float]] = field(default_factory=list)
    job: SparkJob | None = None

    @property
    def seconds(self) -> float:
        return median(self.times)

    @property
    def in_references(self) -> float:
        """Cost as a multiple of the reference, pair by pair: what slows both down at once does not count."""
        return median([time / base for time, base in zip(self.times, self.references, strict=True)])

    def times_faster_than(self, other: Cell) -> float:
        """Against another method in the same cycles."""
        return median([theirs / ours for ours, theirs in zip(self.times, other.times, strict=True)])

    def phase(self, name: str) -> float:
        """Median seconds of a phase; `other` is what no phase accounts for."""
        if name == "other":
            return median([t - sum(p.values()) for t, p in zip(self.times, self.phases, strict=True)])
        return median([phases[name] for phases in self.phases])


@dataclass(frozen=True)
class Load:
    """The initial population of a stream table, or of a materialized view."""

    rows: int
    query: str
    method: str
    seconds: float


@dataclass
class Report:
    cells: list[Cell] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)

    @property
    def references(self) -> list[float]:
        return [base for cell in self.cells for base in cell.references]

    def cell(self, rows: int, label: str, query: str, method: str) -> Cell | None:
        wanted = (rows, label, query, method)
        return next((c for c in self.cells if (c.rows, c.label, c.query, c.method) == wanted), None)


Progress = Callable[[str], None]


def count_of(label: str, rows: int) -> int:
    """A number of changes from `1000` or `0.1%`."""
    return round(rows * float(label[:-1]) / 100) if label.endswith("%") else int(label)


def run(
    bench: Bench,
    sizes: Sequence[int],
    labels: Sequence[str],
    queries: Sequence[str],
    repeats: int,
    report: Report,
    say: Progress,
) -> None:
    """Measure everything into the report; sizes and queries one after another, methods interleaved."""
    say("warming up Spark")
    warm_up()
    for rows in sizes:
        say(f"{rows:,} rows: creating the tables")
        create_tables(bench.conn, rows)
        chance = random.Random(rows)
        for query in queries:
            _measure_query(bench, query, rows, labels, repeats, chance, report, say)


def _measure_query(
    bench: Bench,
    query: str,
    rows: int,
    labels: Sequence[str],
    repeats: int,
    chance: random.Random,
    report: Report,
    say: Progress,
) -> None:
    """All methods on one query. The tables of others would take the memory of these."""
    title = f"{rows:,} rows, {query}"
    for method in METHODS:
        say(f"{title}: initial population, {method}")
        report.loads.append(Load(rows, query, method, seconds(partial(_create, bench, query, method))))
    bench.conn.execute("VACUUM ANALYZE")
    for cycle in range(WARM_UP_CYCLES):
        say(f"{title}: warm-up cycle {cycle + 1} of {WARM_UP_CYCLES}")
        change(bench.conn, min(WARM_UP_CHANGES, rows // 10), chance)
        for method in METHODS:
            _refresh(bench, query, method)
    for label in labels:
        cells = [Cell(rows, count_of(label, rows), label, query, method) for method in METHODS]
        for cycle in range(repeats):
            say(f"{title}, {label} changes: cycle {cycle + 1} of {repeats}")
            _cycle(bench, cells, chance, cycle)
        say(f"{title}, {label} changes: looking at the Spark jobs")
        _look(bench, cells, chance)
        report.cells += cells
    _verify(bench, query)
    for method in METHODS:
        _drop(bench, query, method)


def _cycle(bench: Bench, cells: Sequence[Cell], chance: random.Random, cycle: int) -> None:
    """The same change seen by every method, in another order each time."""
    rows = reference_rows()
    change(bench.conn, cells[0].changes, chance)
    bench.settle()
    for cell in _rotated(cells, cycle):
        if cell.method != FULL:
            cell.references.append(seconds(partial(reference, rows)))
        started = perf_counter()
        results = _refresh(bench, cell.query, cell.method)
        cell.times.append(perf_counter() - started)
        for result in results:
            if result.action != "DIFFERENTIAL":
                raise RuntimeError(f"{result.name} was refreshed as {result.action}: {result.reason}")
            cell.phases.append(result.phases)


def _rotated(cells: Sequence[Cell], by: int) -> Iterator[Cell]:
    by %= len(cells)
    yield from [*cells[by:], *cells[:by]]


def _look(bench: Bench, cells: Sequence[Cell], chance: random.Random) -> None:
    change(bench.conn, cells[0].changes, chance)
    for cell in cells:
        with watch_spark() as job:
            _refresh(bench, cell.query, cell.method)
        cell.job = job if job.statements else None


def _view(query: str) -> sql.Identifier:
    return sql.Identifier(f"mv_{query}")


def _create(bench: Bench, query: str, method: str) -> None:
    if method == FULL:
        bench.conn.execute(sql.SQL("CREATE MATERIALIZED VIEW {} AS {}").format(_view(query), sql.SQL(QUERIES[query])))
    else:
        bench.db.create_stream_table(
            f"st_{query}_{method}", QUERIES[query], refresh_mode="DIFFERENTIAL", placement=method
        )


def _refresh(bench: Bench, query: str, method: str) -> list[RefreshResult]:
    if method == FULL:
        bench.conn.execute(sql.SQL("REFRESH MATERIALIZED VIEW {}").format(_view(query)))
        return []
    return bench.db.refresh(f"st_{query}_{method}")


def _drop(bench: Bench, query: str, method: str) -> None:
    if method == FULL:
        bench.conn.execute(sql.SQL("DROP MATERIALIZED VIEW {}").format(_view(query)))
    else:
        bench.db.drop_stream_table(f"st_{query}_{method}")


def _verify(bench: Bench, query: str) -> None:
    """A fast refresh that is wrong would be no result."""
    for placement in PLACEMENTS:
        if not same_rows(bench.conn, f"st_{query}_{placement}", QUERIES[query]):
            raise RuntimeError(f"st_{query}_{placement} does not hold what its query gives")
