"""A copy of a database that other databases read: it does not keep changes for the readers of the original."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

import pgtrickle
from pgtrickle.cli.diagnostics import find_problems
from tests.support.database import TestDatabase
from tests.support.service import running_service, until

Connection = psycopg.Connection[Any]

CONSUMERS = "SELECT count(*) FROM pgtrickle.pgt_consumers"
TRACKED = "SELECT array_agg(source_relid::regclass::text ORDER BY 1) FROM pgtrickle.pgt_change_tracking"


@contextmanager
def copy_of(database: TestDatabase, name: str) -> Iterator[TestDatabase]:
    """A copy on the same server. No session may be connected to the database meanwhile."""
    copy = TestDatabase(database.server, f"{name}_{database.name[-8:]}")
    with psycopg.connect(database.server.dsn(), autocommit=True) as superuser:
        create = sql.SQL("CREATE DATABASE {} OWNER app TEMPLATE {}")
        superuser.execute(create.format(sql.Identifier(copy.name), sql.Identifier(database.name)))
        try:
            yield copy
        finally:
            superuser.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(copy.name)))


def value(conn: Connection, query: str) -> Any:
    row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def copies_found(conn: Connection) -> list[str]:
    return [finding.problem for finding in find_problems(conn, 1000) if finding.check == "copy"]


def test_a_copy_discards_the_readers_of_the_original(database: TestDatabase) -> None:
    with pgtrickle.connect(database.direct_dsn) as db:
        db.install()
        db.conn.execute("CREATE TABLE item (id int PRIMARY KEY, val int); CREATE TABLE other (id int PRIMARY KEY)")
        db.create_stream_table("here", "SELECT id FROM item", initialize=False)
        for table in ("item", "other"):
            db.conn.execute("SELECT pgtrickle._subscribe('7/8/9', 'elsewhere', %s::regclass, '{1}')", (table,))
        assert copies_found(db.conn) == []
    found = [f"is a copy of database {database.name}, and keeps changes for 2 readers of that one"]
    with copy_of(database, "by_hand") as copy, pgtrickle.connect(copy.dsn) as db:
        assert copies_found(db.conn) == found
        db.conn.execute("INSERT INTO item VALUES (1, 1); INSERT INTO other VALUES (1)")
        db.upgrade()
        assert copies_found(db.conn) == []
        assert value(db.conn, CONSUMERS) == 0
        assert value(db.conn, TRACKED) == ["item"], "what is read here is captured on"
        event = "SELECT payload - 'at' FROM pgtrickle.events() WHERE event = 'database_copied'"
        assert value(db.conn, event) == {"event": "database_copied", "original": database.name, "consumers": 2}
    with copy_of(database, "subscribed") as copy, pgtrickle.connect(copy.dsn) as db:
        # A reader of the copy comes before anybody has noticed that it is one.
        db.conn.execute("SELECT pgtrickle._subscribe('7/8/10', 'elsewhere', 'item'::regclass, '{1}')")
        assert value(db.conn, "SELECT array_agg(consumer) FROM pgtrickle.pgt_consumers") == ["7/8/10"]
    with copy_of(database, "served") as copy, psycopg.connect(copy.direct_dsn, autocommit=True) as conn:
        with running_service(copy.direct_dsn, copy.name):
            until(lambda: value(conn, CONSUMERS) == 0, "the service has noticed")
        assert copies_found(conn) == []
    with psycopg.connect(database.direct_dsn, autocommit=True) as conn:
        assert value(conn, CONSUMERS) == 2, "the original is as it was"
        assert copies_found(conn) == []
