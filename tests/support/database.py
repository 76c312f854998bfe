"""A separate database for every test, and the ordinary roles that work in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar
from uuid import uuid4

import psycopg
from psycopg import sql

from pgtrickle.embedded.server import EmbeddedServer
from tests.support.pgbouncer import Pooler

APP_ROLE = "app"

SERVER_SETTINGS = {
    "fsync": "off",
    "max_prepared_transactions": "20",
    "max_connections": "200",
    "log_statement": "none",
    "log_line_prefix": "%m [%p] %q%d|%a| ",  # read by tests/support/server_log.py
    "wal_level": "logical",
    "lc_messages": "C",
}


@dataclass(frozen=True)
class TestDatabase:
    """A fresh database owned by the ordinary role `app`, dropped with its roles after the test."""

    __test__: ClassVar[bool] = False  # pytest must not collect it because of its name

    server: EmbeddedServer
    name: str
    pooler: Pooler | None = None
    _roles: list[str] = field(default_factory=list, repr=False)

    @property
    def dsn(self) -> str:
        """The DSN of the owner `app` for pgtrickle, which goes through a pooler with `--pooler`."""
        return self.dsn_as(APP_ROLE)

    @property
    def direct_dsn(self) -> str:
        """The DSN of `app` for the tests' own connections, which never go through a pooler."""
        return self.direct_dsn_as(APP_ROLE)

    @property
    def superuser_dsn(self) -> str:
        return self.server.dsn(self.name)

    def dsn_as(self, role: str) -> str:
        return self.direct_dsn_as(role) if self.pooler is None else self.pooler.dsn(self.name, role)

    def direct_dsn_as(self, role: str) -> str:
        return self.server.dsn(self.name, role)

    def create_role(self, name: str) -> str:
        """Create an ordinary login role and return its name, which is `name` with a suffix that is unique to this test.

        Roles belong to the whole server, so a plain name could collide with the role of another test.
        """
        role = f"{name}_{self.name.rpartition('_')[2]}"
        with psycopg.connect(self.superuser_dsn, autocommit=True) as conn:
            _create_ordinary_role(conn, role)
        self._roles.append(role)
        return role


def prepare_server(server: EmbeddedServer) -> None:
    """Create the role `app`, which all tests share."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        _create_ordinary_role(conn, APP_ROLE)


@contextmanager
def fresh_database(server: EmbeddedServer, hint: str = "test", pooler: Pooler | None = None) -> Iterator[TestDatabase]:
    """Create a database for the duration of the block; `hint` makes its name recognizable in logs."""
    readable = re.sub(r"\W", "_", hint)[:40]
    database = TestDatabase(server, f"{readable}_{uuid4().hex[:8]}", pooler)
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        # template0 does not allow connections, so none can prevent the copy.
        conn.execute(
            sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE template0").format(
                sql.Identifier(database.name), sql.Identifier(APP_ROLE)
            )
        )
    try:
        yield database
    finally:
        if not server.is_running:  # a test killed it and failed before restarting it
            server.start()
        _release(database)
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            conn.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(database.name)))
            for role in database._roles:
                conn.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def _release(database: TestDatabase) -> None:
    """Remove prepared transactions and subscriptions that a failed test left: FORCE does not remove them."""
    with psycopg.connect(database.superuser_dsn, autocommit=True) as conn:
        prepared = conn.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()").fetchall()
        for (gid,) in prepared:
            conn.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
        subscriptions = conn.execute(
            "SELECT subname FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid"
            " WHERE d.datname = current_database()"
        ).fetchall()
        for (name,) in subscriptions:
            subscription = sql.Identifier(name)
            conn.execute(sql.SQL("ALTER SUBSCRIPTION {} DISABLE").format(subscription))
            conn.execute(sql.SQL("ALTER SUBSCRIPTION {} SET (slot_name = NONE)").format(subscription))
            conn.execute(sql.SQL("DROP SUBSCRIPTION {}").format(subscription))


def _create_ordinary_role(conn: psycopg.Connection, role: str) -> None:
    conn.execute(
        sql.SQL("CREATE ROLE {} LOGIN NOSUPERUSER NOCREATEROLE NOCREATEDB NOREPLICATION NOBYPASSRLS").format(
            sql.Identifier(role)
        )
    )
