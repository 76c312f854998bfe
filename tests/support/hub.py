"""A hub database whose tables are read by stream tables in several other databases: the use case of a broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
from psycopg import sql

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from tests.support.database import TestDatabase, fresh_database
from tests.support.oracle import assert_equal_to_query
from tests.support.service import until

Connection = psycopg.Connection[Any]

ITEMS = "id int PRIMARY KEY, kind int, price numeric(10,2), note text"
QUERIES = {
    "by_kind": "SELECT kind, count(*) AS n, sum(price) AS total FROM hub.public.items GROUP BY kind",
    "dear": "SELECT id, price * 2 AS twice, upper(note) AS note FROM hub.public.items WHERE price > 20",
    "named": "SELECT i.id, k.name FROM hub.public.items AS i JOIN kinds AS k ON k.kind = i.kind",
}
SCANS = (
    "SELECT coalesce(sum(seq_scan + coalesce(idx_scan, 0)), 0)::bigint FROM pg_stat_user_tables"
    " WHERE schemaname = 'pgtrickle_changes' AND relname LIKE 'changes\\_%'"
)


@dataclass
class Hub:
    """The hub, the home databases that read it, and a connection to each."""

    hub: TestDatabase
    homes: list[TestDatabase]
    conn: Connection
    home_conns: list[Connection]

    def change(self, number: int) -> None:
        """Make changes that affect every stream table."""
        with self.conn.transaction():
            self.conn.execute(
                "INSERT INTO items SELECT 1000 * %s + i, i %% 5, i * 1.5, 'n' || i FROM generate_series(1, 20) AS i",
                (number,),
            )
            self.conn.execute("UPDATE items SET price = price + 1 WHERE id %% 7 = %s %% 7", (number,))
            self.conn.execute("DELETE FROM items WHERE id %% 11 = %s %% 11", (number,))

    def scans(self) -> int:
        """The number of scans of change buffers in the server's statistics so far."""
        with psycopg.connect(self.hub.superuser_dsn, autocommit=True) as conn:
            row = conn.execute(SCANS).fetchone()
        assert row is not None
        return int(row[0])

    def await_exact(self) -> None:
        """Wait until every stream table equals its query over the hub's table, and assert it."""
        for conn in self.home_conns:
            self._load(conn)
            for name in QUERIES:
                until(partial(_same, conn, name), f"{name} of {conn.info.dbname}")
                assert_equal_to_query(conn, name, in_one(name))

    def _load(self, conn: Connection) -> None:
        conn.execute(f"CREATE TEMP TABLE IF NOT EXISTS oracle_items ({ITEMS}); TRUNCATE oracle_items".encode())
        with (
            self.conn.cursor().copy("COPY items TO STDOUT") as reader,
            conn.cursor().copy("COPY oracle_items FROM STDIN") as writer,
        ):
            for data in reader:
                writer.write(data)


def in_one(name: str) -> str:
    return QUERIES[name].replace("hub.public.items", "oracle_items")


def _same(conn: Connection, name: str) -> bool:
    stored, query = sql.Identifier(name), sql.SQL(in_one(name))
    row = conn.execute(
        sql.SQL("SELECT NOT EXISTS (TABLE {0} EXCEPT ALL ({1})) AND NOT EXISTS (({1}) EXCEPT ALL TABLE {0})").format(
            stored, query
        )
    ).fetchone()
    return row == (True,)


@contextmanager
def hub_with(server: EmbeddedServer, homes: int) -> Iterator[Hub]:
    """A hub and `homes` home databases, whose stream tables read it with the broker enabled."""
    with ExitStack() as stack:
        hub = stack.enter_context(fresh_database(server, "hub"))
        made = [stack.enter_context(fresh_database(server, f"home{i}")) for i in range(homes)]
        conn = stack.enter_context(psycopg.connect(hub.direct_dsn, autocommit=True))
        conns = [stack.enter_context(psycopg.connect(one.direct_dsn, autocommit=True)) for one in made]
        conn.execute(f"CREATE TABLE items ({ITEMS})".encode())
        conn.execute("INSERT INTO items SELECT i, i % 5, i, 'i' || i FROM generate_series(1, 60) AS i")
        with pgtrickle.connect(hub.dsn) as db:
            db.install()
        for one, home in zip(made, conns, strict=True):
            home.execute("CREATE TABLE kinds (kind int PRIMARY KEY, name text)")
            home.execute("INSERT INTO kinds SELECT i, 'k' || i FROM generate_series(0, 4) AS i")
            with pgtrickle.connect(one.dsn) as db:
                db.install()
                db.add_database("hub", hub.dsn)
                for name, query in QUERIES.items():
                    db.create_stream_table(name, query, schedule="1s")
            home.execute("SELECT pgtrickle.set('pg_trickle.enable_refresh_broker', 'on')")
        yield Hub(hub, made, conn, conns)
