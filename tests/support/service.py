"""A service inside the test process, so that it shares the test's Spark session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from pgtrickle.service.config import ServerConfig, ServiceConfig
from pgtrickle.service.service import Service
from tests.support.database import APP_ROLE

TIMEOUT = 120.0


@contextmanager
def running_service(dsn: str, *databases: str, lease_seconds: float = 30.0) -> Iterator[Service]:
    """A service for these databases of a server, entered once all of them are known to it; it is drained at the end."""
    server = ServerConfig("test", dsn, databases)
    config = ServiceConfig(
        (server,), lease_seconds=lease_seconds, list_seconds=0.2, replica_seconds=0.5, trusted_owners=(APP_ROLE,)
    )
    service = Service(config)
    service.start()
    try:
        until(lambda: all(database in service.launchers[0].databases for database in databases))
        yield service
    finally:
        assert service.stop()


def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Wait for a condition that another thread or process brings about."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {TIMEOUT:g} s"
        time.sleep(0.02)


def serving(conn: psycopg.Connection) -> None:
    """Wait until a service is registered in this database, which its scheduler does after it has started."""
    known = "SELECT count(*) FROM pgtrickle.pgt_services WHERE kind = 'service'"
    until(lambda: conn.execute(known).fetchone() != (0,), "a service is known")


def fresh(conn: psycopg.Connection, *names: str) -> None:
    """Wait until stream tables include everything that is committed."""
    for name in names:
        conn.execute("CALL pgtrickle.wait_until_fresh(%s, '2 minutes')", (name,))
