"""Crashes of the process or the server at any step of a refresh: the next refresh is exact."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

import pgtrickle
from pgtrickle.embedded.binaries import ServerVersion
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.errors import RefreshConflictError
from tests.support.database import SERVER_SETTINGS, TestDatabase, fresh_database, prepare_server
from tests.support.killable import RUNNING_JOB, StoppedRefresh, is_dead, stopped_at
from tests.support.oracle import assert_equal_to_query, fetch_multiset

Connection = psycopg.Connection[Any]

QUERIES = {
    "kept": "SELECT id, grp, val FROM item WHERE val > 10",
    "bag": "SELECT grp, val FROM item WHERE grp < 4",
    "matched": "SELECT i.id, l.label FROM item AS i JOIN label AS l ON l.grp = i.grp",
    "totals": "SELECT grp, count(*) AS n, sum(val) AS total FROM item GROUP BY grp",
    "extremes": "SELECT grp, min(val) AS low, max(val) AS high FROM item GROUP BY grp",
}
STEPS = ("cut", "fetch", "spark", "load", "commit", "committed")


def _set_up(conn: Connection, db: pgtrickle.Database) -> None:
    db.install()
    conn.execute("CREATE TABLE item (id int PRIMARY KEY, grp int, val int)")
    conn.execute("CREATE TABLE label (grp int, label text)")
    conn.execute("INSERT INTO item SELECT i, i % 6, i % 40 FROM generate_series(1, 300) AS i")
    conn.execute("INSERT INTO label SELECT i % 6, 'label ' || i % 9 FROM generate_series(1, 15) AS i")
    for name, query in QUERIES.items():
        db.create_stream_table(name, query)


def _change(conn: Connection, n: int) -> None:
    """Changes whose loss or repetition would show: sums, duplicates, minima that disappear."""
    conn.execute("UPDATE item SET val = val + 1 WHERE id %% 7 = %s", [n % 7])
    conn.execute(
        "INSERT INTO item SELECT i, i %% 6, i %% 50 FROM generate_series(%s::int, %s::int) AS i",
        [n * 1000, n * 1000 + 8],
    )
    conn.execute("DELETE FROM item WHERE val = (SELECT min(val) FROM item)")
    conn.execute("INSERT INTO label VALUES (%s, 'new'), (%s, 'new')", [n % 6, n % 6])
    conn.execute("DELETE FROM label WHERE ctid = (SELECT min(ctid) FROM label)")


def _change_much(conn: Connection, n: int) -> None:
    """Enough rows to keep Spark busy for a while."""
    conn.execute(
        "INSERT INTO item SELECT %s::int + i, i %% 6, i %% 90 FROM generate_series(1, 30000) AS i", [n * 1_000_000]
    )


def _expire_claims(conn: Connection) -> None:
    """Expire the lease of the dead process, as the catalog's owner may do."""
    conn.execute("UPDATE pgtrickle.pgt_services SET lease_expires = now() - interval '1 second'")


def _assert_exact(conn: Connection) -> None:
    for name, query in QUERIES.items():
        assert_equal_to_query(conn, name, query)


def _frontiers(conn: Connection) -> list[tuple[Any, ...]]:
    return conn.execute("SELECT pgt_id, frontier FROM pgtrickle.pgt_stream_tables ORDER BY pgt_id").fetchall()


@pytest.fixture(scope="module")
def crash_database(server: EmbeddedServer) -> Iterator[TestDatabase]:
    """One database for all steps: a process that died at one step must not affect the following ones."""
    with fresh_database(server, "crash") as database:
        with pgtrickle.connect(database.dsn) as db, psycopg.connect(database.direct_dsn, autocommit=True) as conn:
            _set_up(conn, db)
        yield database


