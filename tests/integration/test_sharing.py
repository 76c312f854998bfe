"""Stream tables of one shape share a text on Spark: fewer plans, the same rows, and no rows of one in another."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pytest

import pgtrickle
from pgtrickle.refresh.compute import spark_jobs
from pgtrickle.refresh.compute.shared_text import Sharers
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query

Connection = psycopg.Connection[Any]

TENANTS = 3
SHAPES = {
    "totals": "SELECT grp, count(*) AS n, sum(val) AS total FROM item_{n} WHERE val > {n} GROUP BY grp",
    "overall": "SELECT count(*) AS n, sum(val) AS total FROM item_{n}",
    "tops": "SELECT grp, max(val) AS top, min(val) AS low FROM item_{n} GROUP BY grp",
    "joined": "SELECT i.id, i.val, k.name FROM item_{n} AS i LEFT JOIN kind AS k USING (grp)",
    "crossed": "SELECT i.id, k.name FROM item_{n} AS i JOIN kind AS k ON i.val < k.grp * {n}",
    "present": "SELECT id FROM item_{n} AS i WHERE EXISTS (SELECT FROM kind AS k WHERE k.grp = i.grp)",
    "absent": "SELECT id FROM item_{n} AS i WHERE grp NOT IN (SELECT grp FROM kind WHERE name LIKE '%{n}')",
    "groups": "SELECT DISTINCT grp FROM item_{n}",
    "both": "SELECT grp FROM item_{n} UNION ALL SELECT grp FROM kind",
    "names": "SELECT name, string_agg(id::text, ',' ORDER BY id) AS ids FROM item_{n} JOIN kind USING (grp) GROUP BY 1",
}
QUERIES = {f"{name}_{n}": query.format(n=n) for name, query in SHAPES.items() for n in range(TENANTS)}


@pytest.fixture
def db(database: TestDatabase, conn: Connection) -> Iterator[pgtrickle.Database]:
    conn.execute("CREATE TABLE kind (grp int PRIMARY KEY, name text)")
    conn.execute("INSERT INTO kind SELECT i, 'kind ' || i FROM generate_series(0, 6) AS i")
    for n in range(TENANTS):
        conn.execute(f"CREATE TABLE item_{n} (id int PRIMARY KEY, grp int, val int)".encode())
        conn.execute(f"INSERT INTO item_{n} SELECT i, i % 9, i % 30 FROM generate_series(1, 60) AS i".encode())
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        yield db


@pytest.mark.parametrize("placement", ["auto", "spark"])
def test_many_of_one_shape_are_exact(db: pgtrickle.Database, conn: Connection, placement: str) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for name, query in QUERIES.items():
        db.create_stream_table(name, query, placement=placement, initialize=False)
    db.refresh(list(QUERIES))
    for _ in range(3):
        # Each time other tables change: fragments that are empty for some are not for others.
        for n in chance.sample(range(TENANTS), chance.randrange(1, TENANTS + 1)):
            low = chance.randrange(60)
            for statement in chance.sample(
                [
                    f"UPDATE item_{n} SET grp = (grp + 1) % 9 WHERE id BETWEEN {low} AND {low + 9}",
                    f"UPDATE item_{n} SET val = val + 3 WHERE id = {low}",
                    f"DELETE FROM item_{n} WHERE id = {low}",
                    f"INSERT INTO item_{n} SELECT max(id) + 1, {low % 12}, {low} FROM item_{n}",
                    f"DELETE FROM item_{n} WHERE grp = {low % 9}",
                ],
                2,
            ):
                conn.execute(statement.encode())
        if chance.random() < 0.5:
            conn.execute("UPDATE kind SET name = name || '1' WHERE grp = %s", (chance.randrange(7),))
        db.refresh(list(QUERIES))
        for name, query in QUERIES.items():
            assert_equal_to_query(conn, name, query)


def test_one_text_for_all_of_one_shape(
    db: pgtrickle.Database, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name in QUERIES if name.startswith(("totals", "tops", "joined", "overall"))]
    for name in names:
        db.create_stream_table(name, QUERIES[name], placement="spark", initialize=False)
    db.refresh(names)
    seen: list[int] = []
    run_text = spark_jobs._run_text

    def look(sharers: Sequence[Sharers]) -> pa.Table:
        seen.extend(len(some.jobs) for some in sharers)
        return run_text(sharers)

    monkeypatch.setattr(spark_jobs, "_run_text", look)
    for n in range(TENANTS):
        conn.execute(f"UPDATE item_{n} SET val = val + 40".encode())
    db.refresh(names)
    assert sorted(seen) == [TENANTS] * 4
    for name in names:
        assert_equal_to_query(conn, name, QUERIES[name])
