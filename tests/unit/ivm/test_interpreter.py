"""The reference interpreter compared with an SQL database, because the tests of the algebra rely on it."""

from __future__ import annotations

import sqlite3
from collections import Counter

import pytest
from hypothesis import given

from pgtrickle.query.plan import Version
from tests.support.evaluation import Row
from tests.support.interpreter import interpret
from tests.support.planning import bind_query
from tests.support.random_queries import TABLES, Case, cases


@pytest.mark.skipif(sqlite3.sqlite_version_info < (3, 39), reason="this SQLite has no FULL JOIN")
@given(cases(nan=False))
def test_a_plan_gives_the_rows_that_sqlite_gives(case: Case) -> None:
    found = {_rounded(row): weight for row, weight in interpret(bind_query(case.query, TABLES)[0], case.states).items()}
    assert found == _sqlite_rows(case)


def _sqlite_rows(case: Case) -> Counter[Row]:
    with sqlite3.connect(":memory:") as conn:
        conn.execute("ATTACH ':memory:' AS shop")
        for relation in TABLES:
            columns = [column.name for column in relation.columns]
            conn.execute(f"CREATE TABLE shop.{relation.name} ({', '.join(columns)})")
            rows = case.states[relation.oid].at(Version.NEW)
            holes = ", ".join("?" * len(columns))
            conn.executemany(f"INSERT INTO shop.{relation.name} VALUES ({holes})", [*Counter(rows).elements()])
        rows = Counter(_rounded(row) for row in conn.execute(case.query).fetchall())
    conn.close()
    return rows


def _rounded(row: Row) -> Row:
    """SQLite's avg is a float."""
    return tuple(value if value is None else round(float(value), 6) for value in row)
