"""Large refreshes: executors read and write, no rows pass through the driver. In these tests every refresh is large."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

import pgtrickle
from pgtrickle.postgres import copying
from pgtrickle.refresh.apply.load import Staged
from pgtrickle.refresh.compute import large
from pgtrickle.refresh.planning.jobs import Job
from pgtrickle.spark.executors import ReadSpec, as_option
from pgtrickle.spark.session import large_session, spark_session
from tests.support.corpus import SCHEMA_SQL, load_corpus
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query
from tests.support.oracle_rounds import create_corpus, stored
from tests.support.workload import Workload

SEED = 20261116
QUERIES = (
    "scan_keyless_with_duplicates", "inner_join_alone", "aggregate_by_expressions", "left_join_keyless_both_sides",
    "in_distinct", "full_all_subquery",
)  # fmt: skip


@pytest.fixture
def everything_is_large(database: TestDatabase) -> Iterator[pgtrickle.Database]:
    with pgtrickle.connect(database.dsn) as db:
        db.engine.reading.large = -1
        yield db


@pytest.mark.parametrize("placement", ["auto", "spark"])
def test_large_refreshes_are_exact(
    placement: str, everything_is_large: pgtrickle.Database, conn: psycopg.Connection
) -> None:
    print(f"seed {SEED}")
    db, workload = everything_is_large, Workload(SEED)
    queries = [query for query in load_corpus() if query.name in QUERIES]
    assert len(queries) == len(QUERIES)
    conn.execute(SCHEMA_SQL)
    workload.load(conn)
    create_corpus(db, conn, queries, placement)
    for number in range(2):
        if number:
            workload.round(conn, number)
        results = db.refresh([stored(query) for query in queries])
        for query, result in zip(queries, results, strict=True):
            assert result.action == ("REINITIALIZE" if number == 0 else query.mode)
            assert_equal_to_query(conn, stored(query), query.sql, query.by_value)


def test_many_rows_are_read_in_parts_and_staged(
    everything_is_large: pgtrickle.Database, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = everything_is_large
    monkeypatch.setattr(large, "_PART", 1 << 20)
    db.install()
    conn.execute("CREATE TABLE fact (id int PRIMARY KEY, kind text, val numeric(10,2))")
    conn.execute("INSERT INTO fact SELECT i, 'k' || i % 7, i / 3.0 FROM generate_series(1, 60000) AS i")
    query = "SELECT id, upper(kind) AS kind, val * 2 AS twice FROM fact WHERE id % 10 <> 3"
    db.create_stream_table("facts", query)
    parts = [statement for statement in db.engine.statements if "ctid" in statement]
    assert len(parts) > 2
    assert_equal_to_query(conn, "facts", query)

    conn.execute("UPDATE fact SET val = val + 1 WHERE id % 2 = 0")
    conn.execute("DELETE FROM fact WHERE id % 11 = 0")
    [result] = db.refresh("facts")
    assert result.action == "DIFFERENTIAL"
    assert result.rows_inserted > 20_000
    assert_equal_to_query(conn, "facts", query)
    assert _stages(conn) == []


def test_staging_tables_of_a_dead_process_are_dropped_by_the_next_large_refresh(
    everything_is_large: pgtrickle.Database, conn: psycopg.Connection
) -> None:
    db = everything_is_large
    db.install()
    conn.execute("CREATE TABLE fact (id int PRIMARY KEY)")
    table = db.create_stream_table("facts", "SELECT id FROM fact", initialize=False)
    conn.execute(f"CREATE UNLOGGED TABLE pgtrickle_views.stage_{table.id}_0 (attempt text)".encode())
    conn.execute("INSERT INTO fact VALUES (1)")
    db.refresh("facts")
    assert_equal_to_query(conn, "facts", "SELECT id FROM fact")
    assert _stages(conn) == []


def test_large_and_small_refreshes_at_once_keep_their_settings(
    database: TestDatabase, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two large and ten small refreshes, each over its own connection."""
    conn.execute("CREATE TABLE fact (id int PRIMARY KEY, kind int)")
    conn.execute("INSERT INTO fact SELECT i, i % 7 FROM generate_series(1, 5000) AS i")
    queries = {
        f"st_{n}": f"SELECT kind, count(*) AS n, max(id) AS last FROM fact WHERE id % 12 <> {n} GROUP BY kind"
        for n in range(12)
    }
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        for name, defined in queries.items():
            db.create_stream_table(name, defined)
    conn.execute("UPDATE fact SET kind = kind + 1 WHERE id % 3 = 0")
    all_compute, met = threading.Barrier(len(queries)), threading.Lock()
    found: list[tuple[bool, str]] = []

    def settings_of(session: SparkSession) -> str:
        return str(session.conf.get("spark.sql.shuffle.partitions"))

    def refresh(number: int) -> None:
        is_large = number < 2

        def on_step(step: str) -> None:
            if step == "spark":
                all_compute.wait(300)

        with pgtrickle.connect(database.dsn, on_step=on_step) as db:
            if is_large:
                db.engine.reading.large = -1
            db.refresh(f"st_{number}")
        with met:
            found.append((is_large, settings_of(large_session() if is_large else spark_session())))

    compute = large.LargeRefresh._compute
    used: list[str] = []

    def computed(work: large.LargeRefresh, job: Job, stage: str) -> Staged | None:
        used.append(settings_of(next(iter(work._frames.values())).sparkSession))
        return compute(work, job, stage)

    monkeypatch.setattr(large.LargeRefresh, "_compute", computed)
    with ThreadPoolExecutor(len(queries)) as pool:
        list(pool.map(refresh, range(len(queries))))
    assert used == ["32", "32"]
    assert sorted(found) == [(False, "1")] * 10 + [(True, "32")] * 2
    for name, defined in queries.items():
        assert_equal_to_query(conn, name, defined)


