"""One table in many databases: tenants that all have `orders`, and a home database that reads them as a set."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from tests.support.database import APP_ROLE, TestDatabase, fresh_database
from tests.support.oracle import assert_equal_to_query

Connection = psycopg.Connection[Any]

ORDERS = "id int PRIMARY KEY, customer int, amount numeric(10,2), note text"
QUERIES = {
    "rows": "SELECT pgt_database, id, amount FROM tenants.public.orders WHERE customer < 6",
    "totals": "SELECT pgt_database, count(*) AS n, sum(amount) AS total FROM tenants.public.orders GROUP BY 1",
    "everywhere": "SELECT customer, count(*) AS n, max(amount) AS most FROM tenants.public.orders GROUP BY customer",
    "named": "SELECT o.pgt_database, o.id, p.plan FROM tenants.public.orders AS o JOIN plans AS p ON p.tenant = o.pgt_database",
}
CHANGES = [
    "INSERT INTO orders SELECT (SELECT max(id) FROM orders) + i, {a} % 9, i + 0.5, 'new' FROM generate_series(1, 3) AS i",
    "UPDATE orders SET amount = amount + {a} WHERE id % 7 = {b} % 7",
    "UPDATE orders SET customer = {a} % 9 WHERE id = {b}",
    "DELETE FROM orders WHERE id = {b}",
]


@dataclass
class Tenants:
    """The home database, and the names of the tenants' databases."""

    server: EmbeddedServer
    home: TestDatabase
    template: str
    prefix: str
    names: list[str] = field(default_factory=list)

    def create(self, number: int) -> str:
        """Create a tenant with a catalog and some orders."""
        name = f"{self.prefix}_{number:02d}"
        create = sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE {}").format(
            sql.Identifier(name), sql.Identifier(APP_ROLE), sql.Identifier(self.template)
        )
        with psycopg.connect(self.server.dsn(), autocommit=True) as conn:
            conn.execute(create)
        self.names.append(name)
        self.run(name, f"UPDATE orders SET amount = amount + {number}")
        return name

    def dsn(self, name: str) -> str:
        return self.server.dsn(name, APP_ROLE)

    def run(self, name: str, statement: str) -> None:
        with psycopg.connect(self.dsn(name), autocommit=True) as conn:
            conn.execute(statement.encode())

    def change(self, name: str, chance: random.Random) -> None:
        with psycopg.connect(self.dsn(name), autocommit=True) as conn:
            for statement in chance.sample(CHANGES, 2):
                conn.execute(statement.format(a=chance.randrange(40), b=chance.randrange(40)).encode())

    def set_open(self, name: str, value: bool) -> None:
        """Allow connections to a database, or end and forbid them to make it unreachable."""
        with psycopg.connect(self.server.dsn(), autocommit=True) as conn:
            conn.execute(
                sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}").format(sql.Identifier(name), sql.Literal(value))
            )
            conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))

    def drop(self, name: str) -> None:
        with psycopg.connect(self.server.dsn(), autocommit=True) as conn:
            conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
        self.names.remove(name)

    def assert_exact(self, *stream_tables: str, of: list[str] | None = None) -> None:
        """Assert that stream tables equal their queries over the rows of all these tenants, loaded into one table."""
        with psycopg.connect(self.home.direct_dsn, autocommit=True) as conn:
            conn.execute(
                f"CREATE TEMP TABLE every_order (pgt_database text, {ORDERS.replace(' PRIMARY KEY', '')})".encode()
            )
            for name in of if of is not None else self.names:
                with psycopg.connect(self.dsn(name)) as source:
                    rows = source.execute("SELECT id, customer, amount, note FROM orders").fetchall()
                with conn.cursor().copy("COPY every_order FROM STDIN") as copy:
                    for row in rows:
                        copy.write_row((name, *row))
            for name in stream_tables:
                assert_equal_to_query(conn, name, QUERIES[name].replace("tenants.public.orders", "every_order"))


@contextmanager
def tenants(server: EmbeddedServer, number: int) -> Iterator[Tenants]:
    """Create `number` tenants, none of them registered, and a table of plans at home."""
    with fresh_database(server, "home") as home, fresh_database(server, "template") as template:
        for database in (home, template):
            with pgtrickle.connect(database.dsn) as db:
                db.install()
        with psycopg.connect(template.dsn, autocommit=True) as conn:
            conn.execute(f"CREATE TABLE orders ({ORDERS})".encode())
            conn.execute("INSERT INTO orders SELECT i, i % 9, i * 1.5, 'first' FROM generate_series(1, 40) AS i")
        made = Tenants(server, home, template.name, f"t{home.name.rpartition('_')[2][:6]}")
        try:
            for i in range(number):
                made.create(i)
            with psycopg.connect(home.dsn, autocommit=True) as conn:
                conn.execute("CREATE TABLE plans (tenant text PRIMARY KEY, plan text)")
                conn.cursor().executemany(
                    "INSERT INTO plans VALUES (%s, %s)",
                    [(f"{made.prefix}_{i:02d}", f"p{i % 3}") for i in range(number + 5)],
                )
            yield made
        finally:
            for name in list(made.names):
                made.set_open(name, True)
                made.drop(name)
