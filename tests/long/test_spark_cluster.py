"""Refreshes on a Spark with executors in separate processes, which takes a single setting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

import pgtrickle
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query

pytestmark = pytest.mark.long

QUERY = "SELECT f.id, f.val, g.name FROM fact f JOIN grp g ON g.id = f.grp"
REFRESH = """
import sys
import pgtrickle
from pgtrickle.spark.session import spark_session

with pgtrickle.connect(sys.argv[1]) as db:
    db.engine.reading.large = int(sys.argv[2])
    print(db.refresh("facts")[0].action)
print(spark_session().sparkContext.master)
"""


def test_executors_of_a_cluster_read_compute_and_write(database: TestDatabase, conn: psycopg.Connection) -> None:
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        conn.execute("CREATE TABLE grp (id int PRIMARY KEY, name text)")
        conn.execute("CREATE TABLE fact (id int PRIMARY KEY, grp int REFERENCES grp, val numeric(12,2))")
        conn.execute("INSERT INTO grp SELECT i, 'group ' || i FROM generate_series(0, 9) AS i")
        conn.execute("INSERT INTO fact SELECT i, i % 10, i / 7.0 FROM generate_series(1, 150000) AS i")
        db.create_stream_table("facts", QUERY, placement="spark", initialize=False)
    assert _refresh(database.dsn, large=-1) == ["REINITIALIZE", "local-cluster[2,1,1024]"]
    assert_equal_to_query(conn, "facts", QUERY)
    conn.execute("UPDATE fact SET val = val + 1, grp = (grp + 1) % 10 WHERE id % 3 = 0")
    conn.execute("DELETE FROM fact WHERE id % 5 = 0")
    for large in (-1, 1 << 40):
        conn.execute("UPDATE grp SET name = name || '!' WHERE id < 3")
        assert _refresh(database.dsn, large=large)[0] == "DIFFERENTIAL"
        assert_equal_to_query(conn, "facts", QUERY)


def _refresh(dsn: str, *, large: int) -> list[str]:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PGTRICKLE_SPARK_MASTER": "local-cluster[2,1,1024]", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", REFRESH, dsn, str(large)]
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=900
    ).stdout.splitlines()
