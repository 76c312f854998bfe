"""Ten databases that read five tables of another one, by two services: what the refresh broker saves that one."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import psutil
import psycopg
from psycopg import sql
from rich.console import Console

import pgtrickle
from bench.process import service_process
from bench.server import Bench
from bench.tables import table
from bench.targets import Verdict

HOMES, SOURCES = 10, 5
INTERVAL = 5.0  # seconds of a tick: ten databases with ten stream tables each take about as long on two cores
PAUSE, ROWS = 0.5, 50  # between two changes, and rows of one
MOST_READS, MOST_SCANS = 0.12, 1.0
MOST_MISSED = 1.0

_QUERIES = {
    "total": "SELECT grp, count(*) AS n, sum(val) AS total FROM hub.public.s{0} GROUP BY grp",
    "high": "SELECT id, val * 2 AS twice FROM hub.public.s{0} WHERE val > 900",
}
_CHANGE = sql.SQL("INSERT INTO {} (grp, val) SELECT i % 20, i * 37 % 1000 FROM generate_series(1, {}) AS i")
_FILLED = "SELECT bool_and(frontier IS NOT NULL) FROM pgtrickle.pgt_stream_tables"
_COUNTS = """
    SELECT coalesce(sum(s.seq_scan), 0)::float8, coalesce(sum(s.seq_tup_read), 0)::float8,
           coalesce(sum(io.heap_blks_read + io.heap_blks_hit), 0)::float8, coalesce(sum(s.n_tup_ins), 0)::float8
    FROM pg_stat_user_tables s JOIN pg_statio_user_tables io USING (relid)
    WHERE s.schemaname = 'pgtrickle_changes' AND s.relname LIKE 'changes\\_%'
