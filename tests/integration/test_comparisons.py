"""Values of two types or collations are compared as in PostgreSQL, in every part of a query."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from tests.support.comparisons import ALIKE, OTHER, TYPES_SQL, VALUES, Tried, comparable_pairs, try_pair
from tests.support.database import TestDatabase, fresh_database
from tests.support.oracle import assert_equal_to_query

# PostgreSQL casts one side, both sides, or has an operator for both.
PARTS = 14  # of all pairs, to be tried side by side
SAMPLE = (("text", "character(5)", "auto"), ("integer", "numeric", "spark"), ("real", "double precision", "auto"))


@pytest.fixture
def db(database: TestDatabase, conn: psycopg.Connection[Any]) -> Iterator[pgtrickle.Database]:
    with pgtrickle.connect(database.dsn) as opened:
        opened.install()
        conn.execute(TYPES_SQL)
        yield opened


@pytest.mark.parametrize(("left", "right", "placement"), SAMPLE)
def test_two_types_compare_as_in_postgresql(
    conn: psycopg.Connection[Any], db: pgtrickle.Database, left: str, right: str, placement: str
) -> None:
    tried = try_pair(conn, db, left, right, placements=(placement,))
    assert not tried.differences, "\n".join(tried.differences)
    assert tried.modes["DIFFERENTIAL"] >= 15, tried.modes


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_all_pairs_of_types_compare_as_in_postgresql(
    conn: psycopg.Connection[Any], db: pgtrickle.Database, part: int
) -> None:
    pairs = comparable_pairs(conn)[part::PARTS]
    total = Tried()
    for left, right in pairs:
        total += try_pair(conn, db, left, right)
    print(f"{len(pairs)} pairs, {total.exact} stream tables exact, {total.modes}, {total.refused} not for PostgreSQL")
    assert not total.differences, "\n".join(total.differences)


@pytest.fixture
def other(database: TestDatabase, server: EmbeddedServer, db: pgtrickle.Database) -> Iterator[psycopg.Connection[Any]]:
    """A second database with the same types, registered in the first one."""
    with (
        fresh_database(server, "comparisons_other") as second,
        pgtrickle.connect(second.dsn) as source,
        psycopg.connect(second.direct_dsn, autocommit=True) as there,
    ):
        source.install()
        there.execute(TYPES_SQL)
        db.add_database(OTHER, second.dsn)
        yield there


def test_types_of_two_databases_compare_as_in_postgresql(
    conn: psycopg.Connection[Any], db: pgtrickle.Database, other: psycopg.Connection[Any]
) -> None:
    tried = try_pair(conn, db, "text", "character(5)", placements=("auto",), there=other)
    assert not tried.differences, "\n".join(tried.differences)
    assert tried.modes["DIFFERENTIAL"] >= 15, (tried.modes, tried.reasons)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_all_pairs_of_types_of_two_databases_compare_as_in_postgresql(
    conn: psycopg.Connection[Any], db: pgtrickle.Database, other: psycopg.Connection[Any], part: int
) -> None:
    pairs = comparable_pairs(conn)[part::PARTS]
    total = Tried()
    for left, right in pairs:
        total += try_pair(conn, db, left, right, placements=("auto",), there=other)
    print(f"{len(pairs)} pairs, {total.exact} stream tables exact, {total.modes}, {total.refused} not for PostgreSQL")
    print("\n".join(sorted(total.reasons)))
    assert not total.differences, "\n".join(total.differences)


def test_a_type_that_is_grouped_by_its_text(conn: psycopg.Connection[Any], db: pgtrickle.Database) -> None:
    places = {name: ALIKE[name] for name in ("distinct", "grouped_max", "on")}
    tried = try_pair(conn, db, "cidr", "cidr", placements=("auto",), places=places)
    assert not tried.differences, "\n".join(tried.differences)


@pytest.mark.long
@pytest.mark.parametrize("placement", ["auto", "spark"])
def test_equality_of_every_type_is_that_of_postgresql_everywhere(
    conn: psycopg.Connection[Any], db: pgtrickle.Database, placement: str
) -> None:
    """A table of types by place in the query: D for DIFFERENTIAL, F for FULL, - if PostgreSQL has no such query.

    With ICU: `--pg 15`.
    """
    with suppress(psycopg.errors.FeatureNotSupported):
        conn.execute("CREATE COLLATION caseless (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
        VALUES["text COLLATE caseless"] = VALUES["text"]
    print("\n" + " ".join([f"{'type':24}", *ALIKE]))
    differences: list[str] = []
    for type_ in VALUES:
        tried = try_pair(conn, db, type_, type_, placements=(placement,), places=ALIKE)
        differences += tried.differences
        cells = (tried.places[f"{place}_{placement}"][0].center(len(place)) for place in ALIKE)
        print(" ".join([f"{type_:24}", *cells]), flush=True)
    assert not differences, "\n".join(differences)


COLLATED = {
    "distinct_names": "SELECT DISTINCT name FROM people",
    "grouped": "SELECT name, count(*) AS n, sum(id) AS total FROM people GROUP BY name",
    "grouped_anew": "SELECT name, count(*) AS n, max(id) AS last FROM people GROUP BY name",
    "joined": "SELECT p.id, o.item FROM people AS p JOIN orders AS o ON p.name = o.name",
    "joined_plain": "SELECT p.id, o.item FROM people AS p JOIN orders AS o ON p.name = o.plain",
    "joined_using": "SELECT p.id, o.item FROM people AS p JOIN orders AS o USING (name)",
    "joined_by_key": "SELECT n.name, o.item FROM nicknames AS n JOIN orders AS o ON n.name = o.name",
    "spelled": "SELECT p.name AS written, o.plain AS answered FROM people AS p JOIN orders AS o ON p.name = o.plain",
    "left_joined": "SELECT p.id, p.name, o.item FROM people AS p LEFT JOIN orders AS o ON p.name = o.plain",
    "known": "SELECT id FROM people WHERE name IN (SELECT plain FROM orders)",
    "unknown": "SELECT id FROM people WHERE name NOT IN (SELECT plain FROM orders WHERE plain IS NOT NULL)",
    "all_names": "SELECT name FROM people UNION SELECT plain FROM orders",
    "ordered": "SELECT p.id, o.item, p.sorted < o.plain AS before FROM people AS p JOIN orders AS o ON p.id = o.item",
    "explicit": 'SELECT p.id, o.item FROM people AS p JOIN orders AS o ON p.name COLLATE "C" = o.plain',
}


@pytest.mark.pgversions
@pytest.mark.parametrize("placement", ["auto", "spark"])
def test_collations_decide_what_is_equal(database: TestDatabase, conn: psycopg.Connection[Any], placement: str) -> None:
    try:
        conn.execute("CREATE COLLATION caseless (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
    except psycopg.errors.FeatureNotSupported:
        pytest.skip("this PostgreSQL is built without ICU")
    conn.execute("""
        CREATE TABLE people (id integer PRIMARY KEY, name text COLLATE caseless, sorted text COLLATE "en-x-icu");
        CREATE TABLE orders (item integer, name text COLLATE caseless, plain text);
        CREATE TABLE nicknames (name text PRIMARY KEY);
        INSERT INTO people VALUES (1, 'Bob', 'a'), (2, 'bob', 'B'), (3, 'Ann', 'c');
        INSERT INTO orders VALUES (1, 'BOB', 'BOB'), (2, 'ann', 'x');
        INSERT INTO nicknames VALUES ('bob'), ('Bob'), ('ann');
    """)
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        for name, query in COLLATED.items():
            db.create_stream_table(f"st_{name}", query, placement=placement, initialize=False)
        for change in (
            "SELECT",
            "INSERT INTO people VALUES (4, 'BOB', 'A'), (5, 'Eve', 'b'); INSERT INTO orders VALUES (4, 'eve', 'EVE')",
            "UPDATE people SET sorted = 'd' WHERE id = 2; DELETE FROM orders WHERE plain = 'BOB'",  # Bob and BOB had it, too
            "DELETE FROM people WHERE id = 1; INSERT INTO orders VALUES (1, 'BOB', 'BOB'), (5, 'bOB', 'ann'), (2, NULL, NULL)",
            "UPDATE people SET name = upper(name); DELETE FROM orders WHERE item = 1",
            "DELETE FROM people WHERE name = 'bob'; INSERT INTO nicknames VALUES ('ANN')",
            "INSERT INTO people VALUES (6, 'ZOE', 'z'); INSERT INTO orders VALUES (6, 'x', 'Zoe'), (7, 'x', 'zoe')",
            "DELETE FROM orders WHERE item = 7",  # Zoe remains
        ):
            conn.execute(change.encode())
            results = db.refresh_all()
            # Starting over would make a wrong change good, and hide it.
            assert change == "SELECT" or not any(result.action == "REINITIALIZE" for result in results), results
            for name, query in COLLATED.items():
                shown = (
                    ["name"] if "name" in query.split(" FROM ")[0] and name not in {"left_joined", "spelled"} else []
                )
                assert_equal_to_query(conn, f"st_{name}", query, by_value=shown)


@pytest.mark.parametrize("placement", ["auto", "spark"])
def test_values_are_unchanged_whatever_casts_their_type_has(
    conn: psycopg.Connection[Any], db: pgtrickle.Database, placement: str
) -> None:
    """A user-defined cast from text may not accept the type's own output."""
    conn.execute(
        r"""
        CREATE TYPE shade AS ENUM ('red', 'a"b', 'c\d', '{}', ',', '');
        CREATE TYPE couple AS (a text, b shade);
        CREATE TABLE l (id int PRIMARY KEY, s shade, p couple);
        CREATE TABLE r (n int PRIMARY KEY, s shade);
        CREATE FUNCTION to_shade(text) RETURNS shade LANGUAGE sql IMMUTABLE AS $$ SELECT 'red'::shade $$;
        CREATE FUNCTION to_couple(text) RETURNS couple LANGUAGE sql IMMUTABLE AS $$ SELECT ('x', 'red')::couple $$;
        CREATE CAST (text AS shade) WITH FUNCTION to_shade(text);
        CREATE CAST (text AS couple) WITH FUNCTION to_couple(text);
        INSERT INTO l SELECT n, s, (s || '"\', s)::couple FROM unnest(enum_range(NULL::shade)) WITH ORDINALITY AS v (s, n);
        INSERT INTO l VALUES (100, NULL, NULL);
        INSERT INTO r SELECT id, s FROM l;
        """
    )
    queries = {
        "rows": "SELECT id, s, p FROM l",
        "joined": "SELECT l.id, r.n, l.s FROM l JOIN r ON l.s = r.s",
        "counted": "SELECT s, count(*) AS n FROM l GROUP BY s",
        "last": "SELECT s, max(id) AS last FROM l GROUP BY s",
    }
    for name, query in queries.items():
        db.create_stream_table(name, query, placement=placement, refresh_mode="DIFFERENTIAL")
    for change in (
        "INSERT INTO r SELECT n + 10, s FROM r",
        "DELETE FROM l WHERE id % 2 = 0",
        "INSERT INTO l SELECT id + 10, s, p FROM l",
    ):
        conn.execute(change.encode())
        db.refresh_all()
        for name, query in queries.items():
            assert_equal_to_query(conn, name, query)


