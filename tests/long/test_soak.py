"""Twenty minutes of concurrent changes, alterations, pauses and kills, which must not affect the service's results."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

import pgtrickle
from pgtrickle.service.config import ServerConfig
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query
from tests.support.service import fresh, until
from tests.support.service_process import ServiceProcess

Connection = psycopg.Connection[Any]
pytestmark = pytest.mark.long

MINUTES = float(os.environ.get("PGTRICKLE_SOAK_MINUTES", "20"))
# The last part has changes only: there memory, connections and the server's catalog must stand still.
STEADY_SHARE = 0.4
MEMORY_GROWTH = 1.15
PACE = 0.05  # seconds between two things that somebody does
MOST_COLUMNS = 1000  # ever added to a table: dropped ones count too, and 1,600 are all there are

QUERIES = {
    "totals": "SELECT grp, count(*) AS n, sum(val) AS total FROM item GROUP BY grp",
    "tops": "SELECT grp, max(val) AS top FROM item GROUP BY grp",
    "joined": "SELECT i.id, i.val, k.name FROM item AS i LEFT JOIN kind AS k USING (grp)",
    "both_ways": "SELECT t.grp, t.total, p.top FROM totals AS t JOIN tops AS p USING (grp)",
    "over": "SELECT count(*) AS groups, sum(total) AS total FROM both_ways",
    "days": "SELECT day, count(*) AS n FROM log GROUP BY day",
}


@pytest.fixture
def shop(database: TestDatabase, conn: Connection) -> Connection:
    with pgtrickle.connect(database.dsn) as db:
        db.install()
    conn.execute("CREATE TABLE item (id int PRIMARY KEY, grp int, val int)")
    conn.execute("CREATE TABLE kind (grp int PRIMARY KEY, name text)")
    conn.execute("CREATE TABLE log (id int, day int) PARTITION BY LIST (day)")
    conn.execute("CREATE TABLE log_0 PARTITION OF log FOR VALUES IN (0)")
    conn.execute("INSERT INTO item SELECT i, i % 20, i % 100 FROM generate_series(1, 2000) AS i")
    conn.execute("INSERT INTO kind SELECT i, 'kind ' || i FROM generate_series(0, 19) AS i")
    for name, query in QUERIES.items():
        conn.execute("SELECT pgtrickle.create_stream_table(%s, %s, '1s')", (name, query))
    return conn


class Chaos:
    """Random actions of users and operators, and random faults, one at a time."""

    def __init__(self, conn: Connection, seed: int) -> None:
        self.conn = conn
        self.chance = random.Random(seed)
        self.number = 10_000
        self.columns = 0

    def change(self) -> None:
        for _ in range(self.chance.randrange(1, 6)):
            self.number += 1
            low, grp = self.chance.randrange(2000), self.chance.randrange(25)
            statements = [
                ("INSERT INTO item VALUES (%s, %s, %s)", (self.number, grp, low)),
                ("UPDATE item SET val = val + %s WHERE id BETWEEN %s AND %s", (grp, low, low + 20)),
                ("UPDATE item SET grp = %s WHERE id = %s", (grp, low)),
                ("DELETE FROM item WHERE id = %s", (low,)),
                ("UPDATE kind SET name = name || '!' WHERE grp = %s", (grp,)),
                ("INSERT INTO log VALUES (%s, 0)", (self.number,)),
            ]
            self.conn.execute(*self.chance.choice(statements))

    def alter(self) -> None:
        self.number += 1
        n = self.number
        widened = [
            f"ALTER TABLE item ADD COLUMN extra_{n} {self.chance.choice(['int DEFAULT 1', 'float DEFAULT random()'])}",
            f"ALTER TABLE item DROP COLUMN extra_{n}",
        ]
        self.columns += 1
        for statement in self.chance.choice(
            [
                *([widened] * 2 if self.columns < MOST_COLUMNS else []),
                ["ALTER TABLE kind RENAME COLUMN name TO label", "ALTER TABLE kind RENAME COLUMN label TO name"],
                [
                    f"CREATE TABLE log_{n} AS SELECT i AS id, {n} AS day FROM generate_series(1, 5) AS i",
                    f"ALTER TABLE log ATTACH PARTITION log_{n} FOR VALUES IN ({n})",
                ],
                ["TRUNCATE kind", "INSERT INTO kind SELECT i, 'again ' || i FROM generate_series(0, 19) AS i"],
                [
                    f"SELECT pgtrickle.create_stream_table('short_{n}', 'SELECT id FROM item WHERE val > 50', '1s')",
                    f"SELECT pgtrickle.drop_stream_table('short_{n}')",
                ],
                ["SELECT pgtrickle.alter_stream_table('tops', schedule => '2s')"],
                ["SELECT pgtrickle.pause()", "SELECT pgtrickle.resume()"],
            ]
        ):
            self.conn.execute(statement.encode())

    def disconnect(self) -> None:
        self.conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'pgtrickle %'"
        )


def test_everything_at_once(database: TestDatabase, shop: Connection, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chaos = Chaos(shop, seed)
    server = ServerConfig("test", database.dsn, (database.name,))
    wild = time.monotonic() + 60 * MINUTES * (1 - STEADY_SHARE)
    while time.monotonic() < wild:
        # A service lives for a while and is killed at a moment of its own.
        with ServiceProcess(tmp_path, server):
            life = time.monotonic() + chaos.chance.uniform(40, 120)
            while time.monotonic() < min(life, wild):
                chaos.change()
                if chaos.chance.random() < 0.05:
                    chaos.alter()
                if chaos.chance.random() < 0.003:
                    chaos.disconnect()
                time.sleep(PACE)
            if chaos.chance.random() < 0.5:
                _exact(shop)
    with ServiceProcess(tmp_path, server) as process:
        _exact(shop)
        _steady(shop, chaos, process, 60 * MINUTES * STEADY_SHARE)
        _exact(shop)
    left = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'pgtrickle %'"
    until(lambda: shop.execute(left).fetchone() == (0,), "the end of all connections")


def _exact(conn: Connection) -> None:
    conn.execute("SELECT pgtrickle.resume()")
    for (name,) in conn.execute(
        "SELECT pgt_name FROM pgtrickle.pgt_stream_tables WHERE status = 'SUSPENDED'"
    ).fetchall():
        conn.execute("SELECT pgtrickle.resume_stream_table(%s)", (name,))
    fresh(conn, *QUERIES)
    until(lambda: _attached(conn), "partitions that were attached to be noticed")
    fresh(conn, *QUERIES)
    for name, query in QUERIES.items():
        assert_equal_to_query(conn, name, query)


def _attached(conn: Connection) -> bool:
    """Attaching a partition captures no change: the service's audit notices it."""
    differs = (
        "SELECT count(*) FROM pgtrickle.pgt_dependencies AS d JOIN pgtrickle.pgt_change_tracking USING (source_relid)"
        " WHERE d.capture_signature IS DISTINCT FROM pgtrickle._capture_signature(source_relid)"
    )
    return conn.execute(differs).fetchone() == (0,)


