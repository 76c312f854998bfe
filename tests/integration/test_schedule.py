"""When stream tables are refreshed: what is due now or soon at a tick, and how long refreshes stretch schedules."""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import pgtrickle
from pgtrickle.service.connection_budget import Budget
from pgtrickle.service.notifications import Waker
from pgtrickle.service.pool import Pool
from pgtrickle.service.scheduler import Scheduler
from pgtrickle.service.settings import read_settings
from pgtrickle.service.tended import Tended
from pgtrickle.service.worker import Workers
from tests.support.database import TestDatabase

Connection = psycopg.Connection[Any]

QUERIES = {
    "totals": "SELECT grp, count(*) AS n FROM item GROUP BY grp",
    "over": "SELECT sum(n) AS n FROM totals",
    "apart": "SELECT id FROM other",
}


@pytest.fixture
def db(database: TestDatabase, conn: Connection) -> Iterator[pgtrickle.Database]:
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        conn.execute("CREATE TABLE item (id int PRIMARY KEY, grp int)")
        conn.execute("CREATE TABLE other (id int PRIMARY KEY)")
        for name, query in QUERIES.items():
            db.create_stream_table(name, query, schedule="1s", initialize=False)
        db.refresh(list(QUERIES))
        conn.execute("SELECT pgtrickle.set('scheduler_interval_ms', '60000')")
        yield db


@pytest.fixture
def scheduler(database: TestDatabase) -> Scheduler:
    """Without a worker, so that submitted units stay visible."""
    return Scheduler(Tended("test", Workers(Budget(database.dsn), database.name, uuid.uuid4())), Pool(0), 30.0)


def due_after(conn: Connection, name: str, seconds: int) -> None:
    conn.execute(
        "UPDATE pgtrickle.pgt_stream_tables SET next_due = clock_timestamp() + make_interval(secs => %s) WHERE pgt_name = %s",
        (seconds, name),
    )


def begun(conn: Connection) -> set[str]:
    rows = conn.execute(
        "SELECT s.pgt_name FROM pgtrickle.pgt_jobs j JOIN pgtrickle.pgt_stream_tables s ON s.pgt_id = ANY (j.pgt_ids)"
    ).fetchall()
    return {name for (name,) in rows}


def test_stream_tables_with_changes_report_when_they_are_due(
    db: pgtrickle.Database, conn: Connection, scheduler: Scheduler
) -> None:
    assert scheduler.tick(conn, read_settings(conn)) == math.inf
    conn.execute("INSERT INTO item VALUES (1, 1)")
    due_after(conn, "totals", 40)
    due_after(conn, "over", 40)
    assert 0 < scheduler.tick(conn, read_settings(conn)) <= 40
    due_after(conn, "totals", 300)  # after the next tick: no matter for this one
    assert scheduler.tick(conn, read_settings(conn)) == math.inf
    assert begun(conn) == set()


def test_readers_of_a_due_stream_table_are_refreshed_with_it(
    db: pgtrickle.Database, conn: Connection, scheduler: Scheduler
) -> None:
    conn.execute("INSERT INTO item VALUES (1, 1)")
    conn.execute("INSERT INTO other VALUES (1)")
    due_after(conn, "totals", 0)
    due_after(conn, "over", 30)
    due_after(conn, "apart", 30)
    assert 0 < scheduler.tick(conn, read_settings(conn)) <= 30
    assert begun(conn) == {"totals", "over"}


def test_a_reader_with_a_long_schedule_is_not_refreshed_with_its_source(
    db: pgtrickle.Database, conn: Connection, scheduler: Scheduler
) -> None:
    conn.execute("INSERT INTO item VALUES (1, 1)")
    due_after(conn, "totals", 0)
    due_after(conn, "over", 300)
    assert scheduler.tick(conn, read_settings(conn)) == math.inf
    assert begun(conn) == {"totals"}


@pytest.mark.parametrize(
    ("every", "least", "most"),
    [("1 microsecond", 8, 8), ("1 hour", 1, 1), ("50 ms", 1.01, 8)],
)
def test_a_schedule_is_stretched_as_far_as_needed(
    db: pgtrickle.Database, conn: Connection, every: str, least: float, most: float
) -> None:
    db.refresh("totals")
    conn.execute("INSERT INTO item VALUES (1, 1)")
    conn.execute("UPDATE pgtrickle.pgt_stream_tables SET every = %s, stretch = 4 WHERE pgt_name = 'totals'", (every,))
    db.refresh("totals")
    row = conn.execute(
        "SELECT stretch, extract(epoch FROM next_due - data_timestamp)::float8, extract(epoch FROM every * stretch)::float8"
        " FROM pgtrickle.pgt_stream_tables WHERE pgt_name = 'totals'"
    ).fetchone()
    assert row is not None
    assert least <= row[0] <= most
    assert row[1] == pytest.approx(row[2], rel=1e-3, abs=1e-5)


def test_a_sleep_ends_early_for_a_thread_and_for_a_notification(conn: Connection) -> None:
    with Waker() as waker:
        threading.Timer(0.05, waker.wake).start()
        assert waker.sleep(conn, 60)
        assert not waker.sleep(conn, 0.01), "it was woken once"
        waker.wake()
        assert waker.sleep(conn, 60), "woken before it fell asleep"
        conn.execute("LISTEN somebody")
        with psycopg.connect(conn.info.dsn, autocommit=True) as other:
            other.execute("NOTIFY somebody")
        assert waker.sleep(conn, 60)
    waker.wake()  # too late, and nobody minds


def test_a_sleep_on_a_lost_connection_ends(conn: Connection) -> None:
    with Waker() as waker, psycopg.connect(conn.info.dsn, autocommit=True) as mine:
        conn.execute("SELECT pg_terminate_backend(%s)", (mine.info.backend_pid,))
        with pytest.raises(psycopg.OperationalError):
            waker.sleep(mine, 60)


def test_intervals_are_computed_with_a_single_lookup_of_the_setting(
    db: pgtrickle.Database, database: TestDatabase
) -> None:
    """With a lookup for each stream table, creating the thousandth took five times as long as the first."""
    for name in QUERIES:
        db.alter_stream_table(name, schedule="calculated")
    with psycopg.connect(database.superuser_dsn) as admin:
        admin.execute("SET track_functions = 'all'")
        admin.execute("SELECT pgtrickle._update_intervals()")
        calls = "SELECT sum(pg_stat_get_xact_function_calls(oid)) FROM pg_proc WHERE proname = '_setting'"
        assert admin.execute(calls).fetchone() == (1,)


def test_a_stream_table_refreshed_with_others_does_not_count_as_slow(db: pgtrickle.Database, conn: Connection) -> None:
    """If the total time counted, each would be slow, and would be refreshed alone from then on."""
    names = [f"many_{i}" for i in range(12)]
    for i, name in enumerate(names):
        db.create_stream_table(name, f"SELECT id, grp + {i} AS grp FROM item WHERE id > {i}", initialize=False)
    db.refresh(names)
    conn.execute("INSERT INTO item SELECT i, i FROM generate_series(1, 50) AS i")
    db.refresh(names)
    row = conn.execute(
        "SELECT sum(own_seconds) <= 1.1 * max(last_seconds), max(own_seconds) < 0.5 * max(last_seconds)"
        " FROM pgtrickle.pgt_stream_tables WHERE pgt_name LIKE 'many%'"
    ).fetchone()
    assert row == (True, True)
