"""A registered database to attack: it is read with a login of its own, `reader`.

Mallory and alice own schemas there too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg

import pgtrickle
from tests.security.roles import Roles
from tests.support.database import TestDatabase, fresh_database

_ALICE = """
CREATE TABLE {alice}.customers (id int PRIMARY KEY, secret text);
GRANT SELECT, TRIGGER ON {alice}.customers TO {reader};
INSERT INTO {alice}.customers VALUES (1, 'secret');
"""

_MALLORY = """
CREATE TABLE {mallory}.t (id int PRIMARY KEY, v int, n varchar(20));
INSERT INTO {mallory}.t SELECT i, i % 3, 'n' || i FROM generate_series(1, 5) AS i;
CREATE TABLE {mallory}.own (id int PRIMARY KEY, secret text);
INSERT INTO {mallory}.own VALUES (1, 'harmless');
GRANT SELECT, TRIGGER ON {mallory}.t, {mallory}.own TO {reader};
CREATE FUNCTION {mallory}.evil() RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog AS
$$ BEGIN RAISE LOG 'evil ran as %', current_user; END $$;
"""


@dataclass(frozen=True)
class Registered:
    """The database `crm`, as registered at home."""

    roles: Roles
    database: TestDatabase
    reader: str

    def sql(self, role: str, *statements: str) -> None:
        """Run statements of a role in the registered database."""
        with psycopg.connect(self.database.direct_dsn_as(role), autocommit=True) as conn:
            for statement in statements:
                conn.execute(statement.encode())

    def allow(self, *users: str) -> None:
        """Let these roles use it, and no others."""
        with self.roles.service() as db:
            db.add_database("crm", self.database.direct_dsn_as(self.reader), roles=list(users))

    def assert_powerless(self) -> None:
        """Mallory's code never ran there with the reader's rights."""
        ran = Roles.logged(Roles(self.database, "", "", ""), "evil ran as ")
        assert ran <= {self.roles.mallory}, f"code of {self.roles.mallory} ran as {sorted(ran)}"


@contextmanager
def registered(roles: Roles) -> Iterator[Registered]:
    """A database that nobody but administrators may use yet, with mallory.t, mallory.own and alice.customers."""
    alice, mallory = roles.alice, roles.mallory
    with fresh_database(roles.database.server, "crm") as crm:
        reader = roles.database.create_role("reader")
        found = Registered(roles, crm, reader)
        with psycopg.connect(crm.superuser_dsn, autocommit=True) as conn:
            for owner in (alice, mallory):
                conn.execute(f"CREATE SCHEMA {owner} AUTHORIZATION {owner}".encode())
                conn.execute(f"GRANT USAGE ON SCHEMA {owner} TO PUBLIC".encode())
        with pgtrickle.connect(crm.dsn) as db:
            db.install(service_role=reader)
        found.sql(alice, _ALICE.format(alice=alice, reader=reader))
        found.sql(mallory, _MALLORY.format(mallory=mallory, reader=reader))
        found.allow()
        yield found
