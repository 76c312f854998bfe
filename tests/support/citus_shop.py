"""A Citus cluster with a distributed, a reference and a local table, the starting point of the Citus tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from tests.support.citus import Cluster, citus_binaries, cluster
from tests.support.oracle import assert_equal_to_query

needs_citus = pytest.mark.skipif(
    citus_binaries() is None,
    reason="no Citus for PostgreSQL 18 in ~/.pgtrickle/citus, nor where PGTRICKLE_CITUS points",
)

QUERIES = {
    "totals": "SELECT grp, count(*) AS n, sum(v) AS total FROM t GROUP BY grp",
    "rows": "SELECT id, v * 2 AS twice FROM t WHERE v > 500",
    "named": "SELECT t.id, r.name, t.v FROM t JOIN loc AS r USING (grp)",
    "mixed": "SELECT t.id, r.name AS region, l.name FROM t JOIN ref AS r USING (grp) LEFT JOIN loc AS l USING (grp)",
    "doubled": "SELECT grp, v % 5 AS rest FROM t",
    "whole": "SELECT count(*) AS n, min(v) AS least, max(v) AS most FROM t",
    "local": "SELECT grp, upper(name) AS name FROM loc",
    "referenced": "SELECT count(*) AS n, max(name) AS last FROM ref",
}
CAPTURED = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'pgtrickle\\_capture%'"
BUFFERS = (
    "SELECT count(*) FROM pg_class WHERE relnamespace = 'pgtrickle_changes'::regnamespace AND relname LIKE 'changes%'"
)


@dataclass
class Shop:
    """A cluster with a distributed, a reference and a local table, and stream tables on them."""

    cluster: Cluster
    db: pgtrickle.Database
    conn: psycopg.Connection[Any]
    admin: psycopg.Connection[Any]
    queries: dict[str, str] = field(default_factory=dict)
    round: int = 0

    def create(self, *names: str, st_placement: str | None = "local") -> None:
        for name in names:
            made = self.db.create_stream_table(name, QUERIES[name], st_placement=st_placement)
            assert made.effective_mode == "DIFFERENTIAL"
            self.queries[name] = QUERIES[name]

    def define(self, queries: Mapping[str, str]) -> None:
        """Create stream tables with the test's own queries."""
        self.queries |= queries
        for name, query in queries.items():
            self.db.create_stream_table(name, query, st_placement="local")

    def placement(self, name: str) -> tuple[Any, ...] | None:
        """The placement of a stream table according to the catalog, and according to Citus."""
        return self.conn.execute(
            "SELECT st_placement, pgtrickle._citus_placement(pgt_relid) FROM pgtrickle.pgt_stream_tables WHERE pgt_name = %s",
            (name,),
        ).fetchone()

    def assert_nothing_is_captured(self) -> None:
        """Assert that no trigger and no buffer is left on the coordinator and its two workers."""
        for node in range(3):
            with psycopg.connect(self.cluster.superuser_dsn(node), autocommit=True) as conn:
                conn.execute("SET citus.override_table_visibility = off")
                assert conn.execute(CAPTURED).fetchone() == (0,), f"node {node}"
                if conn.execute("SELECT to_regnamespace('pgtrickle_changes') IS NOT NULL").fetchone() == (True,):
                    assert conn.execute(BUFFERS).fetchone() == (0,), f"node {node}"

    def change(self) -> None:
        self.round += 1
        i = self.round
        self.conn.execute(f"UPDATE t SET v = v + 1 WHERE id % 7 = {i % 7}".encode())
        self.conn.execute(
            f"INSERT INTO t SELECT 2000 + {i} * 100 + k, k % 10, k * 10 FROM generate_series(1, 50) AS k".encode()
        )
        self.conn.execute("DELETE FROM t WHERE id = %s", (i + 5,))
        self.conn.execute("UPDATE loc SET name = name || 'x' WHERE grp = %s", (i % 10,))
        with psycopg.connect(self.cluster.dsn(1), autocommit=True) as worker:
            if worker.execute("SELECT to_regclass('t')").fetchone() == (None,):
                return  # it is not distributed now
            worker.execute("UPDATE t SET grp = %s WHERE id BETWEEN 100 AND 120", (i % 10,))
            worker.execute("INSERT INTO t VALUES (%s, 1, 700)", (90_000 + i,))

    def refresh(self) -> dict[str, tuple[str, str | None]]:
        """Refresh all stream tables, compare them with their queries, and return action and reason of each."""
        done = self.db.refresh(list(self.queries))
        for name, query in self.queries.items():
            assert_equal_to_query(self.conn, name, query)
        return {name: (result.action, result.reason) for name, result in zip(self.queries, done, strict=True)}

    def goes_on(self) -> None:
        """Assert that the next refreshes are differential again."""
        self.change()
        for name, (action, reason) in self.refresh().items():
            assert action in ("DIFFERENTIAL", "NO_DATA"), f"{name}: {reason}"


@contextmanager
def citus_shop(nodes: list[EmbeddedServer], workers: int = 2) -> Iterator[Shop]:
    with (
        cluster(nodes, workers) as made,
        psycopg.connect(made.dsn(), autocommit=True) as conn,
        psycopg.connect(made.superuser_dsn(), autocommit=True) as admin,
        pgtrickle.connect(made.dsn()) as db,
    ):
        conn.execute("SET citus.enable_repartition_joins = on")  # for the comparison
        conn.execute("CREATE TABLE t (id int PRIMARY KEY, grp int, v int)")
        conn.execute("SELECT create_distributed_table('t', 'id')")
        conn.execute("INSERT INTO t SELECT i, i % 10, i FROM generate_series(1, 1000) AS i")
        conn.execute("CREATE TABLE ref (grp int PRIMARY KEY, name text)")
        conn.execute("SELECT create_reference_table('ref')")
        conn.execute("INSERT INTO ref SELECT i, 'r' || i FROM generate_series(0, 9) AS i")
        conn.execute("CREATE TABLE loc (grp int PRIMARY KEY, name text)")
        conn.execute("INSERT INTO loc SELECT i, 'g' || i FROM generate_series(0, 9) AS i")
        db.install()
        yield Shop(made, db, conn, admin)
