"""A stream table that cannot be refreshed does not prevent refreshes of others, and its failure is reported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

import pgtrickle
from pgtrickle.cli.main import cli
from pgtrickle.errors import RefreshError, RefreshesFailedError
from pgtrickle.refresh.compute import computing, spark_jobs
from pgtrickle.refresh.compute.shared_text import Input
from pgtrickle.refresh.progress import Progress
from pgtrickle.refresh.stages import Claimed, Fetched
from pgtrickle.sites.protocol import Sites
from tests.support.database import TestDatabase

FAILING = {"public.quotients", "public.remainders"}


@pytest.fixture
def db(database: TestDatabase, conn: psycopg.Connection) -> Iterator[pgtrickle.Database]:
    conn.execute("CREATE TABLE numbers (id int PRIMARY KEY, n int)")
    conn.execute("CREATE TABLE names (id int PRIMARY KEY, name text)")
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        db.create_stream_table("quotients", "SELECT id, 100 / n AS q FROM numbers")
        db.create_stream_table("remainders", "SELECT id, 100 % n AS q FROM numbers")
        db.create_stream_table("named", "SELECT id, upper(name) AS name FROM names")
        db.create_stream_table("counted", "SELECT name, count(*) AS n FROM named GROUP BY name")
        db.create_stream_table("pairs", "SELECT n.id, n.name, q.q FROM named n LEFT JOIN quotients q ON q.id = n.id")
        yield db


def test_everything_refreshable_is_refreshed_and_the_error_names_the_failures(
    db: pgtrickle.Database, conn: psycopg.Connection, database: TestDatabase
) -> None:
    conn.execute("INSERT INTO numbers VALUES (1, 0)")
    conn.execute("INSERT INTO names VALUES (1, 'a')")
    with pytest.raises(RefreshesFailedError, match="2 of 5 stream tables") as caught:
        db.refresh_all()
    assert set(caught.value.failures) == FAILING
    assert all(f"{name}: division by zero" in caught.value.message for name in FAILING)
    assert conn.execute("SELECT name, n FROM counted").fetchall() == [("A", 1)]
    assert conn.execute("SELECT id, name, q FROM pairs").fetchall() == [(1, "A", None)]

    status = {row.name: row.status for row in db.status()}
    assert {name for name, state in status.items() if state == "ERROR"} == FAILING
    assert {name for name, state in status.items() if state == "ACTIVE"} == set(status) - FAILING
    assert {table.name for table in db.stream_tables() if table.status == "ERROR"} == FAILING
    health = conn.execute("SELECT active_count, error_count FROM pgtrickle.health_summary()").fetchone()
    assert health == (3, 2)
    (detail,) = conn.execute("SELECT detail FROM pgtrickle.health_check() WHERE check_name = 'failing'").fetchone() or (
        "",
    )
    assert all(name in detail for name in FAILING)

    conn.execute("INSERT INTO names VALUES (2, 'b')")
    outcome = CliRunner().invoke(cli, ["refresh", "--all", "--json", "--dsn", database.dsn])
    assert isinstance(outcome.exception, RefreshesFailedError)  # exit code 1
    assert {row["name"] for row in json.loads(outcome.stdout)} == set(status) - FAILING
    shown = CliRunner().invoke(cli, ["status", "--dsn", database.dsn]).stdout.splitlines()
    assert all("ERROR" in line for line in shown if any(name in line for name in FAILING))
    assert conn.execute("SELECT count(*) FROM counted").fetchone() == (2,)

    conn.execute("UPDATE numbers SET n = 1")
    db.refresh_all()
    assert {row.status for row in db.status()} == {"ACTIVE"}


def test_a_level_that_fails_as_a_whole_does_not_stop_the_next(
    db: pgtrickle.Database, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.execute("INSERT INTO names VALUES (1, 'a')")
    conn.execute("INSERT INTO numbers VALUES (1, 5)")
    read = db.engine.reading.read

    def broken(tables: Sequence[Claimed], sites: Sites, progress: Progress) -> list[Fetched]:
        if any(table.row.pgt_name == "quotients" for table in tables):
            raise psycopg.errors.IoError("the disk is not well")
        return read(tables, sites, progress)

    monkeypatch.setattr(db.engine.reading, "read", broken)
    with pytest.raises(RefreshesFailedError, match=r"3 of 5 .*public.named: the disk is not well"):
        db.refresh_all()
    assert {row.name: row.last_action for row in db.status()}["public.counted"] == "NO_DATA"
    assert {row.name: row.status for row in db.status()}["public.quotients"] == "ERROR"  # though nobody counts it


def test_a_spark_failure_does_not_affect_other_levels(
    db: pgtrickle.Database, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it is the only one of its level."""
    conn.execute("INSERT INTO names VALUES (1, 'a')")
    run = spark_jobs.run_jobs
    calls: list[int] = []

    def failing(jobs: list[Input]) -> list[Any]:
        calls.append(len(jobs))
        if len(calls) == 1:
            raise RefreshError("Spark could not compute the change: no memory")
        return list(run(jobs))

    monkeypatch.setattr(computing, "run_jobs", failing)
    with pytest.raises(RefreshError, match=r"public.named: Spark could not"):
        db.refresh(["named", "counted"])
    assert db.history("counted")[0]["action"] == "NO_DATA"


def test_a_stream_table_refreshed_by_another_process_is_skipped(
    db: pgtrickle.Database, conn: psycopg.Connection, database: TestDatabase
) -> None:
    conn.execute("INSERT INTO names VALUES (1, 'a')")
    with pgtrickle.connect(database.dsn) as other:
        other.engine.claim([db.id_of("quotients")], all_or_none=True)
        with pytest.raises(
            pgtrickle.errors.RefreshConflictError, match=r"1 of 5 .*public.quotients is being refreshed"
        ):
            db.refresh_all()
    assert conn.execute("SELECT name, n FROM counted").fetchall() == [("A", 1)]
    assert {row.status for row in db.status()} == {"ACTIVE"}