def test_large_refreshes_for_other_owners_and_a_service_without_read_rights(database: TestDatabase) -> None:
    owner, service = database.create_role("owner"), database.create_role("service")
    with pgtrickle.connect(database.dsn) as db:
        db.install(service_role=service)
    with psycopg.connect(database.superuser_dsn, autocommit=True) as conn:
        conn.execute(f"CREATE SCHEMA {owner} AUTHORIZATION {owner}".encode())
        conn.execute(f"GRANT USAGE ON SCHEMA {owner} TO {service}".encode())
    query = f"SELECT id, val + 1 AS val FROM {owner}.fact"
    with psycopg.connect(database.direct_dsn_as(owner), autocommit=True) as conn:
        conn.execute(f"CREATE TABLE {owner}.fact (id int PRIMARY KEY, val int)".encode())
        conn.execute(f"INSERT INTO {owner}.fact SELECT i, i FROM generate_series(1, 500) AS i".encode())
        with pgtrickle.connect(database.dsn_as(owner)) as db:
            db.create_stream_table(f"{owner}.facts", query, initialize=False)
        with pgtrickle.connect(database.dsn_as(service)) as db:
            db.engine.reading.large = -1
            db.refresh(f"{owner}.facts")
        assert_equal_to_query(conn, f"{owner}.facts", query)
        assert _stages(conn) == []


def test_a_large_result_of_small_tables_is_left_to_executors(
    database: TestDatabase, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "MOST_BYTES", 100_000)
    conn.execute("CREATE TABLE n (id int PRIMARY KEY); INSERT INTO n SELECT generate_series(1, 60)")
    query = "SELECT a.id AS a, b.id AS b, repeat('x', 100) AS t FROM n AS a CROSS JOIN n AS b"
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        db.create_stream_table("pairs", query)
        assert_equal_to_query(conn, "pairs", query)
        conn.execute("INSERT INTO n SELECT generate_series(100, 120); DELETE FROM n WHERE id < 5")
        (result,) = db.refresh("pairs")
        assert (result.action, result.rows_inserted, result.rows_deleted) == ("DIFFERENTIAL", 77 * 77 - 56 * 56, 464)
        assert_equal_to_query(conn, "pairs", query)


def test_no_password_reaches_spark(database: TestDatabase) -> None:
    with psycopg.connect(database.direct_dsn, password="se'cret:\\") as conn:
        conninfo = large._worker_conninfo(conn)
        task = as_option(ReadSpec(conninfo, "snapshot", {}, [["SELECT 1"]], [("a", "STRING")], 1.0, 2.0))
        assert "cret" not in task
        path = psycopg.conninfo.conninfo_to_dict(conninfo)["passfile"]
        assert Path(str(path)).read_text() == f"*:*:*:{conn.info.user}:se'cret\\:\\\\\n"
        with psycopg.connect(conninfo) as worker:
            assert worker.execute("SELECT 1").fetchone() == (1,)


def _stages(conn: psycopg.Connection) -> list[str]:
    rows = conn.execute("SELECT relname FROM pg_class WHERE relname ^@ 'stage_'").fetchall()
    return [name for (name,) in rows]