"""


@dataclass
class Cost:
    """Of one way for a while."""

    scans: float = 0.0
    rows: float = 0.0
    blocks: float = 0.0  # without those that writers touch to add a change
    written: float = 0.0
    cpu: float = 0.0  # seconds of the server's processes
    refreshes: int = 0
    busy: float = 0.0  # seconds that refreshes took
    ticks: int = 0

    def __iadd__(self, other: Cost) -> Cost:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


@dataclass
class Brokerage:
    costs: dict[bool, Cost] = field(default_factory=lambda: {False: Cost(), True: Cost()})
    usual_gap: float = 0.0  # the longest between two refreshes of a stream table with the broker, in ticks
    gap: float = 0.0  # the same after it was killed


def run(bench: Bench, seconds: float, repeat: int, say: Callable[[str], None]) -> Brokerage:
    """Without and with, in turns; then the broker is killed."""
    measured = Brokerage()
    hub = bench.new_database("hub")
    homes = _prepare(bench, hub, say)
    say("writers alone")
    with _writing(hub):
        before = _counts(hub)
        time.sleep(seconds / 2)
        alone = _since(before, hub)
    with ExitStack() as stack:
        services = [stack.enter_context(service_process(homes[i::2], INTERVAL)) for i in range(2)]
        say("filling the stream tables")
        for dsn in homes:
            _await_filled(dsn)
        writing = stack.enter_context(_writing(hub))
        for number in range(repeat):
            for brokered in (False, True):
                _switch(homes, brokered)
                say(f"cycle {number + 1} of {repeat}: {'with' if brokered else 'without'} the broker, first warming up")
                time.sleep(4 * INTERVAL)
                cost = _cost(bench, hub, homes, seconds)
                cost.blocks -= cost.written * alone.blocks / alone.written
                measured.costs[brokered] += cost
        measured.usual_gap = _longest_gap(homes, seconds)
        say("killing the broker")
        measured.gap = _kill_broker(hub, homes, services)
        writing.set()
        _check(hub, homes, services)
    return measured


def _prepare(bench: Bench, hub: str, say: Callable[[str], None]) -> list[str]:
    with psycopg.connect(hub, autocommit=True) as conn:
        for i in range(SOURCES):
            source = sql.Identifier(f"s{i}")
            conn.execute(sql.SQL("CREATE TABLE {} (id bigserial PRIMARY KEY, grp int, val int)").format(source))
            conn.execute(_CHANGE.format(source, 5000))
    say("preparing the first home")
    first = bench.new_database("home_0")
    with pgtrickle.connect(first) as db:
        db.add_database("hub", hub)
        db.conn.execute("SELECT pgtrickle.set('scheduler_interval_ms', %s)", (str(int(INTERVAL * 1000)),))
        for i in range(SOURCES):
            for name, query in _QUERIES.items():
                db.create_stream_table(f"{name}_{i}", query.format(i), schedule=f"{INTERVAL:.0f}s", initialize=False)
    say(f"copying it {HOMES - 1} times")
    for i in range(1, HOMES):
        copy = sql.SQL("CREATE DATABASE {} OWNER app TEMPLATE home_0").format(sql.Identifier(f"home_{i}"))
        bench.admin.execute(copy)
    return [psycopg.conninfo.make_conninfo(first, dbname=f"home_{i}") for i in range(HOMES)]


@contextmanager
def _writing(hub: str) -> Iterator[threading.Event]:
    over = threading.Event()

    def write() -> None:
        with psycopg.connect(hub, autocommit=True) as conn:
            while not over.wait(PAUSE):
                for i in range(SOURCES):
                    conn.execute(_CHANGE.format(sql.Identifier(f"s{i}"), ROWS))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield over
    finally:
        over.set()
        thread.join()


def _await_filled(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        while conn.execute(_FILLED).fetchone() != (True,):
            time.sleep(0.2)


def _switch(homes: Sequence[str], brokered: bool) -> None:
    for dsn in homes:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("SELECT pgtrickle.set('enable_refresh_broker', %s)", ("on" if brokered else "off",))


def _cost(bench: Bench, hub: str, homes: Sequence[str], seconds: float) -> Cost:
    before, cpu, ticks = _counts(hub), _cpu(bench), _ticks(hub)
    time.sleep(seconds)
    found = _since(before, hub)
    found.cpu, found.ticks = _cpu(bench) - cpu, _ticks(hub) - ticks
    for dsn in homes:
        with psycopg.connect(dsn) as conn:
            row = conn.execute(
                "SELECT count(*), coalesce(sum(extract(epoch FROM end_time - start_time)), 0)::float8"
                " FROM pgtrickle.pgt_refresh_history WHERE start_time > clock_timestamp() - make_interval(secs => %s)",
                (seconds,),
            ).fetchone()
        assert row is not None
        found.refreshes += row[0]
        found.busy += row[1]
    return found


def _counts(hub: str) -> tuple[float, ...]:
    with psycopg.connect(hub) as conn:
        row = conn.execute(_COUNTS.encode()).fetchone()
    assert row is not None
    return tuple(row)


def _since(before: tuple[float, ...], hub: str) -> Cost:
    scans, rows, blocks, written = (now - then for now, then in zip(_counts(hub), before, strict=True))
    return Cost(scans, rows, blocks, written)


def _ticks(hub: str) -> int:
    with psycopg.connect(hub) as conn:
        row = conn.execute("SELECT tick FROM pgtrickle.pgt_broker").fetchone()
    return row[0] if row is not None else 0


def _cpu(bench: Bench) -> float:
    """Seconds that the server's processes have worked, also those that ended."""
    server = psutil.Process(bench.admin.info.backend_pid).parent()
    assert server is not None
    times = [server.cpu_times()]
    for child in server.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended: the next look at its parent has its time
            times.append(child.cpu_times())
    gone = times[0].children_user + times[0].children_system
    return float(gone + sum(one.user + one.system for one in times))


def _kill_broker(hub: str, homes: Sequence[str], services: Sequence[subprocess.Popen[bytes]]) -> float:
    """SIGKILL while it works; gives the longest gap between refreshes of those that the other service looks after."""
    with psycopg.connect(hub) as conn:
        row = conn.execute("SELECT service_id FROM pgtrickle.pgt_broker").fetchone()
    assert row is not None
    of_first = _service_of(homes[0])
    dying = 0 if row[0] == of_first else 1
    os.killpg(services[dying].pid, signal.SIGKILL)
    services[dying].wait()
    time.sleep(5 * INTERVAL)
    return _longest_gap(homes[1 - dying :: 2], 6 * INTERVAL)


