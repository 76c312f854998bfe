"""What a tick costs when there is nothing to do: 100, 1,000 and 5,000 stream tables over at most 1,000 sources."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from rich.console import Console

from bench.measure import median, seconds
from bench.server import Bench
from bench.tables import ms, table
from bench.targets import Verdict
from pgtrickle.service.connection_budget import Budget
from pgtrickle.service.pool import Pool
from pgtrickle.service.scheduler import Scheduler
from pgtrickle.service.settings import read_settings
from pgtrickle.service.tended import Tended
from pgtrickle.service.worker import Workers

COUNTS = (100, 1_000, 5_000)
MOST_SOURCES = 1_000
BOUND = 2.0
# As many as one beat, audit, alert and pruning fall into, which not every tick has.
TICKS = 60


@dataclass
class Ticks:
    """Seconds of idle ticks, by the number of stream tables."""

    times: dict[int, list[float]] = field(default_factory=dict)

    def mean(self, count: int) -> float:
        return sum(self.times[count]) / len(self.times[count])


def run(bench: Bench, counts: tuple[int, ...], ticks: int, say: Callable[[str], None]) -> Ticks:
    """Add stream tables up to each count, then tick."""
    measured = Ticks()
    for i in range(min(MOST_SOURCES, max(counts))):
        bench.conn.execute(
            sql.SQL("CREATE TABLE {} (id int PRIMARY KEY, val int)").format(sql.Identifier(f"source_{i}"))
        )
    created = 0
    for count in counts:
        while created < count:
            if created % 100 == 0:
                say(f"creating stream table {created + 1} of {max(counts)}")
            _create(bench.conn, created)
            created += 1
        _pretend_filled(bench.conn)
        bench.admin.execute("VACUUM ANALYZE")
        say(f"{ticks} ticks over {count} stream tables")
        measured.times[count] = _ticks(bench, ticks)
    return measured


def _create(conn: psycopg.Connection[Any], number: int) -> None:
    query = f"SELECT id, val FROM source_{number % MOST_SOURCES} WHERE val > {number}"
    conn.execute(
        "SELECT pgtrickle.create_stream_table(%s, %s, initialize => false, key_columns => ARRAY['id'])",
        (f"st_{number}", query),
    )


def _pretend_filled(conn: psycopg.Connection[Any]) -> None:
    """All sources are empty, and so are the stream tables: only the catalog does not know yet that they are right."""
    conn.execute(
        "UPDATE pgtrickle.pgt_dependencies SET capture_signature = pgtrickle._capture_signature(source_relid)"
        " WHERE capture_signature IS NULL"
    )
    conn.execute(
        "UPDATE pgtrickle.pgt_stream_tables SET status = 'ACTIVE', reinit_reason = NULL, data_timestamp = now(),"
        " frontier = jsonb_build_object('node', 'bench', 'snapshot', pg_current_snapshot(), 'meaning', '')"
        " WHERE reinit_reason IS NOT NULL"
    )


def _ticks(bench: Bench, ticks: int) -> list[float]:
    dsn, database = bench.conn.info.dsn, bench.conn.info.dbname
    scheduler = Scheduler(Tended("bench", Workers(Budget(dsn), database, uuid.uuid4())), Pool(4), 30.0)
    with psycopg.connect(dsn, autocommit=True) as conn:

        def tick() -> None:
            scheduler.tick(conn, read_settings(conn))

        tick()
        return [seconds(tick) for _ in range(ticks)]


def show(console: Console, measured: Ticks) -> None:
    lines = [[f"{n:,}", ms(median(times)), ms(measured.mean(n)), ms(max(times))] for n, times in measured.times.items()]
    table(console, "A tick with nothing to do", ["stream tables", "median, ms", "mean, ms", "max, ms"], lines)


def verdicts(measured: Ticks) -> list[Verdict]:
    few, many = min(measured.times), max(measured.times)
    ratio = measured.mean(many) / measured.mean(few) if many > few else None
    return [Verdict(f"idle tick: {many:,} stream tables × {few:,}", BOUND, "at most", ratio)]


def plot(measured: Ticks, path: Path) -> None:
    from bench.charts import bars  # slow to import

    groups = {
        f"{count:,} stream tables": {"median": 1000 * median(times), "mean": 1000 * measured.mean(count)}
        for count, times in measured.times.items()
    }
    bars(path, "A tick with nothing to do", "milliseconds", groups)
