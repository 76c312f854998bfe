"""Refreshes from the command line on real Spark, which starts slowly: each test starts it once at most."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import psycopg
import pytest

from pgtrickle.catalog.install import install as install_catalog
from tests.e2e.test_cli import EXECUTABLE, ORDERS, REVENUE, cli, environment, fail, succeed
from tests.support.database import TestDatabase

STARTING = "starting Spark"


@pytest.fixture
def shop(database: TestDatabase, conn: psycopg.Connection) -> TestDatabase:
    install_catalog(conn)
    conn.execute(ORDERS)
    return database


def test_a_local_refresh_starts_spark_only_if_there_is_something_to_compute(
    shop: TestDatabase, conn: psycopg.Connection
) -> None:
    created = cli(shop.dsn, "create", "revenue", REVENUE, "--json")
    assert created.returncode == 0, created.stderr
    assert json.loads(created.stdout)["status"] == "ACTIVE"
    assert created.stderr.startswith(STARTING)
    assert len(created.stderr.splitlines()) == 1, "the JVM's chatter is not for users"
    assert equal(conn, "revenue", REVENUE)

    idle = cli(shop.dsn, "refresh", "--all", "--json")
    assert [result["action"] for result in json.loads(idle.stdout)] == ["NO_DATA"]
    assert idle.stderr == ""

    conn.execute("SELECT pgtrickle.refresh_stream_table('revenue')")
    once = cli(shop.dsn, "run", "--once")
    assert (once.returncode, once.stdout, once.stderr) == (0, "1 done, 0 failed, 0 postponed\n", "")
    served = conn.execute(
        "SELECT r.status, h.initiated_by FROM pgtrickle.pgt_requests AS r"
        " JOIN pgtrickle.pgt_refresh_history AS h USING (refresh_id)"
    ).fetchall()
    assert served == [("DONE", "REQUEST")]
    assert conn.execute("SELECT count(*) FROM pgtrickle.pgt_services").fetchone() == (0,)
    assert [row["initiated_by"] for row in json.loads(succeed(shop.dsn, "history", "revenue", "--json"))] == [
        "REQUEST",
        "MANUAL",
        "INITIAL",
    ]
    assert len(succeed(shop.dsn, "history", "revenue", "--limit", "1").splitlines()) == 1


def test_a_refresh_by_another_process_is_exit_code_3(shop: TestDatabase, conn: psycopg.Connection) -> None:
    succeed(shop.dsn, "create", "revenue", REVENUE, "--no-init")
    conn.execute(
        "WITH other AS (INSERT INTO pgtrickle.pgt_services (service_id, kind, host, pid, version)"
        " VALUES (%s, 'refresh', 'here', 1, 'test') RETURNING service_id)"
        " UPDATE pgtrickle.pgt_stream_tables SET claimed_by = other.service_id FROM other",
        [uuid4()],
    )
    assert "is being refreshed, altered or dropped by another process" in fail(3, shop.dsn, "refresh", "revenue")
    conn.execute("SELECT pgtrickle.refresh_stream_table('revenue')")
    assert "are waiting for another process" in fail(3, shop.dsn, "run", "--once")
    assert conn.execute("SELECT status FROM pgtrickle.pgt_requests").fetchall() == [("PENDING",)]


def test_a_failed_refresh_is_explained_and_does_not_affect_others(shop: TestDatabase, conn: psycopg.Connection) -> None:
    conn.execute("CREATE TABLE empty (id int PRIMARY KEY)")
    succeed(shop.dsn, "create", "fine", "SELECT id FROM empty", "--no-init")
    succeed(shop.dsn, "create", "broken", "SELECT id, 1 / (id - 7) AS x FROM orders", "--no-init", "--mode", "FULL")
    assert "division by zero (SQLSTATE 22012)" in fail(1, shop.dsn, "refresh", "broken")
    for name in ("broken", "fine"):
        conn.execute("SELECT pgtrickle.refresh_stream_table(%s)", [name])
    done = cli(shop.dsn, "run", "--once")
    assert (done.returncode, done.stdout) == (1, "1 done, 1 failed, 0 postponed\n")
    requests = conn.execute("SELECT status, error FROM pgtrickle.pgt_requests ORDER BY request_id").fetchall()
    assert requests == [("FAILED", "division by zero"), ("DONE", None)]
    assert "division by zero" in succeed(shop.dsn, "status")
    assert "division by zero" in cli(shop.dsn, "doctor").stdout


def test_any_refresh_that_sees_a_request_answers_it(shop: TestDatabase, conn: psycopg.Connection) -> None:
    conn.execute("CREATE TABLE empty (id int PRIMARY KEY)")
    succeed(shop.dsn, "create", "fine", "SELECT id FROM empty", "--no-init")
    conn.execute("SELECT pgtrickle.refresh_stream_table('fine')")
    succeed(shop.dsn, "refresh", "fine")
    assert conn.execute("SELECT status FROM pgtrickle.pgt_requests").fetchall() == [("DONE",)]
    assert succeed(shop.dsn, "run", "--once").startswith("0 done")


def test_a_running_service_does_the_work(shop: TestDatabase, conn: psycopg.Connection) -> None:
    with service(shop, conn) as process:
        created = cli(shop.dsn, "create", "revenue", REVENUE)
        assert (created.returncode, created.stderr) == (0, ""), "no Spark of its own"
        assert equal(conn, "revenue", REVENUE)
        conn.execute("UPDATE orders SET amount = amount + 1, region = 'r9' WHERE id < 5")
        (result,) = json.loads(succeed(shop.dsn, "refresh", "revenue", "--json"))
        # Its schedule may have been faster.
        assert (result["name"], result["action"] in {"DIFFERENTIAL", "NO_DATA"}) == ("public.revenue", True)
        assert equal(conn, "revenue", REVENUE)

        conn.execute("DELETE FROM orders WHERE id = 1")
        conn.execute("CALL pgtrickle.refresh_and_wait('revenue', '2 minutes')")
        assert equal(conn, "revenue", REVENUE)
        (status,) = json.loads(succeed(shop.dsn, "status", "--json"))
        assert (status["last_action"] in {"DIFFERENTIAL", "NO_DATA"}, status["errors"]) == (True, 0)
        assert 0 <= status["staleness"] < 300

        process.send_signal(signal.SIGTERM)
        stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert stderr.endswith("waiting for running refreshes\n")
    assert "Traceback" not in stderr
    assert conn.execute("SELECT count(*) FROM pgtrickle.pgt_services").fetchone() == (0,)


@contextmanager
def service(shop: TestDatabase, conn: psycopg.Connection) -> Iterator[subprocess.Popen[str]]:
    """`pgtrickle run`, once it is registered in the catalog."""
    process = subprocess.Popen(
        [EXECUTABLE, "run", "--http", "", "--database", conn.info.dbname],
        env=environment(shop.dsn),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while conn.execute("SELECT count(*) FROM pgtrickle.pgt_services").fetchone() == (0,):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def equal(conn: psycopg.Connection, name: str, query: str) -> bool:
    stored = conn.execute(f"TABLE {name}".encode()).fetchall()
    return sorted(stored) == sorted(conn.execute(query.encode()).fetchall())


def test_ctrl_c_while_spark_starts_is_quiet(shop: TestDatabase, conn: psycopg.Connection) -> None:
    succeed(shop.dsn, "create", "revenue", REVENUE, "--no-init")
    process = subprocess.Popen(
        [EXECUTABLE, "refresh", "revenue"], env=environment(shop.dsn), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith(STARTING)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=60)[1]
    assert (process.returncode, stderr.strip()) == (130, "interrupted")
    assert conn.execute("SELECT claimed_by, consecutive_errors, last_error FROM pgtrickle.pgt_stream_tables").fetchone() == (
        None, 0, None,
    )  # fmt: skip
    history = json.loads(succeed(shop.dsn, "history", "revenue", "--json"))
    assert [(refresh["status"], refresh["error"]) for refresh in history] == [("FAILED", "interrupted")]


def test_refresh_all_names_the_stream_tables_it_skips(shop: TestDatabase) -> None:
    succeed(shop.dsn, "create", "revenue", REVENUE, "--no-init")
    succeed(shop.dsn, "alter", "revenue", "--status", "SUSPENDED")
    refreshed = cli(shop.dsn, "refresh", "--all")
    assert (refreshed.returncode, refreshed.stderr) == (0, "suspended, not refreshed: public.revenue\n")


def test_ctrl_c_releases_the_claim(shop: TestDatabase, conn: psycopg.Connection) -> None:
    succeed(shop.dsn, "create", "revenue", REVENUE, "--no-init")
    with psycopg.connect(shop.direct_dsn) as blocker:
        blocker.execute("LOCK TABLE orders")  # the refresh has claimed the stream table and waits to read
        process = subprocess.Popen(
            [EXECUTABLE, "refresh", "revenue"], env=environment(shop.dsn), stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 60
        while conn.execute("SELECT claimed_by FROM pgtrickle.pgt_stream_tables").fetchone() == (None,):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        stderr = process.communicate(timeout=60)[1]
    assert (process.returncode, stderr.strip()) == (130, "interrupted")
    assert conn.execute("SELECT claimed_by FROM pgtrickle.pgt_stream_tables").fetchone() == (None,)
