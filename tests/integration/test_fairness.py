"""An overloaded service: every database and owner is served."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import psycopg

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from tests.support.database import TestDatabase, fresh_database
from tests.support.service import running_service, until

Connection = psycopg.Connection[Any]


def create(db: pgtrickle.Database, name: str, tier: str) -> None:
    """A stream table that is always due, whose refresh takes a tenth of a second and returns no rows for Spark."""
    query = "SELECT s.x FROM (SELECT slow() AS x, now() AS at OFFSET 0) AS s WHERE s.x = 0 AND s.at > '2000-01-01'"
    db.create_stream_table(name, query, schedule="100ms", refresh_mode="FULL", initialize=False)
    db.conn.execute("SELECT pgtrickle.alter_stream_table(%s, tier => %s)", (name, tier))


def refreshes(conn: Connection, name: str) -> int:
    row = conn.execute(
        "SELECT count(*) FROM pgtrickle.pgt_refresh_history WHERE pgt_name = %s AND status = 'COMPLETED'", (name,)
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_flood_of_urgent_units_does_not_starve_others(database: TestDatabase, server: EmbeddedServer) -> None:
    """Groups go before single stream tables, and hot ones before cold ones, but only for a while."""
    with ExitStack() as stack:
        second, third = (stack.enter_context(fresh_database(server, name)) for name in ("second", "third"))
        busy, cold, other = (
            stack.enter_context(pgtrickle.connect(one.direct_dsn)) for one in (database, second, third)
        )
        for db in (busy, cold, other):
            db.install()
            db.conn.execute("SELECT pgtrickle.set('max_dynamic_refresh_workers', '1')")
            db.conn.execute(
                "CREATE FUNCTION slow() RETURNS int LANGUAGE plpgsql STABLE AS"
                " 'BEGIN PERFORM pg_sleep(0.1); RETURN 1; END'"
            )
        for number in range(6):
            create(busy, f"hot{number}", "hot")
        for number in range(0, 6, 2):
            members = [f"hot{number}", f"hot{number + 1}"]
            busy.conn.execute("SELECT pgtrickle.create_refresh_group(%s, %s)", (f"g{number}", members))
        create(cold, "cold", "cold")
        create(busy, "beside", "cold")
        create(other, "warm", "warm")
        with running_service(database.dsn, database.name, second.name, third.name):
            until(lambda: all(refreshes(busy.conn, f"hot{number}") >= 2 for number in range(6)), "the flood")
            for db, name in ((cold, "cold"), (busy, "beside"), (other, "warm")):
                _refreshed_again(db.conn, name)


def _refreshed_again(conn: Connection, name: str) -> None:
    before = refreshes(conn, name)
    until(lambda: refreshes(conn, name) > before, f"a refresh of {name}")
