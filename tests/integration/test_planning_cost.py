"""Queries over many tables: creating and refreshing them takes limited time and does not delay anything else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import pgtrickle
from pgtrickle.errors import NotDifferentiableError
from pgtrickle.query.budget import Budget
from pgtrickle.refresh.planning import job_planner, programs
from tests.support.database import TestDatabase

TABLES = 21


def chain(kind: str, joins: int) -> str:
    tables = "r0" + "".join(f" {kind} JOIN r{i} ON r{i}.id = r{i - 1}.ref" for i in range(1, joins + 1))
    return f"SELECT {', '.join(f'r{i}.kind AS k{i}' for i in range(joins + 1))} FROM {tables}"


LARGE = {"lefts": chain("LEFT", 16), "fulls": chain("FULL", 12), "inners": chain("INNER", 20)}
TOO_MUCH = "more than (600|1000) operators"
RECOMPUTED = (
    "SELECT r0.kind AS a, r1.kind AS b, r2.kind AS c, percentile_disc(0.5) WITHIN GROUP (ORDER BY r5.id) AS middle,"
    " array_agg(r4.id ORDER BY r4.id) AS ids FROM r0"
    + "".join(f" JOIN r{i} ON r{i}.ref = r0.id" for i in range(1, 6))
    + " GROUP BY r0.kind, r1.kind, r2.kind"
)


@pytest.fixture
def db(database: TestDatabase, conn: psycopg.Connection) -> Iterator[pgtrickle.Database]:
    for i in range(TABLES):
        conn.execute(f"CREATE TABLE r{i} (id int PRIMARY KEY, ref int, kind text)")
        conn.execute(f"INSERT INTO r{i} SELECT n, n, 'k' || n % 3 FROM generate_series(1, 5) AS n")
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        yield db


def assert_exact(conn: psycopg.Connection[Any], name: str, query: str) -> None:
    wanted = conn.execute(query.encode())
    assert wanted.description is not None
    columns = ", ".join(column.name for column in wanted.description)
    stored = conn.execute(f"SELECT {columns} FROM {name}".encode()).fetchall()
    assert sorted(stored, key=str) == sorted(wanted.fetchall(), key=str)


def test_many_joins_are_refreshed_in_full_without_affecting_others(
    db: pgtrickle.Database, conn: psycopg.Connection
) -> None:
    db.create_stream_table("small", "SELECT kind, count(*) AS n FROM r0 GROUP BY kind", initialize=False)
    for name, query in LARGE.items():
        with pytest.raises(NotDifferentiableError, match=rf"{name} cannot .* {TOO_MUCH}") as caught:
            db.create_stream_table(name, query, refresh_mode="DIFFERENTIAL")
        assert "AUTO or FULL" in (caught.value.hint or "")
        table = db.create_stream_table(name, query, initialize=False)
        assert table.effective_mode == "FULL"
        assert re.search(TOO_MUCH, table.mode_reason or "")
    db.refresh_all()
    conn.execute("INSERT INTO r0 VALUES (6, 1, 'new')")
    conn.execute("DELETE FROM r3 WHERE id = 2")
    actions = {result.name: result.action for result in db.refresh_all()}
    assert actions == {f"public.{name}": "FULL" for name in LARGE} | {"public.small": "DIFFERENTIAL"}
    for name, query in LARGE.items():
        assert_exact(conn, name, query)
    with pytest.raises(NotDifferentiableError, match="lefts cannot"):
        db.alter_stream_table("lefts", refresh_mode="DIFFERENTIAL")


def test_six_tables_with_a_recomputed_aggregate_are_planned_at_once(
    db: pgtrickle.Database, conn: psycopg.Connection
) -> None:
    db.create_stream_table("small", "SELECT kind, count(*) AS n FROM r0 GROUP BY kind", initialize=False)
    for mode in ("DIFFERENTIAL", "AUTO"):
        db.create_stream_table(f"recomputed_{mode}", RECOMPUTED, refresh_mode=mode, initialize=False)
    db.refresh_all()
    conn.execute("INSERT INTO r0 VALUES (6, 1, 'new')")
    for i in range(1, 6):
        conn.execute(f"INSERT INTO r{i} VALUES (6, 6, 'k1'), (7, 6, 'k2')")
        conn.execute(f"DELETE FROM r{i} WHERE id = {i}")
    assert {result.action for result in db.refresh_all()} == {"DIFFERENTIAL"}
    for mode in ("differential", "auto"):
        assert_exact(conn, f"recomputed_{mode}", RECOMPUTED)


def test_a_plan_over_budget_at_a_refresh_affects_only_its_stream_table(
    db: pgtrickle.Database, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that was not reached at creation, as after a change of releases."""
    queries = {"auto": RECOMPUTED, "always": RECOMPUTED, "small": "SELECT id, kind FROM r0"}
    db.create_stream_table("auto", queries["auto"], initialize=False)
    db.create_stream_table("always", queries["always"], refresh_mode="DIFFERENTIAL", initialize=False)
    db.create_stream_table("small", queries["small"], initialize=False)
    db.refresh_all()
    monkeypatch.setattr(job_planner, "Budget", lambda: Budget(operators=40))
    conn.execute("INSERT INTO r0 VALUES (6, 1, 'new')")
    for _ in range(2):  # the second time without planning it again
        with pytest.raises(
            NotDifferentiableError, match=r"public.always cannot be refreshed: .* more than 40 operators"
        ):
            db.refresh(["auto", "always", "small"])
        for name in ("auto", "small"):
            assert_exact(conn, name, queries[name])
        conn.execute("UPDATE r0 SET kind = 'newer' WHERE id = 6")
    assert "40 operators" in db.history("auto")[0]["reason"]


