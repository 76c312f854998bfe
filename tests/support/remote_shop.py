"""A shop in three databases: orders and customers, and items on a server of another version."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from tests.support.database import TestDatabase, fresh_database
from tests.support.oracle import assert_equal_to_query

Connection = psycopg.Connection[Any]

TABLES = {
    "home": ("orders", "id int PRIMARY KEY, customer int, item int, n int, day date"),
    "crm": ("customers", "id int PRIMARY KEY, region text, rank smallint, vip boolean"),
    "stock": ("items", "id int PRIMARY KEY, price numeric(10,2), kind text"),
}
FIRST = {
    "home": "SELECT i, i % 35, i % 25, i % 7, date '2026-01-01' + i FROM generate_series(1, 80) AS i",
    "crm": "SELECT i, 'r' || i % 4, i % 3, i % 2 = 0 FROM generate_series(1, 30) AS i",
    "stock": "SELECT i, i * 1.25, 'k' || i % 3 FROM generate_series(1, 20) AS i",
}
CHANGES = {
    "home": [
        "INSERT INTO orders SELECT (SELECT max(id) FROM orders) + i, {a}, {b}, i, date '2026-03-01' + i"
        " FROM generate_series(1, 4) AS i",
        "UPDATE orders SET customer = {a} WHERE id % 17 = {b} % 17",
        "UPDATE orders SET n = n + 1, item = {b} WHERE id = {a}",
        "DELETE FROM orders WHERE id = {b}",
    ],
    "crm": [
        "INSERT INTO customers SELECT (SELECT max(id) FROM customers) + i, 'r' || {a} % 5, NULL, true"
        " FROM generate_series(1, 2) AS i",
        "UPDATE customers SET region = 'r' || {b} % 5 WHERE id % 9 = {a} % 9",
        "UPDATE customers SET region = NULL WHERE id = {a}",
        "DELETE FROM customers WHERE id = {b}",
    ],
    "stock": [
        "INSERT INTO items SELECT (SELECT max(id) FROM items) + i, {a} + 0.5, NULL FROM generate_series(1, 2) AS i",
        "UPDATE items SET price = price + 0.75 WHERE id % 5 = {a} % 5",
        "UPDATE items SET kind = 'k1' WHERE id = {a}",
        "UPDATE items SET price = 'NaN' WHERE id = {b}",
        "DELETE FROM items WHERE id = {b}",
    ],
}
_CASES = tomllib.loads(
    (Path(__file__).parent.parent / "fixtures" / "remote_databases.toml").read_text(encoding="utf-8")
)
QUERIES: dict[str, str] = {name: case["query"].strip() for name, case in _CASES.items()}
READERS: dict[str, str] = {name: case["reads"] for name, case in _CASES.items() if "reads" in case}


def change(conn: Connection, name: str, chance: random.Random) -> None:
    """Run a few statements on the table of one database; those that meet a lock are skipped."""
    for statement in CHANGES[name]:
        if chance.random() < 0.6:
            with suppress(psycopg.errors.LockNotAvailable), conn.transaction():
                conn.execute("SET LOCAL lock_timeout = '100ms'")
                conn.execute(statement.format(a=chance.randrange(40), b=chance.randrange(40)).encode())


@dataclass
class RemoteShop:
    """The databases, a connection to each, and another database for copies of all tables."""

    databases: dict[str, TestDatabase]
    oracle: TestDatabase
    conns: dict[str, Connection] = field(default_factory=dict)

    @property
    def home(self) -> TestDatabase:
        return self.databases["home"]

    def reconnect(self) -> None:
        self.close()
        everywhere = self.databases | {"oracle": self.oracle}
        self.conns = {name: psycopg.connect(one.direct_dsn, autocommit=True) for name, one in everywhere.items()}

    def close(self) -> None:
        for conn in self.conns.values():
            conn.close()

    def load_oracle(self) -> None:
        """Copy what is committed in all databases into one."""
        to = self.conns["oracle"]
        for name, (table, columns) in TABLES.items():
            to.execute(f"DROP TABLE IF EXISTS {table} CASCADE; CREATE TABLE {table} ({columns})".encode())
            into = sql.SQL("COPY {} FROM STDIN").format(sql.Identifier(table))
            out = sql.SQL("COPY {} TO STDOUT").format(sql.Identifier(table))
            with (
                psycopg.connect(self.databases[name].dsn) as source,
                source.cursor().copy(out) as reader,
                to.cursor().copy(into) as writer,
            ):
                for data in reader:
                    writer.write(data)

    def assert_exact(self, *names: str) -> None:
        """Assert that these stream tables equal their queries over the tables that were loaded last."""
        for name in names:
            self._assert_exact(name)

    def _assert_exact(self, name: str) -> None:
        home, oracle = self.conns["home"], self.conns["oracle"]
        columns = home.execute(
            "SELECT quote_ident(attname), format_type(atttypid, atttypmod) FROM pg_attribute"
            " WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            (name,),
        ).fetchall()
        described = ", ".join(f"{column} {type_}" for column, type_ in columns)
        oracle.execute(f"DROP TABLE IF EXISTS stored; CREATE TABLE stored ({described})".encode())
        out = sql.SQL("COPY {} TO STDOUT").format(sql.Identifier(name))
        with home.cursor().copy(out) as reader, oracle.cursor().copy("COPY stored FROM STDIN") as writer:
            for data in reader:
                writer.write(data)
        assert_equal_to_query(oracle, "stored", in_one(name))


def in_one(name: str) -> str:
    """The query of a stream table, changed to read tables that are all in one database."""
    query = QUERIES[name]
    if name in READERS:
        query = query.replace(f"FROM {READERS[name]} ", f"FROM ({QUERIES[READERS[name]]}) ")
    return query.replace("crm.public.", "").replace("stock.public.", "")


@contextmanager
def open_remote_shop(server: EmbeddedServer, other_server: EmbeddedServer) -> Iterator[RemoteShop]:
    """Create and fill all databases; crm and stock are registered at home."""
    with (
        fresh_database(server, "home") as home,
        fresh_database(server, "crm") as crm,
        fresh_database(other_server, "stock") as stock,
        fresh_database(server, "oracle") as oracle,
    ):
        remote_shop = RemoteShop({"home": home, "crm": crm, "stock": stock}, oracle)
        remote_shop.reconnect()
        try:
            for name, (table, columns) in TABLES.items():
                remote_shop.conns[name].execute(f"CREATE TABLE {table} ({columns})".encode())
                remote_shop.conns[name].execute(f"INSERT INTO {table} {FIRST[name]}".encode())
                with pgtrickle.connect(remote_shop.databases[name].dsn) as db:
                    db.install()
            with pgtrickle.connect(home.dsn) as db:
                db.add_database("crm", crm.dsn)
                db.add_database("stock", stock.dsn)
            yield remote_shop
        finally:
            remote_shop.close()
