"""Failing refreshes in a service: which are retried, how often, and which events are sent."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

import pgtrickle
from pgtrickle.catalog.query_files import load_query
from tests.support.database import APP_ROLE, TestDatabase
from tests.support.service import fresh, running_service, until

Connection = psycopg.Connection[Any]


@pytest.fixture
def shop(database: TestDatabase, conn: Connection) -> Connection:
    with pgtrickle.connect(database.dsn) as db:
        db.install()
    conn.execute("CREATE TABLE item (id int PRIMARY KEY, grp int)")
    conn.execute("INSERT INTO item SELECT i, i % 5 FROM generate_series(1, 20000) AS i")
    conn.execute("SELECT pgtrickle.set('pg_trickle.max_consecutive_errors', '2')")
    return conn


def create(conn: Connection, name: str, query: str) -> None:
    conn.execute("SELECT pgtrickle.create_stream_table(%s, %s, '100ms')", (name, query))


def state(conn: Connection, name: str, column: str = "status") -> Any:
    query = sql.SQL("SELECT {} FROM pgtrickle.pgt_stream_tables WHERE pgt_name = %s").format(sql.Identifier(column))
    row = conn.execute(query, (name,)).fetchone()
    assert row is not None
    return row[0]


def events(conn: Connection, name: str) -> list[tuple[str, str | None, str | None]]:
    rows = conn.execute(
        "SELECT event, payload ->> 'kind', payload ->> 'sqlstate' FROM pgtrickle.events()"
        " WHERE payload ->> 'stream_table' = %s AND event <> 'refresh_completed' ORDER BY at",
        (f"public.{name}",),
    )
    return list(rows)


def test_permanent_errors_suspend_the_stream_table(database: TestDatabase, shop: Connection) -> None:
    """A limit in the server's configuration, and a right that a function of the query lacks."""
    with psycopg.connect(database.superuser_dsn, autocommit=True) as superuser:
        for setting in ("temp_file_limit = '64kB'", "work_mem = '64kB'"):
            alter = sql.SQL("ALTER ROLE {} IN DATABASE {} SET {}")
            superuser.execute(alter.format(sql.Identifier(APP_ROLE), sql.Identifier(database.name), sql.SQL(setting)))
        superuser.execute("CREATE TABLE secret ()")
    shop.execute(
        "CREATE FUNCTION look(id int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS"
        " 'BEGIN PERFORM FROM public.secret; RETURN id; END'"
    )
    create(shop, "sorted", "SELECT id, row_number() OVER (ORDER BY md5(id::text)) AS place FROM item")
    create(shop, "looked", "SELECT look(id) AS id FROM item WHERE id < 10")
    create(shop, "healthy", "SELECT grp, count(*) AS n FROM item GROUP BY grp")
    expected = {"sorted": ("limit", "53400"), "looked": ("privilege", "42501")}
    with running_service(database.dsn, database.name):
        for name in expected:
            until(lambda name=name: state(shop, name) == "SUSPENDED", f"suspension of {name}")  # type: ignore[misc]
        fresh(shop, "healthy")
        # A request for a suspended stream table gets an answer and sends no further event.
        for name, (kind, sqlstate) in expected.items():
            with pytest.raises(psycopg.errors.ExternalRoutineException):
                fresh(shop, name)
            assert events(shop, name) == [("refresh_failed", kind, sqlstate), ("auto_suspended", kind, sqlstate)]
            found = shop.execute("SELECT kind, remedy FROM pgtrickle.diagnose_errors(%s) LIMIT 1", (name,)).fetchone()
            assert found is not None
            assert found[0] == kind
            assert f"Then SELECT pgtrickle.resume_stream_table('public.{name}');" in found[1]
    assert "temp_file_limit" in state(shop, "sorted", "status_reason")


