"""An installation to attack: one role that installs and runs the service, two owners, and an attacker.

Each test in this folder is an attack. It passes when the attack is refused or has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

import pgtrickle
from pgtrickle.refresh.progress import OnStep
from tests.support.database import APP_ROLE, TestDatabase
from tests.support.oracle import assert_equal_to_query

# Errors that count as a refusal: the privilege is missing, or there is nothing to call.
REFUSED = (
    psycopg.errors.InsufficientPrivilege,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedObject,
    psycopg.errors.InvalidSchemaName,
)

_MALLORY = """
CREATE TABLE {schema}.src (id int PRIMARY KEY, v int);
INSERT INTO {schema}.src SELECT i, i % 3 FROM generate_series(1, 5) AS i;

CREATE TABLE {schema}.loot (what text);
GRANT INSERT ON {schema}.loot TO PUBLIC;

-- Records the role it runs as, after trying to become the service.
CREATE FUNCTION {schema}.evil() RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
    BEGIN
        PERFORM set_config('role', '{app}', true);
    EXCEPTION WHEN OTHERS THEN
        NULL;
    END;
    RAISE LOG 'evil ran as %', current_user;
    BEGIN
        INSERT INTO {schema}.loot VALUES ('evil ran as ' || current_user);
    EXCEPTION WHEN OTHERS THEN
        NULL; -- a read-only transaction
    END;
    RETURN true;
END $$;

-- For queries, which may not call VOLATILE functions. STRICT keeps it from being called for NULL constants.
CREATE FUNCTION {schema}.sly(value int) RETURNS int LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog AS $$
BEGIN
    PERFORM {schema}.evil();
    RETURN value;
END $$;

CREATE FUNCTION {schema}.fire() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM {schema}.evil();
    RETURN NULL;
END $$;
"""


@dataclass(frozen=True)
class Roles:
    """The roles of a test. All but `app` own a schema of the same name."""

    database: TestDatabase
    alice: str
    bob: str
    mallory: str
    app: str = APP_ROLE

    @contextmanager
    def connect(self, role: str) -> Iterator[psycopg.Connection[Any]]:
        """A connection in autocommit, with short timeouts because an attack may hold locks."""
        options = "-c statement_timeout=20s -c lock_timeout=2s"
        with psycopg.connect(self.database.direct_dsn_as(role), autocommit=True, options=options) as conn:
            yield conn

    def sql(self, role: str, *statements: str) -> None:
        with self.connect(role) as conn:
            for statement in statements:
                conn.execute(statement.encode())

    def attempt(self, role: str, *statements: str) -> str | None:
        """Run the statements of an attack until one is refused; returns the refusal."""
        try:
            self.sql(role, *statements)
        except REFUSED as error:
            return str(error)
        return None

    def peek(self, role: str, query: str) -> str:
        """Everything a query shows to a role, as text; empty if the query is refused."""
        try:
            return str(self.rows(role, query))
        except REFUSED:
            return ""

    def rows(self, role: str, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self.connect(role) as conn:
            return conn.execute(query.encode(), parameters or None).fetchall()

    def value(self, role: str, query: str, parameters: Sequence[Any] = ()) -> Any:
        ((found,),) = self.rows(role, query, parameters)
        return found

    def create(self, owner: str, name: str, query: str, **options: Any) -> str:
        """Create a stream table in the owner's schema without filling it; returns its name."""
        with pgtrickle.connect(self.database.dsn_as(owner)) as db:
            db.create_stream_table(f"{owner}.{name}", query, initialize=False, **options)
        return f"{owner}.{name}"

    def id_of(self, name: str) -> int:
        with self.service() as db:
            return db.stream_table(name).id

    def service(self) -> pgtrickle.Database:
        """A connection with the service's login."""
        return pgtrickle.connect(self.database.dsn)

    def refresh(self, *names: str) -> None:
        with self.service() as db:
            db.refresh(list(names))

    def assert_withstands(
        self, trap: str, *, query: str | None = None, rounds: int = 3, on_step: OnStep | None = None
    ) -> None:
        """Refresh mallory's stream table and one of alice's in turn over one connection; only mallory's may fail."""
        query = query or f"SELECT id, kind, amount FROM {self.alice}.orders WHERE amount > 3"
        mine = self.create(self.alice, "mine", query)
        ids = [self.id_of(trap), self.id_of(mine)]
        worker = Worker(self.database.dsn, on_step)
        for number in range(1000, 1000 + rounds):
            self.sql(self.mallory, f"INSERT INTO {self.mallory}.src VALUES ({number}, {number})")
            self.sql(self.alice, f"INSERT INTO {self.alice}.orders VALUES ({number}, 'new', 5), ({-number}, 'new', 6)")
            for pgt_id in ids:
                worker.refresh(pgt_id)
        worker.close()
        self.assert_powerless()
        with self.connect(self.alice) as conn:
            assert_equal_to_query(conn, mine, query)

    def logged(self, beginning: str) -> set[str]:
        """The rest of every message raised at level LOG in this database that starts with `beginning`.

        Unlike a table, the server's log also keeps what read-only and rolled-back transactions write.
        """
        entry = rf"\] {self.database.name}\|[^|\n]*\| LOG:  {re.escape(beginning)}(.*)$"
        return set(re.findall(entry, self.database.server.log_path.read_text(errors="replace"), re.MULTILINE))

    def ran_as(self) -> set[str]:
        """The roles under which mallory.evil() ran."""
        return self.logged("evil ran as ")

    def assert_powerless(self) -> None:
        """Mallory's code never ran with anybody else's rights."""
        assert self.ran_as() <= {self.mallory}, f"code of {self.mallory} ran as {sorted(self.ran_as())}"


class Worker:
    """Refreshes like a worker of the service: one connection for all owners, replaced after an unexpected error."""

    def __init__(self, dsn: str, on_step: OnStep | None = None) -> None:
        self._dsn = dsn
        self._on_step = on_step
        self._db = self._connect()

    def _connect(self) -> pgtrickle.Database:
        return pgtrickle.connect(self._dsn, on_step=self._on_step)

    def refresh(self, pgt_id: int) -> None:
        try:
            self._db.engine.attempt([pgt_id], "SCHEDULE")
        except Exception:
            self.close()
            self._db = self._connect()

    def close(self) -> None:
        try:
            self._db.close()
        except Exception:
            self._db.conn.close()
        with self._connect() as db:  # in a service, the next connection has the same lease
            db.conn.execute("DELETE FROM pgtrickle.pgt_services")


@pytest.fixture
def roles(database: TestDatabase) -> Roles:
    alice, bob, mallory = (database.create_role(name) for name in ("alice", "bob", "mallory"))
    found = Roles(database, alice, bob, mallory)
    with pgtrickle.connect(database.dsn) as db:
        db.install(service_role=found.app)
    with psycopg.connect(database.superuser_dsn, autocommit=True) as conn:
        for owner in (alice, bob, mallory):
            conn.execute(f"CREATE SCHEMA {owner} AUTHORIZATION {owner}".encode())
            conn.execute(f"GRANT USAGE ON SCHEMA {owner} TO PUBLIC".encode())  # names are public, rows are not
    for owner in (alice, bob):
        found.sql(
            owner,
            f"CREATE TABLE {owner}.orders (id int PRIMARY KEY, kind text, amount numeric(10,2))",
            f"INSERT INTO {owner}.orders SELECT i, 'k' || i % 3, i FROM generate_series(1, 20) AS i",
        )
    found.sql(mallory, _MALLORY.format(schema=mallory, app=found.app))
    return found
