"""A hundred databases of ten stream tables each under one service, with fewer connections than databases."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import psycopg
from psycopg import sql
from rich.console import Console

import pgtrickle
from bench.measure import warm_up
from bench.server import Bench
from bench.staleness import Staleness
from bench.tables import table
from bench.targets import Verdict
from pgtrickle.service.config import ServerConfig, ServiceConfig
from pgtrickle.service.service import Service

STREAM_TABLES = 10
WRITERS = 2
_OURS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgtrickle %' AND datname LIKE 'tenant%'"
_FILLED = "SELECT bool_and(frontier IS NOT NULL) FROM pgtrickle.pgt_stream_tables"
_SHOWN = "SELECT (SELECT max(at) FROM st_0) >= %s"
_QUERY = "SELECT grp, count(*) AS n, sum(val) AS total, max(at) AS at FROM item WHERE val >= {} GROUP BY grp"


@dataclass
class Many:
    databases: int
    budget: int
    served: int = 0
    seconds_to_fill: float = 0.0
    staleness: Staleness = field(default_factory=Staleness)
    connections: int = 0
    memory: list[float] = field(default_factory=list)  # megabytes of the service, while it works
    jvm: float = 0.0


def run(bench: Bench, databases: int, budget: int, seconds: float, say: Callable[[str], None]) -> Many:
    """Some of them have changes at any time; how stale is what changed last, in each?"""
    warm_up()
    measured = Many(databases, budget)
    dsns = _prepare(bench, databases, say)
    names = tuple(f"tenant_{i:03d}" for i in range(databases))
    service = Service(ServiceConfig((ServerConfig("bench", dsns[0], names, budget),), http=None))
    over = threading.Event()
    counting = threading.Thread(target=_count, args=(bench, over, measured))
    begin = time.monotonic()
    service.start()
    counting.start()
    try:
        say("filling the stream tables")
        for dsn in dsns:
            with psycopg.connect(dsn, autocommit=True) as conn:
                while conn.execute(_FILLED).fetchone() != (True,):
                    time.sleep(0.2)
            measured.served += 1
        measured.seconds_to_fill = time.monotonic() - begin
        say(f"all served after {measured.seconds_to_fill:.0f} s; {seconds:.0f} s of changes")
        _observe(dsns, seconds, measured)
    finally:
        over.set()
        counting.join()
        service.stop()
    return measured


def _prepare(bench: Bench, databases: int, say: Callable[[str], None]) -> list[str]:
    first = bench.new_database("tenant_000")
    with pgtrickle.connect(first) as db:
        db.conn.execute(
            "CREATE TABLE item (id bigserial PRIMARY KEY, grp int, val int, at timestamptz DEFAULT clock_timestamp())"
        )
        db.conn.execute("INSERT INTO item (grp, val) SELECT i % 10, i % 100 FROM generate_series(1, 1000) AS i")
        for i in range(STREAM_TABLES):
            db.create_stream_table(f"st_{i}", _QUERY.format(i), schedule="1s", initialize=False)
    say(f"copying the first database {databases - 1} times")
    for i in range(1, databases):
        copy = sql.SQL("CREATE DATABASE {} OWNER app TEMPLATE tenant_000").format(sql.Identifier(f"tenant_{i:03d}"))
        bench.admin.execute(copy)
    return [psycopg.conninfo.make_conninfo(first, dbname=f"tenant_{i:03d}") for i in range(databases)]


def _observe(dsns: Sequence[str], seconds: float, measured: Many) -> None:
    """Writers go from database to database: one change, and then until a stream table shows it."""
    over = threading.Event()
    begin = time.monotonic()

    def write(number: int) -> None:
        chance = random.Random(number)
        while not over.is_set():
            with psycopg.connect(chance.choice(dsns), autocommit=True) as conn:
                row = conn.execute("INSERT INTO item (grp, val) VALUES (1, 99) RETURNING at").fetchone()
                assert row is not None
                written = time.monotonic()
                while conn.execute(_SHOWN, row).fetchone() != (True,):
                    if over.wait(0.02):
                        return
                measured.staleness.samples.append((time.monotonic() - begin, time.monotonic() - written))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(WRITERS)]
    for thread in threads:
        thread.start()
    over.wait(seconds)
    over.set()
    for thread in threads:
        thread.join()


def _count(bench: Bench, over: threading.Event, measured: Many) -> None:
    process = psutil.Process(os.getpid())
    with psycopg.connect(bench.admin.info.dsn, autocommit=True) as conn:
        while not over.wait(0.1):
            row = conn.execute(_OURS).fetchone()
            assert row is not None
            measured.connections = max(measured.connections, row[0])
            measured.memory.append(process.memory_info().rss / 1e6)
    children = process.children(recursive=True)
    measured.jvm = sum(child.memory_info().rss for child in children if child.name() == "java") / 1e6


def show(console: Console, measured: Many) -> None:
    found = measured.staleness
    lines = [
        ["databases served", f"{measured.served} of {measured.databases}"],
        ["filled after, s", f"{measured.seconds_to_fill:.0f}"],
        ["a change waits, s: p50", f"{found.quantile(0.5):.2f}"],
        ["p95", f"{found.quantile(0.95):.2f}"],
        ["changes looked at", f"{len(found.samples)}"],
        ["connections at most", f"{measured.connections}"],
        ["memory of the service, MB", f"{measured.memory[-1]:.0f} and {measured.jvm:.0f} of Spark"],
    ]
    table(console, f"{measured.databases} databases of {STREAM_TABLES} stream tables, one service", ["", ""], lines)


def verdicts(measured: Many) -> list[Verdict]:
    return [
        Verdict("databases served", measured.databases, "at least", measured.served),
        Verdict("connections to the server", measured.budget, "at most", measured.connections),
    ]


def plot(measured: Many, path: Path) -> None:
    from bench.charts import over_time  # slow to import

    title = f"How long a change waits, {measured.databases} databases and {measured.budget} connections"
    over_time(path, title, "seconds", {"one change": measured.staleness.samples})