def test_groups_are_counted_again_after_a_full_refresh(
    database: TestDatabase, db: pgtrickle.Database, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = "SELECT kind, count(*) AS n FROM r0 GROUP BY kind"
    db.create_stream_table("counts", query)
    with monkeypatch.context() as patch, pgtrickle.connect(database.dsn) as other:
        patch.setattr(programs, "Budget", lambda: Budget(operators=1))
        conn.execute("INSERT INTO r0 VALUES (6, 1, 'k1')")
        assert [result.action for result in other.refresh("counts")] == ["FULL"]
    with pgtrickle.connect(database.dsn) as other:
        conn.execute("INSERT INTO r0 VALUES (7, 1, 'k1')")
        assert [result.action for result in other.refresh("counts")] == ["FULL"]
        assert_exact(conn, "counts", query)
        conn.execute("INSERT INTO r0 VALUES (8, 1, 'k1')")
        assert [result.action for result in other.refresh("counts")] == ["DIFFERENTIAL"]
    assert_exact(conn, "counts", query)


def test_sums_are_recomputed_after_refreshes_without_a_plan(
    db: pgtrickle.Database, database: TestDatabase, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of groups are only kept with a plan, and altering the mode must not hide that."""
    query = "SELECT r0.kind, count(*) AS n, sum(r1.id) AS total FROM r0 JOIN r1 ON r1.ref = r0.id GROUP BY r0.kind"
    db.create_stream_table("sums", query)
    conn.execute("INSERT INTO r0 VALUES (6, 6, 'k1')")
    conn.execute("INSERT INTO r1 VALUES (6, 6, 'k1')")
    with monkeypatch.context() as patched, pgtrickle.connect(database.dsn) as busy:
        patched.setattr(programs, "Budget", lambda: Budget(operators=1))
        assert busy.refresh(["sums"])[0].action == "FULL"
    db.alter_stream_table("sums", refresh_mode="DIFFERENTIAL")
    conn.execute("INSERT INTO r1 VALUES (7, 6, 'k1')")
    actions = []
    for _ in range(2):
        with pgtrickle.connect(database.dsn) as later:
            actions += [result.action for result in later.refresh(["sums"])]
        assert_exact(conn, "sums", query)
        conn.execute("INSERT INTO r1 SELECT max(id) + 1, 6, 'k1' FROM r1")
    assert actions == ["FULL", "DIFFERENTIAL"]
