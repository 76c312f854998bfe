"""What capture costs the writer: the same statements on a tracked and an untracked table, one after the other."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from psycopg import sql
from rich.console import Console

from bench.measure import median, seconds
from bench.server import Bench
from bench.tables import ms, table
from bench.targets import Verdict

TABLES = ("untracked", "tracked")
BOUNDS = {"INSERT": 1.8, "COPY": 1.8, "UPDATE": 2.2, "DELETE": 2.5}
SINGLE = "single-row INSERT"
SINGLE_BOUND = 0.85
TOGETHER = "single-row INSERT, many per transaction"
# What else happens on the machine and its disk then hits both tables alike.
BLOCKS = 10

_INSERT = (
    "INSERT INTO {table} SELECT i, 'region ' || i % 5, 'category ' || i % 4, i * 7919 % 10000, i % 100"
    " FROM generate_series(1, {rows}) AS i"
)


@dataclass
class Cost:
    """Seconds of one statement, per table; the repeats of both belong together in pairs."""

    times: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TABLES})

    @property
    def ratio(self) -> float:
        """Median of tracked over untracked, pair by pair: what slows both down at once does not count."""
        pairs = zip(self.times["tracked"], self.times["untracked"], strict=True)
        return median([tracked / untracked for tracked, untracked in pairs])


def run(bench: Bench, rows: int, single: int, repeats: int, say: Callable[[str], None]) -> dict[str, Cost]:
    """Measure every kind of statement so many times."""
    costs = {name: Cost() for name in (*BOUNDS, SINGLE, TOGETHER)}
    copied = _csv(rows)
    for cycle in range(repeats):
        say(f"write cost: cycle {cycle + 1} of {repeats}")
        order = TABLES if cycle % 2 else TABLES[::-1]
        _fresh(bench)
        for statement in ("INSERT", "UPDATE", "DELETE"):
            for name in order:
                bench.settle()
                costs[statement].times[name].append(seconds(partial(_write, bench, statement, name, rows)))
        _check_captured(bench, 4 * rows)
        _fresh(bench)
        for name in order:
            bench.settle()
            costs["COPY"].times[name].append(seconds(partial(_copy, bench, name, copied)))
        _check_captured(bench, rows)
        _fresh(bench)
        _alternate(bench, costs, single)
        _check_captured(bench, (2 * BLOCKS + 1) * single)
    return costs


def _alternate(bench: Bench, costs: dict[str, Cost], single: int) -> None:
    """Short blocks of single rows, one table after the other, after a first block that fills caches."""
    bench.settle()
    for name in TABLES:
        _insert_singly(bench, name, range(single))
    start = single
    for block in range(BLOCKS):
        for kind, insert in ((SINGLE, _insert_singly), (TOGETHER, _insert_together)):
            ids = range(start, start + single)
            start += single
            for name in TABLES if block % 2 else TABLES[::-1]:
                costs[kind].times[name].append(seconds(partial(insert, bench, name, ids)))


def _fresh(bench: Bench) -> None:
    """Both tables anew, equal but for the stream table on one of them."""
    bench.conn.execute("DROP TABLE IF EXISTS untracked")
    if any(found.name == "public.of_tracked" for found in bench.db.stream_tables()):
        bench.db.drop_stream_table("of_tracked")
        bench.conn.execute("DROP TABLE tracked")
    for name in TABLES:
        bench.conn.execute(
            sql.SQL(
                "CREATE TABLE {} (id int PRIMARY KEY, region text, category text, amount int, score int)"
                " WITH (autovacuum_enabled = off)"
            ).format(sql.Identifier(name))
        )
    bench.db.create_stream_table(
        "of_tracked", "SELECT id, region, category, amount, score FROM tracked", initialize=False
    )


def _write(bench: Bench, statement: str, name: str, rows: int) -> None:
    texts = {
        "INSERT": sql.SQL(_INSERT),
        "UPDATE": sql.SQL("UPDATE {table} SET amount = amount + 1"),
        "DELETE": sql.SQL("DELETE FROM {table}"),
    }
    bench.conn.execute(texts[statement].format(table=sql.Identifier(name), rows=sql.Literal(rows)))


def _csv(rows: int) -> bytes:
    text = io.StringIO()
    insert_csv(text, rows)
    return text.getvalue().encode()


def insert_csv(text: io.StringIO, rows: int) -> None:
    for i in range(1, rows + 1):
        text.write(f"{i},region {i % 5},category {i % 4},{i * 7919 % 10000},{i % 100}\n")


def _copy(bench: Bench, name: str, data: bytes) -> None:
    command = sql.SQL("COPY {} FROM STDIN (FORMAT csv)").format(sql.Identifier(name))
    with bench.conn.cursor() as cursor, cursor.copy(command) as copy:
        copy.write(data)


def _insert_singly(bench: Bench, name: str, ids: range) -> None:
    """Each in its own transaction, durable before the next begins."""
    statement = sql.SQL("INSERT INTO {} VALUES (%s, 'region 1', 'category 1', %s, 1)").format(sql.Identifier(name))
    for i in ids:
        bench.conn.execute(statement, (i, i))


def _insert_together(bench: Bench, name: str, ids: range) -> None:
    """Without a wait for the disk in between: what remains is the processor's share."""
    with bench.conn.transaction():
        _insert_singly(bench, name, ids)


def _check_captured(bench: Bench, expected: int) -> None:
    """Capture that left rows out would be cheap."""
    row = bench.admin.execute(
        "SELECT buffer_relid::regclass::text FROM pgtrickle.pgt_change_tracking WHERE source_relid = 'tracked'::regclass"
    ).fetchone()
    assert row is not None
    schema, _, buffer = row[0].partition(".")
    count = bench.admin.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(schema, buffer))).fetchone()
    if count != (expected,):
        raise RuntimeError(f"captured {count} changes, expected {expected}")


def show(console: Console, costs: dict[str, Cost], rows: int) -> None:
    lines = []
    for name, cost in costs.items():
        plain, tracked = (median(cost.times[table_name]) for table_name in TABLES)
        lines.append([name, ms(plain), ms(tracked), f"{cost.ratio:.2f}"])
    table(
        console, f"Write cost, {rows:,} rows per statement", ["statement", "untracked, ms", "tracked, ms", "×"], lines
    )


def verdicts(costs: dict[str, Cost]) -> list[Verdict]:
    found = [
        Verdict(f"{name}: tracked × untracked", bound, "at most", costs[name].ratio) for name, bound in BOUNDS.items()
    ]
    throughput = 1 / costs[SINGLE].ratio
    return [*found, Verdict(f"{SINGLE}: throughput of untracked", SINGLE_BOUND, "at least", throughput)]
