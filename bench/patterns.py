"""What one more database costs: under one service for all, with a service of its own, or replicated into a hub."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import psycopg
from psycopg import sql
from rich.console import Console

import pgtrickle
from bench.process import service_process
from bench.server import Bench
from bench.tables import table
from bench.targets import Verdict

STREAM_TABLES = 5
SETTINGS = {
    "wal_level": "logical",
    "max_replication_slots": "40",
    "max_wal_senders": "40",
    "max_worker_processes": "60",
    "max_logical_replication_workers": "40",
    "max_active_replication_origins": "40",
}
_QUERY = "SELECT grp, count(*) AS n, sum(val) AS total FROM {} WHERE val >= {} GROUP BY grp"
_TABLE = "CREATE TABLE {} (id bigserial PRIMARY KEY, grp int, val int)"
_ROWS = "INSERT INTO {} (grp, val) SELECT i % 10, i % 100 FROM generate_series(1, 1000) AS i"
_COPYING = "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'"
_FILLED = "SELECT bool_and(frontier IS NOT NULL) FROM pgtrickle.pgt_stream_tables"
_OURS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgtrickle %'"
_REPLICATION = (
    "SELECT pid FROM pg_stat_activity WHERE backend_type IN ('walsender', 'logical replication apply worker')"
)


@dataclass
class Footprint:
    """Of a way to look after some databases, at rest after the stream tables were filled."""

    databases: int
    connections: float = 0.0  # to the server
    python: float = 0.0  # megabytes that are nobody else's
    jvm: float = 0.0
    backends: float = 0.0  # of the server's processes that serve it


@dataclass
class Patterns:
    ways: dict[str, list[Footprint]] = field(default_factory=dict)


def run(bench: Bench, databases: int, say: Callable[[str], None]) -> Patterns:
    """Each way for one database and for several: the difference is the price of one more."""
    dsns = _prepare(bench, databases, say)
    measured = Patterns()
    measured.ways["one service for all"] = [_of_one(bench, some, say) for some in (dsns[:1], dsns)]
    measured.ways["a service each"] = [_of_each(bench, dsns[:2], say)]
    measured.ways["a hub by logical replication"] = [_of_hub(bench, some, say) for some in (dsns[:1], dsns)]
    return measured


def _prepare(bench: Bench, databases: int, say: Callable[[str], None]) -> list[str]:
    first = bench.new_database("one_00")
    with pgtrickle.connect(first) as db:
        db.conn.execute(_TABLE.format("item").encode())
        db.conn.execute(_ROWS.format("item").encode())
        for i in range(STREAM_TABLES):
            db.create_stream_table(f"st_{i}", _QUERY.format("item", i), schedule="1s", initialize=False)
    say(f"copying the first database {databases - 1} times")
    for i in range(1, databases):
        copy = sql.SQL("CREATE DATABASE {} OWNER app TEMPLATE one_00").format(sql.Identifier(f"one_{i:02d}"))
        bench.admin.execute(copy)
    return [psycopg.conninfo.make_conninfo(first, dbname=f"one_{i:02d}") for i in range(databases)]


def _of_one(bench: Bench, dsns: Sequence[str], say: Callable[[str], None]) -> Footprint:
    say(f"one service, {len(dsns)} databases")
    with service_process(dsns) as process:
        return _measure(bench, dsns, [process.pid], len(dsns))


def _of_each(bench: Bench, dsns: Sequence[str], say: Callable[[str], None]) -> Footprint:
    say(f"{len(dsns)} services")
    with ExitStack() as stack:
        started = [stack.enter_context(service_process([dsn])) for dsn in dsns]
        return _measure(bench, dsns, [process.pid for process in started], len(dsns))


def _of_hub(bench: Bench, dsns: Sequence[str], say: Callable[[str], None]) -> Footprint:
    """Each database's table is replicated into the hub; the stream tables are there."""
    say(f"a hub of {len(dsns)} databases")
    name = f"hub_{len(dsns)}"
    hub = bench.new_database(name)
    with psycopg.connect(psycopg.conninfo.make_conninfo(bench.admin.info.dsn, dbname=name), autocommit=True) as admin:
        for i, dsn in enumerate(dsns):
            source = psycopg.conninfo.make_conninfo(bench.admin.info.dsn, dbname=_name(dsn))
            with psycopg.connect(source, autocommit=True) as there:
                there.execute(f"ALTER TABLE item RENAME TO item_{i}".encode())
                there.execute(f"CREATE PUBLICATION {name} FOR TABLE item_{i}".encode())
                there.execute(f"SELECT pg_create_logical_replication_slot('{name}_{i}', 'pgoutput')".encode())
            admin.execute(_TABLE.format(f"item_{i}").encode())
            admin.execute(f"ALTER TABLE item_{i} OWNER TO app".encode())
            admin.execute(
                f"CREATE SUBSCRIPTION {name}_{i} CONNECTION '{source}' PUBLICATION {name}"
                f" WITH (create_slot = false, slot_name = '{name}_{i}')".encode()
            )
        while admin.execute(_COPYING).fetchone() != (0,):
            time.sleep(0.1)
        with pgtrickle.connect(hub) as db:
            for i in range(len(dsns)):
                for j in range(STREAM_TABLES):
                    db.create_stream_table(
                        f"st_{i}_{j}", _QUERY.format(f"item_{i}", j), schedule="1s", initialize=False
                    )
        try:
            with service_process([hub]) as process:
                return _measure(bench, [hub], [process.pid], len(dsns))
        finally:
            for i, dsn in enumerate(dsns):
                admin.execute(f"DROP SUBSCRIPTION {name}_{i}".encode())
                with psycopg.connect(
                    psycopg.conninfo.make_conninfo(bench.admin.info.dsn, dbname=_name(dsn)), autocommit=True
                ) as there:
                    there.execute(f"DROP PUBLICATION {name}".encode())
                    there.execute(f"ALTER TABLE item_{i} RENAME TO item".encode())


