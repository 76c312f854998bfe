"""Large numbers of changes are read in a helper process. In these tests any number is large."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psycopg
import pytest

import pgtrickle
from pgtrickle.refresh.fetch.helper_process import HelperProcesses
from tests.support.corpus import SCHEMA_SQL, load_corpus
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query
from tests.support.oracle_rounds import create_corpus, stored
from tests.support.workload import Workload

SEED = 20261117


@pytest.fixture
def helpers() -> Iterator[HelperProcesses]:
    processes = HelperProcesses(many=-1)
    yield processes
    processes.close()


@pytest.fixture
def db(database: TestDatabase, helpers: HelperProcesses) -> Iterator[pgtrickle.Database]:
    with pgtrickle.connect(database.dsn) as connected:
        connected.engine.reading.helpers = helpers
        yield connected


@pytest.fixture
def items(db: pgtrickle.Database, conn: psycopg.Connection) -> str:
    """A stream table over one that has many changes."""
    db.install()
    conn.execute("CREATE TABLE item (id int PRIMARY KEY, kind int, price int)")
    query = "SELECT kind, count(*) AS n, sum(100 / price) AS parts FROM item GROUP BY kind"
    db.create_stream_table("items", query)
    conn.execute("INSERT INTO item SELECT i, i % 7, 1 + i % 5 FROM generate_series(1, 1000) i")
    return query


def process_of(helpers: HelperProcesses) -> subprocess.Popen[bytes]:
    (process,) = helpers._idle
    return process


def test_a_corpus_read_in_a_helper_process_is_exact(
    db: pgtrickle.Database, conn: psycopg.Connection, helpers: HelperProcesses
) -> None:
    print(f"seed {SEED}")
    queries = [query for query in load_corpus() if query.mode == "DIFFERENTIAL"][::10]
    workload = Workload(SEED)
    conn.execute(SCHEMA_SQL)
    workload.load(conn)
    create_corpus(db, conn, queries, "auto")
    db.refresh([stored(query) for query in queries])
    for number in (1, 2):
        workload.round(conn, number)
        db.refresh([stored(query) for query in queries])
        assert process_of(helpers).poll() is None
        for query in queries:
            assert_equal_to_query(conn, stored(query), query.sql, query.by_value)


def test_a_killed_helper_process_is_replaced(
    db: pgtrickle.Database, conn: psycopg.Connection, helpers: HelperProcesses, items: str
) -> None:
    db.refresh(["items"])
    first = process_of(helpers)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    conn.execute("UPDATE item SET kind = 3 WHERE id < 100")
    assert db.refresh(["items"])[0].action == "DIFFERENTIAL"
    assert process_of(helpers).pid != first.pid
    assert_equal_to_query(conn, "items", items)


def test_without_a_helper_process_changes_are_read_locally(
    db: pgtrickle.Database,
    conn: psycopg.Connection,
    helpers: HelperProcesses,
    items: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert db.refresh(["items"])[0].action == "DIFFERENTIAL"
    assert not helpers._idle
    assert_equal_to_query(conn, "items", items)


def test_an_error_in_the_helper_process_is_raised_unchanged(
    db: pgtrickle.Database, conn: psycopg.Connection, helpers: HelperProcesses, items: str
) -> None:
    conn.execute("INSERT INTO item VALUES (5000, 1, 0)")
    with pytest.raises(psycopg.errors.DivisionByZero):
        db.refresh(["items"])
    process_of(helpers)
    conn.execute("DELETE FROM item WHERE id = 5000")
    db.refresh(["items"])
    assert_equal_to_query(conn, "items", items)
