"""Many stream tables at once: fused, one after the other, by four workers; a chain and a fan in one go."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from rich.console import Console

from bench.dataset import same_rows
from bench.measure import median, seconds, warm_up
from bench.server import Bench
from bench.tables import ms, table
from bench.targets import Verdict
from pgtrickle.refresh.engine import Engine
from pgtrickle.refresh.planning.programs import Plans

WORKERS = 4
CHANGES = 20  # per source and cycle
DEPTH, WIDTH = 20, 60
BOUNDS = {"one after the other": 3.0, "pool of 4": 1.5}
FUSED = "fused"
METHODS = (FUSED, *BOUNDS)

_SHAPES = (
    "SELECT grp, count(*) AS n, sum(val) AS total FROM {source} GROUP BY grp",
    "SELECT id, val FROM {source} WHERE val > {n}",
    "SELECT s.id, s.val, k.name FROM {source} AS s JOIN kind AS k USING (grp) WHERE s.val < {n}",
)


@dataclass
class Many:
    """Seconds for refreshing all of them, per method."""

    count: int
    times: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in METHODS})
    shapes: dict[str, list[float]] = field(default_factory=lambda: {"chain": [], "fan": []})

    def ratio(self, method: str) -> float:
        """How many times as many refreshes per second the fused way gives."""
        return median([slow / fast for slow, fast in zip(self.times[method], self.times[FUSED], strict=True)])


def run(bench: Bench, count: int, sources: int, repeats: int, say: Callable[[str], None]) -> Many:
    """Every method refreshes all stream tables after the same kind of change, in turn."""
    say("warming up Spark")
    warm_up()
    bench.conn.execute("CREATE TABLE kind (grp int PRIMARY KEY, name text)")
    bench.conn.execute("INSERT INTO kind SELECT i, 'kind ' || i FROM generate_series(0, 9) AS i")
    tables = [f"source_{i}" for i in range(sources)]
    for name in tables:
        bench.conn.execute(
            sql.SQL("CREATE TABLE {0} (id int PRIMARY KEY, grp int, val int)").format(sql.Identifier(name))
        )
        bench.conn.execute(
            sql.SQL("INSERT INTO {0} SELECT i, i % 10, i % 1000 FROM generate_series(1, 5000) AS i").format(
                sql.Identifier(name)
            )
        )
    queries = {f"st_{i}": _query(i, tables[i % sources]) for i in range(count)}
    ids = _create(bench, queries, say)
    measured = Many(count)
    chance = random.Random(count)
    dsn = bench.conn.info.dsn
    plans = Plans()
    with ThreadPoolExecutor(WORKERS) as threads:
        engines = [Engine(psycopg.connect(dsn, autocommit=True), plans=plans) for _ in range(WORKERS)]
        for cycle in range(-2, repeats):
            for method in METHODS if cycle % 2 else METHODS[::-1]:
                say(f"cycle {cycle + 1} of {repeats}: {method}")
                _change(bench.conn, tables, chance)
                bench.settle()
                taken = seconds(lambda: _refresh(method, engines, ids, threads))  # noqa: B023
                if cycle >= 0:
                    measured.times[method].append(taken)
        for name, query in queries.items():
            if not same_rows(bench.conn, name, query):
                raise RuntimeError(f"{name} does not hold what its query gives")
        _measure_shapes(bench, engines[0], measured, tables[0], repeats, chance, say)
        for engine in engines:
            engine.claims.lease.end()
            engine.conn.close()
    return measured


def _query(number: int, source: str) -> str:
    return _SHAPES[number % len(_SHAPES)].format(source=source, n=100 + number % 800)


def _create(bench: Bench, queries: dict[str, str], say: Callable[[str], None]) -> list[int]:
    for i, (name, query) in enumerate(queries.items()):
        if i % 50 == 0:
            say(f"creating stream table {i + 1} of {len(queries)}")
        bench.db.create_stream_table(name, query, initialize=False)
    say("filling the stream tables")
    bench.db.refresh(list(queries))
    return [bench.db.id_of(name) for name in queries]


def _change(conn: psycopg.Connection[Any], tables: Sequence[str], chance: random.Random) -> None:
    for name in tables:
        conn.execute(
            sql.SQL("UPDATE {} SET val = (val + 7) %% 1000, grp = (grp + 1) %% 10 WHERE id = ANY (%s)").format(
                sql.Identifier(name)
            ),
            (chance.sample(range(1, 5001), CHANGES),),
        )


def _refresh(method: str, engines: Sequence[Engine], ids: list[int], threads: ThreadPoolExecutor) -> None:
    """All of them; an error is the caller's."""
    if method == FUSED:
        outcomes = [engines[0].attempt(ids, "MANUAL")]
    elif method == "one after the other":
        outcomes = [engines[0].attempt([id_], "MANUAL") for id_ in ids]
    else:
        parts = [ids[i :: len(engines)] for i in range(len(engines))]
        work = lambda engine, part: [engine.attempt([id_], "MANUAL") for id_ in part]  # noqa: E731
        outcomes = [one for some in threads.map(work, engines, parts) for one in some]
    failures = [error for outcome in outcomes for error in outcome.failures.values()]
    if failures or sum(len(outcome.results) for outcome in outcomes) != len(ids):
        raise RuntimeError(f"not all were refreshed: {failures[:1]}")


def _measure_shapes(
    bench: Bench,
    engine: Engine,
    measured: Many,
    source: str,
    repeats: int,
    chance: random.Random,
    say: Callable[[str], None],
) -> None:
    """A chain that one change runs through, and many on one source."""
    first = f"SELECT grp, count(*) AS n, sum(val) AS total FROM {source} GROUP BY grp"
    chain = {"chain_0": first}
    chain |= {f"chain_{i}": f"SELECT grp, n, total + 1 AS total FROM chain_{i - 1}" for i in range(1, DEPTH)}
    fan = {f"fan_{i}": _query(i, source) for i in range(WIDTH)}
    for kind, queries in (("chain", chain), ("fan", fan)):
        ids = _create(bench, queries, say)
        for cycle in range(-1, repeats):
            _change(bench.conn, [source], chance)
            taken = seconds(lambda: _refresh(FUSED, [engine], ids, ThreadPoolExecutor(1)))  # noqa: B023
            if cycle >= 0:
                measured.shapes[kind].append(taken)


def show(console: Console, measured: Many) -> None:
    lines = [
        [name, ms(median(times)), f"{measured.count / median(times):.0f}", f"{measured.ratio(name):.2f}"]
        for name, times in measured.times.items()
    ]
    table(console, f"{measured.count} stream tables, all with changes", ["how", "ms", "refreshes/s", "× fused"], lines)
    shapes = [
        [f"chain of {DEPTH}", ms(median(measured.shapes["chain"]))],
        [f"fan of {WIDTH}", ms(median(measured.shapes["fan"]))],
    ]
    table(console, "In one tick", ["shape", "ms"], shapes)


def verdicts(measured: Many) -> list[Verdict]:
    return [
        Verdict(f"{measured.count} stream tables: fused × {name}", bound, "at least", measured.ratio(name))
        for name, bound in BOUNDS.items()
    ]


def plot(measured: Many, path: Path) -> None:
    from bench.charts import bars  # slow to import

    groups = {name: {"refreshes": measured.count / median(times)} for name, times in measured.times.items()}
    bars(path, f"{measured.count} stream tables, all with changes", "refreshes per second", groups)
