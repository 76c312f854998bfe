"""A service with fewer connections than databases: all databases are served, and the budget is never exceeded."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import psycopg
import pytest

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.service.config import ConfigError, ServerConfig, ServiceConfig, load_config
from pgtrickle.service.connection_budget import Budget
from pgtrickle.service.service import Service
from tests.support.database import TestDatabase, fresh_database
from tests.support.oracle import assert_equal_to_query
from tests.support.service import fresh, until

OURS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgtrickle %%' AND datname = ANY (%s)"
QUERY = "SELECT kind, count(*) AS n, sum(val) AS total FROM item GROUP BY kind"
MOST = 5


def prepare(database: TestDatabase) -> None:
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        db.conn.execute("CREATE TABLE item (id int PRIMARY KEY, kind int, val int)")
        db.conn.execute("SELECT pgtrickle.create_stream_table('totals', %s, '1s')", (QUERY,))


def test_more_databases_than_connections(server: EmbeddedServer) -> None:
    with ExitStack() as stack:
        databases = [stack.enter_context(fresh_database(server, f"budget{i}")) for i in range(12)]
        for database in databases:
            prepare(database)
        names = tuple(database.name for database in databases)
        config = ServiceConfig((ServerConfig("test", server.dsn(), names, MOST, ("app",)),), list_seconds=0.2)
        seen: list[int] = []
        over = threading.Event()
        watcher = threading.Thread(target=count, args=(server, names, over, seen))
        service = Service(config)
        service.start()
        watcher.start()
        try:
            until(lambda: all(one.scheduler for one in service.launchers[0].databases.values()))
            until(lambda: len(service.launchers[0].databases) == len(names))
            for number in range(3):
                for database in databases:
                    with psycopg.connect(database.direct_dsn, autocommit=True) as conn:
                        conn.execute(
                            "INSERT INTO item SELECT %s * 100 + i, i %% 3, i FROM generate_series(1, 50) AS i",
                            (number,),
                        )
                for database in databases:
                    with psycopg.connect(database.direct_dsn, autocommit=True) as conn:
                        fresh(conn, "totals")
                        assert_equal_to_query(conn, "totals", QUERY)
        finally:
            over.set()
            watcher.join()
            assert service.stop()
        print(f"at most {max(seen)} connections for {len(names)} databases, looked {len(seen)} times")
        assert len(seen) > 20
        assert 1 < max(seen) <= MOST


def count(server: EmbeddedServer, names: tuple[str, ...], over: threading.Event, seen: list[int]) -> None:
    """The service's connections, a hundred times a second."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        while not over.wait(0.01):
            row = conn.execute(OURS, (list(names),)).fetchone()
            assert row is not None
            seen.append(row[0])


def test_idle_connections_yield_their_slot_to_active_ones(database: TestDatabase) -> None:
    budget = Budget(database.dsn, 2)
    one, two = budget.open("one"), budget.open("two")
    budget.rest(one)
    three = budget.open("three")
    assert one.closed
    assert not budget.resume(one)
    waiting: list[psycopg.Connection] = []
    thread = threading.Thread(target=lambda: waiting.append(budget.open("four")))
    thread.start()
    assert thread.is_alive()
    budget.close(two)
    thread.join(30)
    budget.rest(three)
    assert budget.resume(three)
    for conn in (three, *waiting):
        budget.close(conn)
    assert len(waiting) == 1


def test_a_slot_is_free_when_the_server_has_ended_the_session(database: TestDatabase) -> None:
    budget = Budget(database.direct_dsn, 4)
    with psycopg.connect(database.direct_dsn, autocommit=True) as conn:
        for number in range(50):
            budget.close(budget.open(f"closed {number}"))
            row = conn.execute(OURS, ([database.name],)).fetchone()
            assert row == (0,)


@pytest.mark.parametrize("most", [0, 3, -1])
def test_too_small_a_budget_is_refused(most: int) -> None:
    with pytest.raises(ConfigError, match="max_connections cannot be"):
        load_config(None, "dbname=x", (), most)
