"""Staleness under a steady stream of changes, with the service at work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console

from bench.dataset import same_rows
from bench.measure import warm_up
from bench.server import Bench
from bench.staleness import Staleness
from bench.tables import table
from bench.targets import Verdict
from pgtrickle.service.config import ServerConfig, ServiceConfig
from pgtrickle.service.service import Service

STREAM_TABLES = 10
BATCHES = 20  # transactions a second
INTERVALS = 3  # of the scheduler: the bound for the 99th percentile

# None recomputes groups: with changes in all groups every second that would be the whole table each time.
_SHAPES = (
    "SELECT id, val, at FROM event WHERE id % 50 = 0",
    "SELECT grp, count(*) AS n, sum(val) AS total FROM event GROUP BY grp",
    "SELECT grp % 10 AS tens, sum(val) AS total, count(*) AS n FROM event WHERE val > 100 GROUP BY 1",
)


@dataclass
class Steady:
    """What was written, and how stale the stream tables were meanwhile."""

    interval: float
    staleness: Staleness = field(default_factory=Staleness)
    written: int = 0
    seconds: float = 0.0


def run(bench: Bench, rate: int, length: float, say: Callable[[str], None]) -> Steady:
    """Write at a rate for some time; sample how old the newest change is that a stream table shows."""
    warm_up()
    conn = bench.conn
    conn.execute("CREATE TABLE event (id bigserial PRIMARY KEY, grp int, val int, at timestamptz)")
    conn.execute("CREATE INDEX ON event (grp)")
    queries = {f"st_{i}": _SHAPES[i % len(_SHAPES)] for i in range(STREAM_TABLES)}
    for name, query in queries.items():
        bench.db.create_stream_table(name, query, schedule="1s", initialize=False)
    conn.execute("CREATE INDEX ON st_0 (at)")  # where the newest change is looked for
    service = Service(ServiceConfig((ServerConfig("bench", conn.info.dsn, (conn.info.dbname,)),), http=None))
    service.start()
    try:
        say("filling the stream tables, and getting warm")
        measured = Steady(1.0)
        _write_and_sample(bench, rate, 15.0, Steady(1.0), say)
        _write_and_sample(bench, rate, length, measured, say)
        for name in queries:
            bench.db.wait_until_fresh(name)
    finally:
        service.stop()
    for name, query in queries.items():
        if not same_rows(conn, name, query):
            raise RuntimeError(f"{name} does not hold what its query gives")
    return measured


def _write_and_sample(bench: Bench, rate: int, length: float, into: Steady, say: Callable[[str], None]) -> None:
    say(f"{rate:,} changes a second for {length:.0f} s")
    over = threading.Event()
    dsn = bench.conn.info.dsn
    threads = [
        threading.Thread(target=_write, args=(dsn, rate, over, into)),
        threading.Thread(target=into.staleness.sample, args=(dsn, "SELECT max(at) FROM st_0", over)),
    ]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    over.wait(length)
    into.seconds = time.monotonic() - started
    over.set()
    for thread in threads:
        thread.join()


def _write(dsn: str, rate: int, over: threading.Event, into: Steady) -> None:
    each = rate // BATCHES
    with psycopg.connect(dsn, autocommit=True) as conn:
        following = time.monotonic()
        while not over.is_set():
            _batch(conn, each)
            into.written += each
            following += 1 / BATCHES
            over.wait(max(0.0, following - time.monotonic()))


def _batch(conn: psycopg.Connection[Any], each: int) -> None:
    """Mostly new rows, some that change and some that go."""
    new, changed = each * 8 // 10, each // 10
    with conn.transaction():
        conn.execute(
            "INSERT INTO event (grp, val, at) SELECT i %% 100, (random() * 1000)::int, clock_timestamp()"
            " FROM generate_series(1, %s) AS i",
            (new,),
        )
        conn.execute(
            "UPDATE event SET val = val + 1, at = clock_timestamp() WHERE id > (SELECT max(id) FROM event) - %s",
            (changed,),
        )
        conn.execute("DELETE FROM event WHERE id <= (SELECT min(id) FROM event) + %s - 1", (each - new - changed,))


def show(console: Console, measured: Steady) -> None:
    lines = [[f"p{int(share * 100)}", f"{measured.staleness.quantile(share):.2f}"] for share in (0.5, 0.95, 0.99)]
    lines.append(["growth of the median", f"{measured.staleness.growth:.2f}"])
    title = (
        f"Staleness, s, at {measured.written / measured.seconds:,.0f} changes a second, {STREAM_TABLES} stream tables"
    )
    table(console, title, ["", ""], lines)


def verdicts(measured: Steady) -> list[Verdict]:
    bound = INTERVALS * measured.interval
    return [
        Verdict("staleness, 99th percentile, s", bound, "at most", measured.staleness.quantile(0.99)),
        Verdict("staleness: median of the last quarter × second", 1.3, "at most", measured.staleness.growth),
    ]


def plot(measured: Steady, path: Path) -> None:
    from bench.charts import over_time  # slow to import

    bound = INTERVALS * measured.interval
    over_time(path, "Staleness", "seconds", {"st_0": measured.staleness.samples}, bound)
