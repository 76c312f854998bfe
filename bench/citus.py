"""A Citus cluster of a coordinator and two workers: reading shards, applying to them, and what capture costs their writers."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame
from rich.console import Console

import pgtrickle
from bench.measure import median, seconds, warm_up
from bench.server import SETTINGS, Bench
from bench.tables import ms, table
from bench.targets import Verdict
from bench.write_cost import SINGLE, Cost, insert_csv
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.refresh.compute.large import STATEMENT_SECONDS
from pgtrickle.spark.executors import FORMAT, ReadSpec, as_option
from pgtrickle.spark.session import large_session
from tests.support import citus as clusters

STORED, UPSERTS, DELETES = 200_000, 50_000, 10_000
WAYS = ("through the coordinator", "direct from the workers")
FORMS = ("temporary table", "co-located stage and MERGE", "arrays")
BOUNDS = {"INSERT": 1.6, "COPY": 1.6, "UPDATE": 2.0}
SINGLE_BOUND = 0.9
COPIES = 3  # pairs of them in a cycle: they are short, and vary
SINGLE_UPDATE = "single-row UPDATE"
_ROWS = sql.SQL(
    "INSERT INTO {} SELECT i, 'region ' || i % 5, 'category ' || i % 4, i::bigint * 7919 % 10000, i % 100"
    " FROM generate_series({}, {}) AS i"
)
_STORE = "INSERT INTO target SELECT i, i, 1, md5(i::text)::uuid FROM generate_series(%s::int, %s) AS i"


@dataclass
class Figures:
    rows: int
    loads: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    filled: float = 0.0  # seconds of a whole initial population
    applies: dict[str, list[float]] = field(default_factory=lambda: {form: [] for form in FORMS})
    copied: list[float] = field(default_factory=list)  # seconds of COPY under a trigger that only copies rows
    costs: dict[str, Cost] = field(default_factory=lambda: {name: Cost() for name in (*BOUNDS, SINGLE, SINGLE_UPDATE)})


@dataclass(frozen=True)
class _ClusterBench(Bench):
    made: clusters.Cluster

    def settle(self) -> None:
        """On every node: Citus does not pass a checkpoint on."""
        for node in range(len(self.made.servers)):
            with psycopg.connect(self.made.superuser_dsn(node), autocommit=True) as conn:
                conn.execute("CHECKPOINT")


@contextmanager
def cluster_bench() -> Iterator[tuple[Bench, clusters.Cluster]]:
    """A cluster in temporary directories, gone at the end."""
    clusters.SETTINGS |= SETTINGS | {"shared_buffers": "512MB", "citus.shard_count": "8"}
    with (
        clusters.servers(3) as nodes,
        clusters.cluster(nodes) as made,
        pgtrickle.connect(made.dsn()) as db,
        psycopg.connect(made.dsn(), autocommit=True) as conn,
        psycopg.connect(made.superuser_dsn(), autocommit=True) as admin,
    ):
        db.install()
        yield _ClusterBench(db, conn, admin, made), made


def run(rows: int, repeat: int, single: int, say: Callable[[str], None]) -> Figures:
    measured = Figures(rows)
    warm_up()
    with cluster_bench() as (bench, made):
        _loads(bench, made, measured, repeat, say)
        _applies(bench, measured, repeat, say)
        _write_costs(bench, made, measured, repeat, single, say)
    return measured


def _distributed(bench: Bench, name: str) -> None:
    """An empty distributed table of that name, anew."""
    columns = sql.SQL("CREATE TABLE {} (id int PRIMARY KEY, region text, category text, amount int, score int)")
    bench.conn.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(name)))
    bench.conn.execute(columns.format(sql.Identifier(name)))
    bench.conn.execute("SELECT create_distributed_table(%s, 'id')", (name,))


# -- reading ---------------------------------------------------------------------------------------------------------------


def _loads(bench: Bench, made: clusters.Cluster, measured: Figures, repeat: int, say: Callable[[str], None]) -> None:
    """The same rows into the same aggregation on Spark: by one statement of the coordinator, or a task per shard."""
    say(f"a distributed table of {measured.rows:,} rows")
    _distributed(bench, "big")
    for begin in range(1, measured.rows + 1, 500_000):
        bench.conn.execute(_ROWS.format(sql.Identifier("big"), begin, min(begin + 499_999, measured.rows)))
    shards = bench.admin.execute(
        "SELECT p.groupid, shard_name(s.logicalrelid, s.shardid, true) FROM pg_dist_shard s"
        " JOIN pg_dist_placement p USING (shardid) WHERE s.logicalrelid = 'big'::regclass"
    ).fetchall()
    of_node = {group: [name for one, name in shards if one == group] for group in {group for group, _ in shards}}
    for cycle in range(repeat):
        say(f"reading: cycle {cycle + 1} of {repeat}")
        for way in WAYS if cycle % 2 else WAYS[::-1]:
            direct = way == WAYS[1]
            sources = [(made.servers[node], names) for node, names in of_node.items()]
            read = sources if direct else [(made.servers[0], ["big"])]
            measured.loads[way].append(seconds(partial(_read, made.name, read, measured.rows)))
    say("the initial population of a stream table")
    query = "SELECT region, count(*) AS n, sum(amount) AS total FROM big GROUP BY region"
    measured.filled = seconds(lambda: bench.db.create_stream_table("of_big", query))
    bench.db.drop_stream_table("of_big")


def _read(database: str, sources: list[tuple[EmbeddedServer, list[str]]], rows: int) -> None:
    columns = [("region", "STRING"), ("amount", "BIGINT")]
    frames: list[DataFrame] = []
    held = [psycopg.connect(server.dsn(database, "app")) for server, _ in sources]
    try:
        for conn, (server, tables) in zip(held, sources, strict=True):
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            row = conn.execute("SELECT pg_export_snapshot()").fetchone()
            assert row is not None
            columns_of = sql.SQL("SELECT region, amount FROM {}")
            texts = [columns_of.format(sql.Identifier(name)).as_string(conn) for name in tables]
            task = ReadSpec(
                server.dsn(database, "app"),
                row[0],
                {},
                [[text] for text in texts],
                columns,
                STATEMENT_SECONDS,
                STATEMENT_SECONDS,
            )
            reader = large_session().read.format(FORMAT).schema("region STRING, amount BIGINT")
            frames.append(reader.option("task", as_option(task)).load())
        together = frames[0]
        for frame in frames[1:]:
            together = together.unionAll(frame)
        found = together.selectExpr("count(*) AS n").collect()[0]["n"]
    finally:
        for conn in held:
            conn.close()
    if found != rows:
        raise RuntimeError(f"read {found} rows of {rows}")


# -- applying --------------------------------------------------------------------------------------------------------------


def _applies(bench: Bench, measured: Figures, repeat: int, say: Callable[[str], None]) -> None:
    conn = bench.conn
    for name in ("target", "stage"):
        columns = sql.SQL("CREATE TABLE {} (k int, v int, w int, row_id uuid PRIMARY KEY)")
        conn.execute(columns.format(sql.Identifier(name)))
        conn.execute("SELECT create_distributed_table(%s, 'row_id')", (name,))
    conn.execute(_STORE, (1, STORED))
    conn.execute("CREATE TEMP TABLE delta (k int, v int, w int, row_id uuid)")
    forms: dict[str, Callable[[psycopg.Connection[Any], list[Any]], None]] = dict(
        zip(FORMS, (_by_temp, _by_merge, _by_arrays), strict=True)
    )
    for cycle in range(repeat):
        say(f"applying: cycle {cycle + 1} of {repeat}")
        for form in FORMS if cycle % 2 else FORMS[::-1]:
            first = cycle * DELETES + 1
            conn.execute("TRUNCATE delta")
            conn.execute(
                "INSERT INTO delta SELECT i, i + %s::int, CASE WHEN i < %s THEN -1 ELSE 1 END, md5(i::text)::uuid"
                " FROM generate_series(%s::int, %s) AS i",
                (cycle, first + DELETES, first, first + DELETES + UPSERTS - 1),
            )
            rows = conn.execute("SELECT k, v, w, row_id FROM delta").fetchall()
            bench.settle()
            measured.applies[form].append(seconds(partial(_in_one, conn, forms[form], rows)))
            conn.execute(_STORE, (first, first + DELETES - 1))


def _in_one(
    conn: psycopg.Connection[Any], apply: Callable[[psycopg.Connection[Any], list[Any]], None], rows: list[Any]
) -> None:
    with conn.transaction():
        apply(conn, rows)


def _by_temp(conn: psycopg.Connection[Any], rows: list[Any]) -> None:
    conn.execute("DELETE FROM target WHERE row_id IN (SELECT row_id FROM delta WHERE w < 0)")
    conn.execute(
        "INSERT INTO target SELECT * FROM delta WHERE w > 0 ON CONFLICT (row_id) DO UPDATE SET k = excluded.k, v = excluded.v"
    )


def _by_merge(conn: psycopg.Connection[Any], rows: list[Any]) -> None:
    conn.execute("INSERT INTO stage SELECT * FROM delta")
    conn.execute(
        "MERGE INTO target t USING stage s ON t.row_id = s.row_id WHEN MATCHED AND s.w < 0 THEN DELETE"
        " WHEN MATCHED THEN UPDATE SET k = s.k, v = s.v"
        " WHEN NOT MATCHED AND s.w > 0 THEN INSERT (k, v, w, row_id) VALUES (s.k, s.v, s.w, s.row_id)"
    )
    conn.execute("TRUNCATE stage")


def _by_arrays(conn: psycopg.Connection[Any], rows: list[Any]) -> None:
    conn.execute("DELETE FROM target WHERE row_id = ANY (%s)", ([row[3] for row in rows if row[2] < 0],))
    new = [row for row in rows if row[2] > 0]
    conn.execute(
        "INSERT INTO target SELECT * FROM unnest(%s::int[], %s::int[], %s::int[], %s::uuid[])"
        " ON CONFLICT (row_id) DO UPDATE SET k = excluded.k, v = excluded.v",
        [list(column) for column in zip(*new, strict=True)],
    )


# -- writing ---------------------------------------------------------------------------------------------------------------


def _write_costs(
    bench: Bench, made: clusters.Cluster, measured: Figures, repeat: int, single: int, say: Callable[[str], None]
) -> None:
    rows = 200_000
    text = io.StringIO()
    insert_csv(text, rows)
    for cycle in range(repeat):
        say(f"write cost: cycle {cycle + 1} of {repeat}")
        names = ("untracked", "tracked") if cycle % 2 else ("tracked", "untracked")
        _fresh(bench)
        for kind in ("INSERT", "UPDATE"):
            for name in names:
                table_name = sql.Identifier(name)
                update = sql.SQL("UPDATE {} SET amount = amount + 1").format(table_name)
                bench.settle()
                run = partial(bench.conn.execute, _ROWS.format(table_name, 1, rows) if kind == "INSERT" else update)
                measured.costs[kind].times[name].append(seconds(run))
        for _ in range(5):
            for name in names:
                for kind, statement in (
                    (SINGLE, sql.SQL("INSERT INTO {} VALUES (%s, 'r', 'c', 1, 1)")),
                    (SINGLE_UPDATE, sql.SQL("UPDATE {} SET amount = 7 WHERE id = %s")),
                ):
                    begin = len(measured.costs[kind].times[name]) * single + rows + 1
                    ids = range(begin, begin + single) if kind == SINGLE else range(1, single + 1)
                    # A text: composing it for every row would be measured too.
                    text_of = statement.format(sql.Identifier(name)).as_bytes(bench.conn)
                    measured.costs[kind].times[name].append(seconds(partial(_singly, bench, text_of, ids)))
        for _ in range(COPIES):
            _fresh(bench)
            for name in names:
                bench.settle()
                measured.costs["COPY"].times[name].append(
                    seconds(partial(_copy, bench, name, text.getvalue().encode()))
                )
            _check_captured(made, rows)
            _fresh_copied(bench, made)
            bench.settle()
            measured.copied.append(seconds(partial(_copy, bench, "copied", text.getvalue().encode())))


def _fresh(bench: Bench) -> None:
    if bench.db.stream_tables():
        bench.db.drop_stream_table("of_tracked")
    for name in ("untracked", "tracked"):
        _distributed(bench, name)
    query = "SELECT id, region, category, amount, score FROM tracked"
    bench.db.create_stream_table("of_tracked", query, initialize=False, st_placement="local")


def _fresh_copied(bench: Bench, made: clusters.Cluster) -> None:
    """The least that any capture by triggers can do: its rows, into a table of the node without an index."""
    _distributed(bench, "copied")
    for node in range(len(made.servers)):
        with psycopg.connect(made.dsn(node), autocommit=True) as conn:
            conn.execute("SET citus.enable_ddl_propagation = off")
            conn.execute("DROP TABLE IF EXISTS copies")
            conn.execute("CREATE TABLE copies (xid bigint, w smallint, id int, a text, b text, c int, d int)")
    bench.conn.execute("SET citus.enable_unsafe_triggers = on")
    bench.conn.execute(
        "CREATE OR REPLACE FUNCTION copy_rows() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " INSERT INTO public.copies SELECT txid_current(), 1::smallint, r.* FROM rows_written AS r; RETURN NULL; END $$"
    )
    bench.conn.execute(
        "CREATE TRIGGER copy_rows AFTER INSERT ON copied REFERENCING NEW TABLE AS rows_written"
        " FOR EACH STATEMENT EXECUTE FUNCTION copy_rows()"
    )


def _singly(bench: Bench, statement: bytes, ids: range) -> None:
    for i in ids:
        bench.conn.execute(statement, (i,))


def _copy(bench: Bench, name: str, data: bytes) -> None:
    command = sql.SQL("COPY {} FROM STDIN (FORMAT csv)").format(sql.Identifier(name))
    with bench.conn.cursor() as cursor, cursor.copy(command) as copy:
        copy.write(data)


def _check_captured(made: clusters.Cluster, expected: int) -> None:
    """Capture that left rows out would be cheap."""
    found = 0
    for node in (1, 2):
        with psycopg.connect(made.superuser_dsn(node)) as conn:
            row = conn.execute(
                "SELECT c.relname FROM pgtrickle.pgt_change_tracking AS t JOIN pg_class AS c ON c.oid = t.buffer_relid"
                " WHERE t.source_relid = 'tracked'::regclass"
            ).fetchone()
            assert row is not None
            buffer = sql.Identifier("pgtrickle_changes", row[0])
            count = conn.execute(sql.SQL("SELECT count(*) FROM {}").format(buffer)).fetchone()
            assert count is not None
            found += count[0]
    if found != expected:
        raise RuntimeError(f"captured {found} changes, expected {expected}")


# -- showing ---------------------------------------------------------------------------------------------------------------


def show(console: Console, measured: Figures) -> None:
    loads = [[way, *_spread(times)] for way, times in measured.loads.items()]
    loads.append(["an initial population, by a stream table", ms(measured.filled), "", ""])
    table(console, f"Reading {measured.rows:,} rows of a distributed table", ["", "median, ms", "least", "most"], loads)
    applies = [[form, *_spread(times)] for form, times in measured.applies.items()]
    title = f"Applying {UPSERTS:,} upserts and {DELETES:,} deletes to {STORED:,} distributed rows"
    table(console, title, ["", "median, ms", "least", "most"], applies)
    costs = [
        [name, ms(median(cost.times["untracked"])), ms(median(cost.times["tracked"])), f"{cost.ratio:.2f}"]
        for name, cost in measured.costs.items()
    ]
    least = Cost({"untracked": measured.costs["COPY"].times["untracked"], "tracked": measured.copied})
    costs.append(["COPY, a trigger that only copies rows", "", ms(median(measured.copied)), f"{least.ratio:.2f}"])
    table(console, "Writing to a distributed table", ["statement", "untracked, ms", "tracked, ms", "×"], costs)


def _spread(times: list[float]) -> list[str]:
    return [ms(statistics.median(times)), ms(min(times)), ms(max(times))]


def verdicts(measured: Figures) -> list[Verdict]:
    found = [
        Verdict(f"{name}: tracked × untracked", bound, "at most", measured.costs[name].ratio)
        for name, bound in BOUNDS.items()
    ]
    return found + [
        Verdict(f"{name}: throughput of untracked", SINGLE_BOUND, "at least", 1 / measured.costs[name].ratio)
        for name in (SINGLE, SINGLE_UPDATE)
    ]


def plot(measured: Figures, path: Path) -> None:
    from bench.charts import bars  # slow to import

    groups = {
        f"reading {measured.rows:,} rows": {way: median(times) for way, times in measured.loads.items()},
        "applying 60,000 changes": {form: median(times) for form, times in measured.applies.items()},
    }
    bars(path, "Citus: reading shards, and ways to apply", "seconds", groups)