@pytest.mark.parametrize("step", [*STEPS, RUNNING_JOB])
def test_a_process_killed_at(step: str, crash_database: TestDatabase) -> None:
    number = [*STEPS, RUNNING_JOB].index(step) + 1
    with (
        pgtrickle.connect(crash_database.dsn) as db,
        psycopg.connect(crash_database.direct_dsn, autocommit=True) as conn,
    ):
        _change(conn, number * 10)
        if step == RUNNING_JOB:
            _change_much(conn, number * 10)
        before = {name: fetch_multiset(conn, f"SELECT * FROM {name}") for name in QUERIES}
        frontiers = _frontiers(conn)
        with stopped_at(crash_database.dsn, step, *QUERIES) as child:
            _change(conn, number * 10 + 1)  # writers go on while the refresh stands still
            if step == RUNNING_JOB:
                _kill_in_job(child)
            child.kill()
        _await_no_backend(conn)
        after = {name: fetch_multiset(conn, f"SELECT * FROM {name}") for name in QUERIES}
        if step == "committed":  # of the first stream table; the others had not begun
            assert sum(after[name] != before[name] for name in QUERIES) == 1
            assert sum(new != old for new, old in zip(_frontiers(conn), frontiers, strict=True)) == 1
        else:
            assert after == before
            assert _frontiers(conn) == frontiers
        with pytest.raises(RefreshConflictError):
            db.refresh_all()
        _change(conn, number * 10 + 2)
        _expire_claims(conn)
        actions = {result.action for result in db.refresh_all()}
        _assert_exact(conn)
        assert actions == {"DIFFERENTIAL"}


def _kill_in_job(child: StoppedRefresh) -> None:
    """Kill a child while it is proven that Spark is working, cannot have finished since, and no later step has begun."""
    job = child.frozen_job()
    jvm = psutil.Process(job.jvm)
    assert job.active_tasks > 0
    assert jvm.status() == psutil.STATUS_STOPPED
    assert job.step == "spark"
    child.kill()
    assert is_dead(jvm)


def _await_no_backend(conn: Connection) -> None:
    """Wait until the server has noticed the dead client and rolled back its transaction."""
    conn.execute(
        "DO $$ BEGIN WHILE EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'pgtrickle'"
        " AND datname = current_database() AND state <> 'idle') LOOP PERFORM pg_sleep(0.01);"
        " PERFORM pg_stat_clear_snapshot(); END LOOP; END $$"
    )


def test_a_server_killed_during_the_apply(pg_version: ServerVersion) -> None:
    base = Path(tempfile.mkdtemp(prefix="pgtrickle-crash-"))
    # A server that forgets what was committed would prove nothing.
    settings = SERVER_SETTINGS | {"fsync": "on"}
    try:
        with EmbeddedServer(base / "data", version=pg_version, settings=settings) as server:
            prepare_server(server)
            with fresh_database(server, "crash") as database:
                with (
                    pgtrickle.connect(database.dsn) as db,
                    psycopg.connect(database.direct_dsn, autocommit=True) as conn,
                ):
                    _set_up(conn, db)
                for number, step in enumerate(("load", "commit"), 1):
                    _kill_the_server(server, database, step, number * 10)
    finally:
        shutil.rmtree(base)


def _kill_the_server(server: EmbeddedServer, database: TestDatabase, step: str, number: int) -> None:
    def kill(name: str) -> None:
        if name == step:
            server.kill()

    with psycopg.connect(database.direct_dsn, autocommit=True) as conn:
        _change(conn, number)
        before = {name: fetch_multiset(conn, f"SELECT * FROM {name}") for name in QUERIES}
    with pgtrickle.connect(database.dsn, on_step=kill) as db, pytest.raises(psycopg.OperationalError):
        db.refresh_all()
    assert not server.is_running
    server.start()
    with psycopg.connect(database.direct_dsn, autocommit=True) as conn, pgtrickle.connect(database.dsn) as db:
        assert {name: fetch_multiset(conn, f"SELECT * FROM {name}") for name in QUERIES} == before
        _change(conn, number + 1)
        _expire_claims(conn)
        assert {result.action for result in db.refresh_all()} == {"DIFFERENTIAL"}
        _assert_exact(conn)
