"""One group of no rows, computed on Spark: it has a row although no fragment does."""

from __future__ import annotations

import psycopg

import pgtrickle
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query

# The text of `kind` is its key, too: two forms of one column, with one name.
QUERY = "SELECT count(DISTINCT kind) AS kinds, count(kind) AS n, max(id) AS last FROM item"


def test_a_group_without_rows_keeps_its_row(database: TestDatabase, conn: psycopg.Connection) -> None:
    conn.execute("CREATE TABLE item (id int PRIMARY KEY, kind text)")
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        db.create_stream_table("st", QUERY, placement="spark")
        assert_equal_to_query(conn, "st", QUERY)
        for change in ("INSERT INTO item VALUES (1, 'a'), (2, 'a'), (3, NULL)", "DELETE FROM item"):
            conn.execute(change)
            (result,) = db.refresh("st")
            assert result.action == "DIFFERENTIAL"
            assert_equal_to_query(conn, "st", QUERY)
