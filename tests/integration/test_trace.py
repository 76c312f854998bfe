"""A refresh that reads one plain database runs no code of other sites."""

from __future__ import annotations

import psycopg
import pytest

import pgtrickle
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query
from tests.support.trace import Trace, traced

QUERY = "SELECT o.id, c.name FROM orders AS o JOIN customer AS c ON c.id = o.customer"
NOT_IN_USE = (
    "sites/remote/",
    "sites/citus/",
    "sites/outside.py",
    "sites/shared_cut.py",
    "sites/sets.py",
    "refresh/apply/citus_tables.py",
    "refresh/compute/large.py",
    "refresh/fetch/brokered.py",
    "refresh/fetch/helper_process.py",
)


def outside(trace: Trace) -> dict[str, int]:
    return {module: number for module, number in trace.calls.items() if module.startswith(NOT_IN_USE)}


def test_a_plain_refresh_touches_no_other_site(
    database: TestDatabase, conn: psycopg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    conn.execute("CREATE TABLE customer (id int PRIMARY KEY, name text)")
    conn.execute("CREATE TABLE orders (id int PRIMARY KEY, customer int)")
    conn.execute("INSERT INTO customer SELECT i, 'c' || i FROM generate_series(1, 9) AS i")
    conn.execute("INSERT INTO orders SELECT i, i % 9 + 1 FROM generate_series(1, 30) AS i")
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        db.create_stream_table("named", QUERY)
        for name in ("new", "newer"):  # the second time with a cached plan
            conn.execute("UPDATE customer SET name = %s WHERE id = 3", (name,))
            with traced() as trace:
                (result,) = db.refresh("named")
    assert result.action == "DIFFERENTIAL"
    assert_equal_to_query(conn, "named", QUERY)
    with capsys.disabled():
        print(f"\n{trace}")
    assert not outside(trace)
    assert {"refresh/pipeline.py", "sites/home_only.py"} <= trace.calls.keys(), "the trace sees what runs"