def _longest_gap(homes: Sequence[str], seconds: float) -> float:
    longest = 0.0
    for dsn in homes:
        with psycopg.connect(dsn) as conn:
            row = conn.execute(
                "SELECT max(gap) FROM (SELECT extract(epoch FROM start_time - lag(start_time)"
                " OVER (PARTITION BY pgt_id ORDER BY start_time))::float8 AS gap FROM pgtrickle.pgt_refresh_history"
                " WHERE start_time > clock_timestamp() - make_interval(secs => %s)) AS gaps",
                (seconds,),
            ).fetchone()
        assert row is not None
        longest = max(longest, row[0] or 0.0)
    return longest / INTERVAL


def _service_of(dsn: str) -> UUID:
    with psycopg.connect(dsn) as conn:
        row = conn.execute("SELECT service_id FROM pgtrickle.pgt_services WHERE kind = 'service'").fetchone()
    assert row is not None
    found: UUID = row[0]
    return found


def _check(hub: str, homes: Sequence[str], services: Sequence[subprocess.Popen[bytes]]) -> None:
    """What the surviving service looks after is exact when everything is quiet."""
    alive = next(i for i, service in enumerate(services) if service.poll() is None)
    deadline = time.monotonic() + 60
    for dsn in homes[alive::2]:
        for i in range(SOURCES):
            for name, query in _QUERIES.items():
                while not _same(dsn, hub, f"{name}_{i}", query.format(i).replace("hub.public.", "")):
                    if time.monotonic() > deadline:
                        raise AssertionError(f"{name}_{i} of {dsn} is not what its query says")
                    time.sleep(0.5)


def _same(home: str, hub: str, name: str, query: str) -> bool:
    with psycopg.connect(home) as one, psycopg.connect(hub) as other:
        stored = one.execute(sql.SQL("TABLE {}").format(sql.Identifier(name))).fetchall()
        return sorted(stored) == sorted(other.execute(query.encode()).fetchall())


def show(console: Console, measured: Brokerage) -> None:
    lines = [
        [
            "with the broker" if brokered else "without",
            *(f"{value:,.0f}" for value in (cost.scans, cost.rows, cost.blocks)),
            f"{cost.cpu:.1f}",
            f"{cost.refreshes:,}",
            f"{cost.busy / max(cost.refreshes, 1) * 1000:.0f}",
        ]
        for brokered, cost in measured.costs.items()
    ]
    title = f"{HOMES} databases, {HOMES * SOURCES * len(_QUERIES)} stream tables over {SOURCES} tables of another one"
    heads = ["", "scans of buffers", "rows read", "blocks", "CPU of the server, s", "refreshes", "ms each"]
    table(console, title, heads, lines)
    console.print(
        f"Longest gap between two refreshes: {measured.usual_gap:.2f} ticks; after the broker was killed: {measured.gap:.2f}"
    )


def _missed(gap: float) -> float:
    """Intervals without a refresh: none in a gap of one tick and a little, one in a gap of two."""
    return math.floor(gap) - 1.0


def verdicts(measured: Brokerage) -> list[Verdict]:
    without, brokered = measured.costs[False], measured.costs[True]
    scans = brokered.scans / max(1, brokered.ticks * SOURCES)
    return [
        Verdict("rows read from change buffers: with × without", MOST_READS, "at most", brokered.rows / without.rows),
        Verdict("blocks of change buffers: with × without", MOST_READS, "at most", brokered.blocks / without.blocks),
        Verdict("scans per source and tick", MOST_SCANS, "at most", scans),
        Verdict("not killed: intervals missed by a stream table", MOST_MISSED, "at most", _missed(measured.usual_gap)),
        Verdict("broker killed: intervals missed by a stream table", MOST_MISSED, "at most", _missed(measured.gap)),
    ]


def plot(measured: Brokerage, path: Path) -> None:
    from bench.charts import bars  # slow to import

    without, brokered = measured.costs[False], measured.costs[True]
    groups = {
        name: {"with the broker": getattr(brokered, name) / max(getattr(without, name), 1e-9)}
        for name in ("scans", "rows", "blocks", "cpu", "busy")
    }
    bars(path, "The broker beside everybody alone", "times without", groups)
