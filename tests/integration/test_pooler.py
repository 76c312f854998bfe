"""pgtrickle behind a real PgBouncer in transaction mode, with two server connections per database."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.postgres.connection import connect, is_pooled
from tests.support.database import TestDatabase, fresh_database
from tests.support.oracle import assert_equal_to_query
from tests.support.pgbouncer import POOL_SIZE, Pooler, pgbouncer_program, pooler_before
from tests.support.server_log import ServerLog, recorded
from tests.support.service import fresh, running_service, until

pytestmark = pytest.mark.skipif(
    pgbouncer_program() is None, reason="PgBouncer is not installed (on Debian: apt-get install pgbouncer)"
)

Connection = psycopg.Connection[Any]

QUERIES = {
    "totals": "SELECT grp, count(*) AS n, sum(val) AS total FROM item GROUP BY grp",
    "joined": "SELECT i.id, i.val, k.name FROM item AS i LEFT JOIN kind AS k USING (grp)",
    "both": "SELECT t.grp, t.total, k.name FROM totals AS t JOIN kind AS k USING (grp)",
}
# What a connection would keep beyond the end of a transaction.
SESSION = re.compile(
    r"\b(LISTEN|UNLISTEN|PREPARE|DEALLOCATE|DISCARD|pg_advisory_lock|pg_try_advisory_lock)\b"
    # PgBouncer itself tells the server whose connection it is now.
    r"|^\s*SET (?!LOCAL|TRANSACTION|application_name=)",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def bouncer(server: EmbeddedServer) -> Iterator[Pooler]:
    with pooler_before(server) as running:
        yield running


@pytest.fixture
def pooled(server: EmbeddedServer, bouncer: Pooler, request: pytest.FixtureRequest) -> Iterator[TestDatabase]:
    with fresh_database(server, request.node.name, bouncer) as database:
        with psycopg.connect(database.direct_dsn, autocommit=True) as conn:
            conn.execute("CREATE TABLE item (id int PRIMARY KEY, grp int, val int)")
            conn.execute("CREATE TABLE kind (grp int PRIMARY KEY, name text)")
            conn.execute("INSERT INTO item SELECT i, i % 9, i % 30 FROM generate_series(1, 300) AS i")
            conn.execute("INSERT INTO kind SELECT i, 'kind ' || i FROM generate_series(0, 6) AS i")
        yield database


@pytest.fixture
def conn(pooled: TestDatabase) -> Iterator[Connection]:
    with psycopg.connect(pooled.direct_dsn, autocommit=True) as connection:
        yield connection


def _prepared(log: ServerLog) -> list[str]:
    return [how for application, how, _ in log.sent() if application.startswith("pgtrickle") and "_pg3_" in how]


def test_a_pooler_is_detected(pooled: TestDatabase) -> None:
    with connect(pooled.dsn) as through, connect(pooled.direct_dsn) as direct:
        assert is_pooled(through)
        assert not is_pooled(direct)


def test_nothing_that_outlives_a_transaction_crosses_it(
    pooled: TestDatabase, bouncer: Pooler, conn: Connection
) -> None:
    with pgtrickle.connect(pooled.dsn) as db:
        db.install()
    with recorded(pooled) as log:
        bouncer.admin(f"RECONNECT {pooled.name}")  # what it has connected by now is not recorded
        with pgtrickle.connect(pooled.dsn) as db:
            for name, query in QUERIES.items():
                db.create_stream_table(name, query, schedule="1s")
            for number in range(8):  # psycopg prepares what it sends for the sixth time
                conn.execute("UPDATE item SET val = val + 1 WHERE id %% 8 = %s", (number,))
                db.refresh(list(QUERIES))
        with running_service(pooled.dsn, pooled.name):
            conn.execute("UPDATE item SET val = val + 1")
            fresh(conn, *QUERIES)
            conn.execute("SELECT pgtrickle.manual_refresh('totals')")
            until(
                lambda: (
                    conn.execute("SELECT bool_and(status = 'DONE') FROM pgtrickle.pgt_requests").fetchone() == (True,)
                )
            )
        ours = [(how, text) for application, how, text in log.sent() if application.startswith("pgtrickle")]
        assert len(ours) > 200
        assert [text for _, text in ours if SESSION.search(text)] == []
        assert _prepared(log) == []
    for name, query in QUERIES.items():
        assert_equal_to_query(conn, name, query)


def test_without_a_pooler_statements_are_prepared(pooled: TestDatabase, conn: Connection) -> None:
    with recorded(pooled) as log, pgtrickle.connect(pooled.direct_dsn) as db:
        db.install()
        db.create_stream_table("totals", QUERIES["totals"])
        for number in range(8):
            conn.execute("UPDATE item SET val = val + 1 WHERE id %% 8 = %s", (number,))
            db.refresh("totals")
        assert _prepared(log)


def test_one_stream_table_can_avoid_session_state(pooled: TestDatabase, conn: Connection) -> None:
    """`pooler_compatibility_mode`, on a connection without a pooler."""
    with recorded(pooled) as log, pgtrickle.connect(pooled.direct_dsn) as db:
        db.install()
        conn.execute(
            "SELECT pgtrickle.create_stream_table('totals', %s, pooler_compatibility_mode => true)",
            (QUERIES["totals"],),
        )
        for number in range(8):
            conn.execute("UPDATE item SET val = val + 1 WHERE id %% 8 = %s", (number,))
            db.refresh("totals")
        copied = [how for _, how, text in log.sent() if "apply_xid = pg_current_xact_id()" in text]
        assert len(copied) == 8
        assert not any("_pg3_" in how for how in copied)
    assert_equal_to_query(conn, "totals", QUERIES["totals"])


def test_a_refresh_takes_one_server_connection_at_a_time(
    pooled: TestDatabase, bouncer: Pooler, conn: Connection
) -> None:
    seen: list[int] = []

    def on_step(step: str) -> None:
        pools = bouncer.admin("SHOW POOLS")
        columns = {"database": 0, "user": 1, "sv_active": 6}
        seen.append(
            sum(int(str(row[columns["sv_active"]])) for row in pools if row[columns["database"]] == pooled.name)
        )

    with pgtrickle.connect(pooled.dsn, on_step=on_step) as db:
        db.install()
        for name, query in QUERIES.items():
            db.create_stream_table(name, query)
        conn.execute("INSERT INTO item SELECT i, i % 9, i FROM generate_series(1000, 60000) AS i")
        db.refresh(list(QUERIES))
    assert set(seen) <= {0, 1}
    assert 1 in seen
    for name, query in QUERIES.items():
        assert_equal_to_query(conn, name, query)


def test_server_connections_killed_behind_the_pooler_do_no_harm(pooled: TestDatabase, conn: Connection) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with pgtrickle.connect(pooled.dsn) as db:
        db.install()
        for name, query in QUERIES.items():
            db.create_stream_table(name, query, schedule="1s")
    before = conn.execute("SELECT count(*) FROM pgtrickle.pgt_refresh_history WHERE status = 'COMPLETED'").fetchone()
    assert before is not None
    with running_service(pooled.dsn, pooled.name), psycopg.connect(pooled.superuser_dsn, autocommit=True) as admin:
        for number in range(12):
            conn.execute("UPDATE item SET val = val + 1, grp = %s WHERE id %% 12 = %s", (chance.randrange(9), number))
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
                " AND application_name LIKE 'pgtrickle %%'",
                (pooled.name,),
            )
            _more_refreshes(conn, before[0] + number)
        for name in QUERIES:
            conn.execute("UPDATE pgtrickle.pgt_stream_tables SET next_due = '-infinity' WHERE pgt_name = %s", (name,))
        fresh(conn, *QUERIES)
        for name, query in QUERIES.items():
            assert_equal_to_query(conn, name, query)


def _more_refreshes(conn: Connection, number: int) -> None:
    """Wait until there have been more refreshes than that."""
    done = "SELECT count(*) > %s FROM pgtrickle.pgt_refresh_history WHERE status = 'COMPLETED'"
    until(lambda: conn.execute(done, (number,)).fetchone() == (True,))


def test_the_pooler_mode_is_configured(pooled: TestDatabase, conn: Connection) -> None:
    """With a configured pooler in transaction mode there are no notifications; alerts are read instead."""
    with pgtrickle.connect(pooled.dsn) as db:
        db.install()
    conn.execute("SELECT pgtrickle.set('pg_trickle.connection_pooler_mode', 'transaction')")
    conn.execute("LISTEN pgtrickle_alert")
    conn.execute("LISTEN pgtrickle_wake")
    conn.execute("SELECT pgtrickle.create_stream_table('wrong', 'SELECT 1 / (val - val) AS x FROM item', '1s')")
    with running_service(pooled.dsn, pooled.name):
        events = "SELECT count(*) FROM pgtrickle.events() WHERE event = 'refresh_failed'"
        until(lambda: conn.execute(events).fetchone() != (0,))
    assert list(conn.notifies(timeout=0)) == []
    assert POOL_SIZE == 2
