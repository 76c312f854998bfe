"""Two databases under one service, then one of them in trouble: how stale are the healthy stream tables of both?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from rich.console import Console

import pgtrickle
from bench.measure import warm_up
from bench.server import Bench
from bench.staleness import Staleness
from bench.tables import table
from bench.targets import Verdict
from pgtrickle.service.config import ServerConfig, ServiceConfig
from pgtrickle.service.service import Service

DATABASES = ("calm", "troubled")
PAUSE = 0.05  # between two changes

_HEALTHY = {
    "latest": "SELECT id, at FROM event WHERE id > 0",
    "totals": "SELECT grp, count(*) AS n, sum(val) AS total FROM event GROUP BY grp",
}
_FAILING = "SELECT grp, sum(1 / (val - val)) AS broken FROM event GROUP BY grp"
_LOCKED = "SELECT grp, count(*) AS n FROM locked GROUP BY grp"


@dataclass
class Isolation:
    """Staleness per database, without and with trouble in one of them."""

    found: dict[tuple[str, bool], Staleness] = field(default_factory=dict)


def run(bench: Bench, seconds: float, say: Callable[[str], None]) -> Isolation:
    """Both write a little all the time; after a while one has a failing stream table and a table that somebody locked."""
    warm_up()
    dsns = {name: _prepare(bench, name) for name in DATABASES}
    service = Service(ServiceConfig((ServerConfig("bench", dsns["calm"], DATABASES),), http=None))
    service.start()
    measured = Isolation()
    try:
        say("filling the stream tables, and getting warm")
        _observe(dsns, min(seconds, 15.0), {name: Staleness() for name in DATABASES})
        for trouble in (False, True):
            say(f"{seconds:.0f} s {'with trouble in one' if trouble else 'with both healthy'}")
            found = {name: measured.found.setdefault((name, trouble), Staleness()) for name in DATABASES}
            with psycopg.connect(dsns["troubled"]) as locker:
                if trouble:
                    _trouble(dsns["troubled"], locker)
                _observe(dsns, seconds, found)
    finally:
        service.stop()
    return measured


def _prepare(bench: Bench, name: str) -> str:
    dsn = bench.new_database(name)
    with pgtrickle.connect(dsn) as db:
        db.conn.execute("CREATE TABLE event (id bigserial PRIMARY KEY, grp int, val int, at timestamptz)")
        db.conn.execute("CREATE TABLE locked (id bigserial PRIMARY KEY, grp int)")
        for stream_table, query in _HEALTHY.items():
            db.create_stream_table(stream_table, query, schedule="1s", initialize=False)
        db.conn.execute("CREATE INDEX ON latest (at)")
    return dsn


def _trouble(dsn: str, locker: psycopg.Connection) -> None:
    with pgtrickle.connect(dsn) as db:
        db.create_stream_table("failing", _FAILING, schedule="1s", initialize=False)
        db.create_stream_table("locked_out", _LOCKED, schedule="1s", initialize=False)
    locker.execute("LOCK TABLE locked IN ACCESS EXCLUSIVE MODE")


def _observe(dsns: dict[str, str], seconds: float, found: dict[str, Staleness]) -> None:
    over = threading.Event()
    threads = [threading.Thread(target=_write, args=(dsn, over)) for dsn in dsns.values()]
    threads += [
        threading.Thread(target=found[name].sample, args=(dsn, "SELECT max(at) FROM latest", over))
        for name, dsn in dsns.items()
    ]
    for thread in threads:
        thread.start()
    over.wait(seconds)
    over.set()
    for thread in threads:
        thread.join()


def _write(dsn: str, over: threading.Event) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        while not over.wait(PAUSE):
            conn.execute(
                "INSERT INTO event (grp, val, at) SELECT i, i, clock_timestamp() FROM generate_series(1, 5) AS i"
            )


def show(console: Console, measured: Isolation) -> None:
    lines = [
        [f"{name}, {'one in trouble' if trouble else 'both healthy'}"]
        + [f"{found.quantile(share):.2f}" for share in (0.5, 0.95, 0.99)]
        for (name, trouble), found in measured.found.items()
    ]
    table(console, "Staleness, s, of healthy stream tables", ["database", "p50", "p95", "p99"], lines)


def verdicts(measured: Isolation) -> list[Verdict]:
    return [
        Verdict(
            f"{name}: staleness, 95th percentile, with trouble × without",
            1.5,
            "at most",
            measured.found[name, True].quantile(0.95) / measured.found[name, False].quantile(0.95),
        )
        for name in DATABASES
    ]


def plot(measured: Isolation, path: Path) -> None:
    from bench.charts import over_time  # slow to import

    over_time(
        path,
        "Staleness of healthy stream tables while one database is in trouble",
        "seconds",
        {name: measured.found[name, True].samples for name in DATABASES},
    )
