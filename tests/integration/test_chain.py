"""Stream tables that read stream tables: one call refreshes a whole chain, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import pgtrickle
from pgtrickle.errors import PgtrickleError
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query

Connection = psycopg.Connection[Any]

PAID = "SELECT id, region, amount FROM orders WHERE paid"
TOTALS = "SELECT region, count(*) AS n, sum(amount) AS total FROM paid GROUP BY region"
LARGE = "SELECT region, total FROM totals WHERE total > 100"
CHAIN = {"paid": PAID, "totals": TOTALS, "large": LARGE}


@pytest.fixture
def db(database: TestDatabase, conn: Connection) -> Iterator[pgtrickle.Database]:
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        conn.execute("CREATE TABLE orders (id int PRIMARY KEY, region text, amount numeric(10, 2), paid boolean)")
        conn.execute("INSERT INTO orders SELECT i, 'r' || i % 4, i, i % 3 > 0 FROM generate_series(1, 60) AS i")
        yield db


def _assert_exact(conn: Connection, queries: dict[str, str]) -> None:
    for name, query in queries.items():
        assert_equal_to_query(conn, name, query)


def test_three_levels_are_refreshed_in_one_call(db: pgtrickle.Database, conn: Connection) -> None:
    for name, query in CHAIN.items():
        db.create_stream_table(name, query)
    _assert_exact(conn, CHAIN)
    for statement in (
        "UPDATE orders SET paid = NOT paid WHERE id % 5 = 0",
        "DELETE FROM orders WHERE region = 'r1'",
        "INSERT INTO orders SELECT i, 'r1', i, true FROM generate_series(100, 110) AS i",
        "UPDATE orders SET region = 'r9', amount = amount / 10 WHERE id < 20",
    ):
        conn.execute(statement.encode())
        results = {result.name: result.action for result in db.refresh_all()}
        _assert_exact(conn, CHAIN)
        assert set(results.values()) == {"DIFFERENTIAL"}, results
    # What the chain says about the base table, without the stream tables between.
    assert_equal_to_query(
        conn,
        "large",
        "SELECT region, sum(amount) AS total FROM orders WHERE paid GROUP BY region HAVING sum(amount) > 100",
    )


def test_the_order_of_the_names_does_not_matter(db: pgtrickle.Database, conn: Connection) -> None:
    for name, query in CHAIN.items():
        db.create_stream_table(name, query)
    conn.execute("UPDATE orders SET amount = amount + 7")
    results = db.refresh(["large", "paid", "totals"])
    assert [result.name.rpartition(".")[2] for result in results] == ["large", "paid", "totals"]
    _assert_exact(conn, CHAIN)


def test_a_reader_refreshed_alone_matches_the_contents_of_its_source(db: pgtrickle.Database, conn: Connection) -> None:
    for name, query in CHAIN.items():
        db.create_stream_table(name, query)
    conn.execute("DELETE FROM orders WHERE id % 2 = 0")
    db.refresh("totals")  # paid still holds its former rows, and the query reads paid
    assert_equal_to_query(conn, "totals", TOTALS)
    db.refresh("paid")
    db.refresh("totals")
    db.refresh("large")
    _assert_exact(conn, CHAIN)


def test_a_diamond_is_exact(db: pgtrickle.Database, conn: Connection) -> None:
    queries = {
        "paid": PAID,
        "sums": "SELECT region, sum(amount) AS total FROM paid GROUP BY region",
        "extremes": "SELECT region, min(amount) AS low, max(amount) AS high FROM paid GROUP BY region",
        "joined": "SELECT s.region, s.total, e.low, e.high FROM sums AS s JOIN extremes AS e ON e.region = s.region",
    }
    for name, query in queries.items():
        db.create_stream_table(name, query)
    _assert_exact(conn, queries)
    for statement in (
        "UPDATE orders SET amount = 500 WHERE id = 7",
        "DELETE FROM orders WHERE amount = (SELECT max(amount) FROM orders)",
        "UPDATE orders SET region = NULL WHERE id % 10 = 1",
        "DELETE FROM orders",
        "INSERT INTO orders VALUES (1, 'r1', 3, true), (2, 'r1', 4, true), (3, 'r2', 5, false)",
    ):
        conn.execute(statement.encode())
        db.refresh_all()
        _assert_exact(conn, queries)


def test_a_truncated_base_table_empties_the_chain(db: pgtrickle.Database, conn: Connection) -> None:
    for name, query in CHAIN.items():
        db.create_stream_table(name, query)
    conn.execute("TRUNCATE orders")
    results = {result.name.rpartition(".")[2]: result for result in db.refresh_all()}
    _assert_exact(conn, CHAIN)
    assert results["paid"].action == "REINITIALIZE"
    assert "truncated" in (results["paid"].reason or "")
    conn.execute("INSERT INTO orders VALUES (1, 'r1', 300, true)")
    db.refresh_all()
    _assert_exact(conn, CHAIN)
    assert conn.execute("SELECT * FROM large").fetchall() != []


def test_a_stream_table_with_readers_is_not_dropped_without_cascade(db: pgtrickle.Database, conn: Connection) -> None:
    for name, query in CHAIN.items():
        db.create_stream_table(name, query, initialize=False)
    with pytest.raises(PgtrickleError, match="totals"):
        db.drop_stream_table("paid")
    assert len(db.stream_tables()) == 3
    db.drop_stream_table("paid", cascade=True)
    assert db.stream_tables() == []
    assert conn.execute("SELECT to_regclass('paid'), to_regclass('totals'), to_regclass('large')").fetchone() == (
        None,
        None,
        None,
    )
    conn.execute("INSERT INTO orders VALUES (1000, 'r1', 1, true)")  # nothing of the capture is left in the way
