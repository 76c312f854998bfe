"""Three databases, one of which floods: how long the others' changes wait, beside how long they wait without it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from rich.console import Console

import pgtrickle
from bench.measure import warm_up
from bench.server import Bench
from bench.tables import table
from bench.targets import Verdict
from pgtrickle.service.config import ServerConfig, ServiceConfig
from pgtrickle.service.service import Service

DATABASES = ("quiet_1", "quiet_2", "flood")
STREAM_TABLES = 20  # of the one that floods; the others have two
QUOTA = 2
BOUND = 1.5

LOOK_SECONDS = 0.02
_PENDING = "SELECT bool_or(pgtrickle._staleness(pgt_id) > 0) FROM pgtrickle.pgt_stream_tables"
_QUERY = "SELECT grp, count(*) AS n, sum(val) AS total FROM item WHERE val > {} GROUP BY grp"


@dataclass
class Waiting:
    """Seconds that a change waited until its stream table showed it, per database, without and with the flood."""

    times: dict[tuple[str, bool], list[float]] = field(default_factory=dict)

    def p95(self, database: str, flood: bool) -> float:
        values = sorted(self.times[database, flood])
        return values[min(len(values) - 1, int(0.95 * len(values)))]


def run(bench: Bench, seconds: float, say: Callable[[str], None]) -> Waiting:
    """Both quiet databases write and wait, first alone, then beside the flood."""
    warm_up()
    dsns = [_prepare(bench, name, STREAM_TABLES if name == "flood" else 2, say) for name in DATABASES]
    service = Service(ServiceConfig((ServerConfig("bench", dsns[0], DATABASES),), http=None))
    service.start()
    measured = Waiting()
    try:
        for dsn in dsns:
            with pgtrickle.connect(dsn) as db:
                for stream_table in db.stream_tables():
                    db.wait_until_fresh(stream_table.name, 300)
        for flood in (False, True):
            say(f"{seconds:.0f} s {'beside the flood' if flood else 'alone'}")
            _measure(dsns, seconds, flood, measured)
    finally:
        service.stop()
    return measured


def _prepare(bench: Bench, name: str, count: int, say: Callable[[str], None]) -> str:
    say(f"preparing {name}")
    dsn = bench.new_database(name)
    with pgtrickle.connect(dsn) as db:
        db.conn.execute("CREATE TABLE item (id bigserial PRIMARY KEY, grp int, val int)")
        db.conn.execute("INSERT INTO item (grp, val) SELECT i % 50, i % 1000 FROM generate_series(1, 20000) AS i")
        db.conn.execute("SELECT pgtrickle.set('per_database_worker_quota', %s)", (str(QUOTA),))
        for i in range(count):
            db.create_stream_table(f"st_{i}", _QUERY.format(i), schedule="1s", initialize=False)
    return dsn


def _measure(dsns: Sequence[str], seconds: float, flood: bool, measured: Waiting) -> None:
    over = threading.Event()
    threads = [
        threading.Thread(target=_write_and_wait, args=(dsn, over, measured.times.setdefault((name, flood), [])))
        for name, dsn in zip(DATABASES[:2], dsns, strict=False)
    ]
    if flood:
        threads.append(threading.Thread(target=_flood, args=(dsns[2], over)))
    for thread in threads:
        thread.start()
    over.wait(seconds)
    over.set()
    for thread in threads:
        thread.join()


def _write_and_wait(dsn: str, over: threading.Event, times: list[float]) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        while not over.is_set():
            began = time.monotonic()
            conn.execute("INSERT INTO item (grp, val) VALUES (1, 999)")
            # Not wait_until_fresh(): that asks for a refresh, and what was asked for comes first.
            while conn.execute(_PENDING).fetchone() == (True,):
                if over.wait(LOOK_SECONDS):
                    return
            times.append(time.monotonic() - began)


def _flood(dsn: str, over: threading.Event) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        while not over.is_set():
            conn.execute("INSERT INTO item (grp, val) SELECT i % 50, i % 1000 FROM generate_series(1, 2000) AS i")
            conn.execute("UPDATE item SET val = (val + 1) % 1000 WHERE id % 20 = 0")


def show(console: Console, measured: Waiting) -> None:
    lines = [[name, f"{measured.p95(name, False):.2f}", f"{measured.p95(name, True):.2f}"] for name in DATABASES[:2]]
    table(console, "Waiting time of a change, 95th percentile, s", ["database", "alone", "beside the flood"], lines)


def verdicts(measured: Waiting) -> list[Verdict]:
    return [
        Verdict(
            f"{name}: waiting time beside a flood × alone",
            BOUND,
            "at most",
            measured.p95(name, True) / measured.p95(name, False),
        )
        for name in DATABASES[:2]
    ]


def plot(measured: Waiting, path: Path) -> None:
    from bench.charts import bars  # slow to import

    groups = {
        name: {"alone": measured.p95(name, False), "beside the flood": measured.p95(name, True)}
        for name in DATABASES[:2]
    }
    bars(path, "Waiting time of a change, 95th percentile", "seconds", groups)
