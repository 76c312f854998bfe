"""Changes to views, functions and types that a query uses, and thereby to its result for rows that do not change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import pgtrickle
from pgtrickle.errors import InvalidQueryError, KeyLostError
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query

SETUP = """
    CREATE TYPE mood AS ENUM ('sad', 'fine', 'happy');
    CREATE DOMAIN any_mood AS mood;
    CREATE TYPE weighed AS (mood mood, weight int);
    CREATE TABLE item (id int PRIMARY KEY, val int NOT NULL, mood mood, moods any_mood[], weighed weighed);
    INSERT INTO item SELECT i, i, CASE i % 2 WHEN 0 THEN 'sad' ELSE 'happy' END::mood, '{sad,fine}', ('fine', i)::weighed
    FROM generate_series(1, 50) AS i;
    CREATE VIEW seen AS SELECT id, val FROM item WHERE val > 10;
    CREATE FUNCTION twice(int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT 2 * $1';
    CREATE FUNCTION nearly(int, int) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT abs($1 - $2) < 3';
    CREATE OPERATOR ~~~ (FUNCTION = nearly, LEFTARG = int, RIGHTARG = int);
    CREATE FUNCTION add_to(int, int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT $1 + $2';
    CREATE AGGREGATE total (int) (SFUNC = add_to, STYPE = int, INITCOND = '0');
"""
MORE = "INSERT INTO item SELECT (SELECT max(id) FROM item) + id, val, mood, moods, weighed FROM item WHERE id < 50"
REPLACE = "CREATE OR REPLACE FUNCTION {} LANGUAGE sql IMMUTABLE AS '{}'"
RENAME = "ALTER TYPE mood RENAME VALUE '{}' TO '{}'"
CASES = {
    "view": ("SELECT id, val FROM seen", "CREATE OR REPLACE VIEW seen AS SELECT id, val FROM item WHERE val > 30"),
    "function": (
        "SELECT id, twice(val) AS val FROM item",
        REPLACE.format("twice(int) RETURNS int", "SELECT $1 + $1 + 1"),
    ),
    "operator": (
        "SELECT id FROM item WHERE val ~~~ 40",
        REPLACE.format("nearly(int, int) RETURNS boolean", "SELECT abs($1 - $2) < 7"),
    ),
    "aggregate": (
        "SELECT val % 3 AS g, total(val) AS t FROM item GROUP BY 1",
        REPLACE.format("add_to(int, int) RETURNS int", "SELECT $1 + $2 + 1"),
    ),
    "label as text": ("SELECT id, mood::text AS mood FROM item", RENAME.format("sad", "blue")),
    "label as a constant": ("SELECT id FROM item WHERE mood = 'happy'", RENAME.format("happy", "glad")),
    "label of a group": ("SELECT mood || '!' AS m, count(*) AS n FROM item GROUP BY 1", RENAME.format("sad", "blue")),
    "label in an array of a domain": (
        "SELECT id, array_to_string(moods, ' ') AS m FROM item",
        RENAME.format("fine", "good"),
    ),
    "label in a whole row": ("SELECT id, item::text AS whole FROM item", RENAME.format("fine", "good")),
    "label in a row": ("SELECT id, (weighed).mood::text AS m FROM item", RENAME.format("fine", "good")),
}


@pytest.fixture
def conn(database: TestDatabase) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database.dsn, autocommit=True) as conn:
        conn.execute(SETUP)
        yield conn


@pytest.mark.parametrize("case", CASES)
def test_objects_that_a_query_uses_are_changed(
    database: TestDatabase, conn: psycopg.Connection[Any], case: str
) -> None:
    query, statement = CASES[case]
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        mode = db.create_stream_table("kept", query).effective_mode
        assert_equal_to_query(conn, "kept", query)
        conn.execute(statement.encode())
        query = query.replace("'happy'", "'glad'")
        conn.execute(MORE)
        (done,) = db.refresh("kept")
        assert_equal_to_query(conn, "kept", query)
        assert done.action == "REINITIALIZE"
        assert ("renamed: it was " if "label" in case else "replaced") in str(done.reason)
        conn.execute(MORE)
        (done,) = db.refresh("kept")
        assert_equal_to_query(conn, "kept", query)
        assert done.action == mode


def test_a_new_label_changes_nothing(database: TestDatabase, conn: psycopg.Connection[Any]) -> None:
    query = "SELECT id, mood::text AS mood FROM item"
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        db.create_stream_table("kept", query)
        conn.execute("ALTER TYPE mood ADD VALUE 'elated'")
        conn.execute("UPDATE item SET mood = 'elated' WHERE id = 1")
        (done,) = db.refresh("kept")
        assert_equal_to_query(conn, "kept", query)
        assert done.action == "DIFFERENTIAL"


def test_dropping_the_key_of_a_source_suspends_the_stream_table(
    database: TestDatabase, conn: psycopg.Connection[Any]
) -> None:
    """Its rows would overwrite each other. It continues when the key is back."""
    query = "SELECT id, val FROM item WHERE val > 10"
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        db.create_stream_table("kept", query)
        conn.execute("ALTER TABLE item DROP CONSTRAINT item_pkey")
        conn.execute("INSERT INTO item (id, val) VALUES (20, 99)")
        for _ in range(2):  # resumed too early it is suspended again
            with pytest.raises(
                KeyLostError, match=r"public.kept has the key \(id\), which is no longer one of its query"
            ):
                db.refresh("kept")
            table = db.stream_table("kept")
            assert table.status == "SUSPENDED"
            assert table.status_reason == "public.kept has the key (id), which is no longer one of its query"
            db.alter_stream_table("kept", status="ACTIVE")
        conn.execute("DELETE FROM item WHERE id = 20 AND val = 20")
        conn.execute("ALTER TABLE item ADD PRIMARY KEY (id)")
        db.refresh("kept")
        assert db.stream_table("kept").status == "ACTIVE"
    assert_equal_to_query(conn, "kept", query)


def test_queries_that_depend_on_the_search_path_are_refused_or_explained(
    database: TestDatabase, conn: psycopg.Connection[Any]
) -> None:
    """A refresh has its own search path, because its statements are texts for which others' objects could be better
    matches.
    """
    conn.execute(
        "CREATE SCHEMA store; SET search_path = store, public;"
        " CREATE TABLE price (id int PRIMARY KEY, price int); INSERT INTO price SELECT i, i FROM generate_series(1, 50) AS i;"
        " CREATE FUNCTION half(int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT $1 / 2';"
        " CREATE FUNCTION inlined(int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT half($1)';"
        " CREATE FUNCTION read_price(int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT price FROM price WHERE id = $1';"
        " CREATE FUNCTION price_of(int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS"
        " 'BEGIN RETURN (SELECT price FROM price WHERE id = $1); END'"
    )
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        db.conn.execute("SET search_path = store, public")
        for cast in ("tableoid::regclass", "'price'::regclass", "to_regproc('half')"):
            with pytest.raises(InvalidQueryError, match=r"casts reg\w+ to text, which depends on the search_path"):
                db.create_stream_table("refused", f"SELECT id, {cast}::text AS t FROM item", initialize=False)
        db.create_stream_table(
            "named", "SELECT id, tableoid::regclass AS t, tableoid::regclass = 'item'::regclass AS same FROM item"
        )
        assert_equal_to_query(db.conn, "named", "SELECT id, tableoid::regclass AS t, true AS same FROM item")
        for function in ("inlined", "read_price"):
            with pytest.raises(
                InvalidQueryError, match=r"a function of the query cannot be run: .* does not exist"
            ) as raised:
                db.create_stream_table("refused", f"SELECT id, {function}(val) AS val FROM item")
            assert "SET search_path = store, public;" in (raised.value.hint or "")
        query = "SELECT id, price_of(val) AS val FROM item"
        with pytest.raises(InvalidQueryError, match='cannot be refreshed: relation "price" does not exist') as raised:
            db.create_stream_table("prices", query)
        assert "SET search_path = store, public;" in (raised.value.hint or "")
        assert db.status()[-1].last_error is not None
        conn.execute("ALTER FUNCTION price_of SET search_path = store, public")
        db.refresh("prices")
        assert_equal_to_query(db.conn, "prices", query)