def _measure(bench: Bench, dsns: Sequence[str], pids: Sequence[int], databases: int) -> Footprint:
    for dsn in dsns:
        with psycopg.connect(dsn, autocommit=True) as conn:
            while conn.execute(_FILLED).fetchone() != (True,):
                time.sleep(0.2)
    found = Footprint(databases)
    time.sleep(65)  # connections of workers are closed after a minute of rest: what stays is the price
    row = bench.admin.execute(_OURS.encode()).fetchone()
    assert row is not None
    replication = [pid for (pid,) in bench.admin.execute(_REPLICATION).fetchall()]
    found.connections = row[0] + len(replication)
    for pid in pids:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            megabytes = process.memory_full_info().uss / 1e6
            if process.name() == "java":
                found.jvm += megabytes
            else:
                found.python += megabytes
    ours = bench.admin.execute(_OURS.replace("count(*)", "pid").encode()).fetchall()
    found.backends = (
        sum(psutil.Process(pid).memory_full_info().uss for pid in [*replication, *(p for (p,) in ours)]) / 1e6
    )
    return found


def _name(dsn: str) -> str:
    return str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])


def show(console: Console, measured: Patterns) -> None:
    lines = []
    for way, found in measured.ways.items():
        for one in found:
            lines.append([way, str(one.databases), *_figures(one, 1.0)])
        first, last = found[0], found[-1]
        if first is last:
            lines.append([f"{way}: per database", "", *_figures(last, last.databases)])
            continue
        more = Footprint(last.databases - first.databases)
        for name in ("connections", "python", "jvm", "backends"):
            setattr(more, name, getattr(last, name) - getattr(first, name))
        lines.append([f"{way}: one more", "", *_figures(more, more.databases)])
    heads = ["", "databases", "connections", "Python, MB", "Spark, MB", "server processes, MB"]
    table(console, f"What looking after databases of {STREAM_TABLES} stream tables costs, at rest", heads, lines)


def _figures(one: Footprint, share: float) -> list[str]:
    return [f"{value / share:,.1f}" for value in (one.connections, one.python, one.jvm, one.backends)]


def verdicts(measured: Patterns) -> list[Verdict]:
    return []  # a price list, no target


def plot(measured: Patterns, path: Path) -> None:
    from bench.charts import bars  # slow to import

    groups = {
        f"{way}, {one.databases}": {"Python": one.python, "Spark": one.jvm, "server": one.backends}
        for way, found in measured.ways.items()
        for one in found
    }
    bars(path, "Memory by way of looking after databases", "MB", groups)