def test_temporary_errors_are_retried_after_growing_pauses_and_reported_once(
    database: TestDatabase, shop: Connection
) -> None:
    """A full disk, according to PostgreSQL's error code."""
    room = "CREATE OR REPLACE FUNCTION room(id int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS {}"
    full = "'BEGIN RAISE EXCEPTION ''could not extend file'' USING ERRCODE = ''53100''; END'"
    shop.execute(room.format("'BEGIN RETURN id; END'").encode())
    create(shop, "rooms", "SELECT room(id) AS id FROM item WHERE id < 10")
    with running_service(database.dsn, database.name):
        fresh(shop, "rooms")
        shop.execute(room.format(full).encode())
        shop.execute("DELETE FROM item WHERE id = 1")
        until(lambda: state(shop, "rooms", "consecutive_errors") >= 3, "three failures")
        pause = "SELECT extract(epoch FROM next_due - failed_at) FROM pgtrickle.pgt_stream_tables"
        row = shop.execute(pause.encode()).fetchone()
        assert row is not None
        assert row[0] >= 3.9, "between 4 and 8 seconds after three failures"
        assert state(shop, "rooms") == "ACTIVE"
        assert state(shop, "rooms", "counted_errors") == 0
        with pytest.raises(psycopg.errors.ExternalRoutineException, match="could not extend file"):
            fresh(shop, "rooms")
        assert events(shop, "rooms") == [("refresh_failed", "disk", "53100")]
        row = shop.execute("SELECT remedy FROM pgtrickle.diagnose_errors('rooms') LIMIT 1").fetchone()
        assert row is not None
        assert "Free space" in row[0]
        assert "resume_stream_table" not in row[0]
        check = "SELECT detail FROM pgtrickle.health_check() WHERE check_name = 'failing'"
        assert "could not extend file" in str(shop.execute(check.encode()).fetchone())
        shop.execute(room.format("'BEGIN RETURN id; END'").encode())
        fresh(shop, "rooms")
        assert state(shop, "rooms", "consecutive_errors") == 0
        recovered = ("refresh_recovered", None, None)
        until(lambda: events(shop, "rooms") == [("refresh_failed", "disk", "53100"), recovered], "the event")


def test_a_request_does_not_shorten_the_pause_of_one_that_failed_after_it(shop: Connection) -> None:
    create(shop, "counts", "SELECT grp, count(*) AS n FROM item GROUP BY grp")
    shop.execute("SELECT pgtrickle.manual_refresh('counts')")
    shop.execute(
        "UPDATE pgtrickle.pgt_stream_tables SET consecutive_errors = 1, failed_at = clock_timestamp(),"
        " next_due = clock_timestamp() + interval '1 hour'"
    )
    nothing: list[Any] = []
    parameters = {
        "service": uuid4(),
        "ahead": timedelta(seconds=1),
        "small_rows": 1,
        "databases": nothing,
        "names": nothing,
        "xids": nothing,
    }

    def is_due() -> bool:
        return bool(shop.execute(load_query("tick"), parameters).fetchall())

    assert not is_due()
    shop.execute("SELECT pgtrickle.manual_refresh('counts')")
    assert is_due(), "somebody asks again"
    shop.execute("UPDATE pgtrickle.pgt_stream_tables SET failed_at = clock_timestamp()")
    assert not is_due()
    shop.execute("UPDATE pgtrickle.pgt_stream_tables SET next_due = clock_timestamp()")
    assert is_due(), "the pause is over"


def test_a_lost_worker_postpones_its_stream_tables(shop: Connection) -> None:
    """A stream table whose refresh ends the connection must not do so at every tick."""
    for name in ("ended", "done", "failed", "bystander"):
        create(shop, name, "SELECT grp, count(*) AS n FROM item GROUP BY grp")
    shop.execute("UPDATE pgtrickle.pgt_stream_tables SET consecutive_errors = 3 WHERE pgt_name = 'ended'")
    row = shop.execute(
        "INSERT INTO pgtrickle.pgt_jobs (service_id, kind, pgt_ids, status, started_at) SELECT gen_random_uuid(), 'FUSED',"
        " array_agg(pgt_id), 'RUNNING', clock_timestamp() FROM pgtrickle.pgt_stream_tables WHERE pgt_name <> 'bystander'"
        " RETURNING job_id"
    ).fetchone()
    assert row is not None
    # Two of them were over before: their rows say what became of them.
    shop.execute("UPDATE pgtrickle.pgt_stream_tables SET data_timestamp = clock_timestamp() WHERE pgt_name = 'done'")
    shop.execute("UPDATE pgtrickle.pgt_stream_tables SET failed_at = clock_timestamp() WHERE pgt_name = 'failed'")
    lost = {"jobs": [row[0]], "errors": ["server closed the connection"], "kinds": ["connection"], "longest": 60.0}
    for _ in range(2):  # the second finds nothing
        shop.execute(load_query("lost"), lost)
    job = shop.execute("SELECT status, error FROM pgtrickle.pgt_jobs").fetchone()
    assert job == ("FAILED", "server closed the connection")
    put_off = shop.execute(
        "SELECT pgt_name, consecutive_errors, counted_errors, error_kind, last_error,"
        " next_due - failed_at BETWEEN interval '7.9 s' AND interval '16.1 s'"
        " FROM pgtrickle.pgt_stream_tables WHERE next_due > '-infinity'"
    ).fetchall()
    assert put_off == [("ended", 4, 0, "connection", "server closed the connection", True)]