@pytest.mark.parametrize("placement", ["auto", "spark"])
def test_days_that_are_missing_or_infinite_are_ordered_as_in_postgresql(
    conn: psycopg.Connection[Any], db: pgtrickle.Database, placement: str
) -> None:
    conn.execute("""
        CREATE TABLE l (id integer PRIMARY KEY, day date, moment timestamp, at timestamptz);
        CREATE TABLE r (n integer PRIMARY KEY, day date, moment timestamp, at timestamptz);
        INSERT INTO l VALUES (1, '2026-01-01', '2026-01-01', '2026-01-01'), (2, NULL, NULL, NULL);
        INSERT INTO r SELECT * FROM l;
    """)
    queries = {
        "ends": "SELECT min(day) AS d0, max(day) AS d1, min(moment) AS m0, max(moment) AS m1, min(at) AS a0 FROM l",
        "ends_of_groups": "SELECT id % 2 AS g, min(day) AS d0, max(moment) AS m1, min(at) AS a0 FROM l GROUP BY id % 2",
        "earlier": "SELECT l.id, r.n FROM l JOIN r ON l.id = r.n AND (l.day < r.day OR l.at < r.at)",
        "not_later": "SELECT l.id, r.n FROM l JOIN r ON l.id % 2 = r.n % 2 AND l.moment <= r.moment",
        "others": "SELECT l.id, r.n FROM l LEFT JOIN r ON l.id % 2 = r.n % 2 AND l.day >= r.day",
    }
    for name, query in queries.items():
        db.create_stream_table(name, query, placement=placement, refresh_mode="DIFFERENTIAL")
    for change in (
        "SELECT",
        "INSERT INTO l VALUES (3, 'infinity', '-infinity', NULL), (4, NULL, 'infinity', '-infinity')",
        "INSERT INTO r VALUES (3, NULL, NULL, 'infinity'), (4, '-infinity', '2026-01-02', NULL), (5, NULL, NULL, NULL)",
        "UPDATE l SET day = NULL, moment = NULL, at = NULL WHERE id = 1; DELETE FROM r WHERE n = 2",
    ):
        conn.execute(change.encode())
        db.refresh_all()
        for name, query in queries.items():
            assert_equal_to_query(conn, name, query)