def _steady(conn: Connection, chaos: Chaos, process: ServiceProcess, seconds: float) -> None:
    """Only changes, at a moderate rate. After a warm-up nothing grows."""
    began = time.monotonic()
    early: tuple[float, tuple[int, ...]] | None = None
    while (passed := time.monotonic() - began) < seconds:
        chaos.change()
        time.sleep(PACE)
        if early is None and passed > seconds / 2:
            early = _memory(process), _catalog(conn)
    assert early is not None
    memory, catalog = _memory(process), _catalog(conn)
    print(f"memory {early[0] / 1e6:.0f} MB, then {memory / 1e6:.0f} MB; catalog {early[1]}, then {catalog}")
    assert memory < MEMORY_GROWTH * early[0]
    assert catalog == early[1]


def _memory(process: ServiceProcess) -> float:
    """The memory of the service itself; its JVM has a separate limit."""
    return float(psutil.Process(process.pid).memory_info().rss)


def _catalog(conn: Connection) -> tuple[int, ...]:
    """Rows and bytes of pg_class and pg_attribute. Idle connections report their insertions late."""
    row = conn.execute(
        "SELECT (SELECT count(*) FROM pg_class), (SELECT count(*) FROM pg_attribute),"
        " pg_relation_size('pg_class'), pg_relation_size('pg_attribute')"
    ).fetchone()
    assert row is not None
    return tuple(row)
