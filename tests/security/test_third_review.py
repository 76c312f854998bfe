"""Attacks that a third hostile review found."""

from __future__ import annotations

import threading

import psycopg
import pytest

import pgtrickle
from pgtrickle.refresh.compute import large
from tests.security.roles import Roles, Worker
from tests.support.oracle import assert_equal_to_query
from tests.support.service import until

pytestmark = pytest.mark.pgversions


def test_the_negator_of_an_operator_does_not_run_as_the_service(roles: Roles) -> None:
    """The rule of the query contains only a built-in function; the planner calls the negator's instead."""
    m = roles.mallory
    roles.sql(
        m,
        f"CREATE FUNCTION {m}.differ(int, int) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS"
        f" $$ BEGIN PERFORM {m}.evil(); RETURN $1 <> $2; END $$",
        f"CREATE OPERATOR {m}.!== (LEFTARG = int, RIGHTARG = int, FUNCTION = {m}.differ)",
        f"CREATE OPERATOR {m}.=== (LEFTARG = int, RIGHTARG = int, FUNCTION = pg_catalog.int4eq,"
        f" NEGATOR = OPERATOR({m}.!==))",
    )
    trap = roles.create(m, "trap", f"SELECT id, v FROM {m}.src WHERE NOT (v OPERATOR({m}.===) 1)")
    _change_and_refresh(roles, trap, f"INSERT INTO {m}.src VALUES ({{n}}, {{n}})")
    assert roles.ran_as() == {m}
    roles.assert_powerless()


def test_a_better_matching_operator_does_not_run_as_the_service(roles: Roles) -> None:
    m = roles.mallory
    roles.sql(
        m,
        f"CREATE TABLE {m}.lists (id int PRIMARY KEY, v int[])",
        f"CREATE OPERATOR {m}.=== (LEFTARG = anyarray, RIGHTARG = anyarray, FUNCTION = pg_catalog.array_eq)",
        f"CREATE FUNCTION {m}.same(int[], int[]) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS"
        f" $$ BEGIN PERFORM {m}.evil(); RETURN true; END $$",
    )
    insert = f"INSERT INTO {m}.lists VALUES ({{n}}, '{{{{1}}}}')"
    trap = roles.create(m, "trap", f"SELECT id, v FROM {m}.lists WHERE v OPERATOR({m}.===) ARRAY[1]")
    worker = Worker(roles.database.dsn)
    for n in range(4):
        if n == 2:
            roles.sql(m, f"CREATE OPERATOR {m}.=== (LEFTARG = int[], RIGHTARG = int[], FUNCTION = {m}.same)")
        roles.sql(m, insert.format(n=n))
        worker.refresh(roles.id_of(trap))
    worker.close()
    assert roles.ran_as() <= {m}
    roles.assert_powerless()


def _change_and_refresh(roles: Roles, name: str, change: str) -> None:
    worker = Worker(roles.database.dsn)
    for n in range(100, 103):
        roles.sql(roles.mallory, change.format(n=n))
        worker.refresh(roles.id_of(name))
    worker.close()


def test_a_large_refresh_does_not_block_spark_and_is_terminated(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mallory's code sleeps on the executors and traps its cancellation; alice's stream table is refreshed meanwhile."""
    alice, m = roles.alice, roles.mallory
    monkeypatch.setattr(large, "STATEMENT_SECONDS", 2.0)
    monkeypatch.setattr(large, "GRACE_SECONDS", 20.0)
    roles.sql(
        m,
        f"CREATE FUNCTION {m}.stubborn(v int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS"
        " $$ BEGIN LOOP BEGIN PERFORM pg_sleep(3600); EXCEPTION WHEN query_canceled THEN NULL; END; END LOOP; END $$",
        f"CREATE TABLE {m}.wide (id int PRIMARY KEY, t text)",
        f"ALTER TABLE {m}.wide ALTER t SET STORAGE PLAIN",
        f"INSERT INTO {m}.wide SELECT i, repeat('x', 4000) FROM generate_series(1, 15000) AS i",  # several parts
    )
    query = f"SELECT id, amount FROM {alice}.orders"
    mine = roles.create(alice, "mine", query)
    trap = roles.create(m, "trap", f"SELECT id, {m}.stubborn(id) AS v, t FROM {m}.wide")
    worker = Worker(roles.database.dsn)
    worker.refresh(roles.id_of(mine))

    def spring() -> None:
        with pgtrickle.connect(roles.database.dsn) as db:
            db.engine.reading.large = -1
            db.engine.attempt([roles.id_of(trap)], "SCHEDULE")

    sprung = threading.Thread(target=spring)
    sprung.start()
    reading = (
        f"SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'COPY%stubborn%' AND datname = '{roles.database.name}'"
    )
    with psycopg.connect(roles.database.superuser_dsn, autocommit=True) as superuser:
        until(lambda: superuser.execute(reading).fetchone() != (0,))
        roles.sql(alice, f"INSERT INTO {alice}.orders VALUES (900, 'k1', 1)")
        worker.refresh(roles.id_of(mine))
        with roles.connect(alice) as conn:
            assert_equal_to_query(conn, mine, query)
        assert superuser.execute(reading).fetchone() != (0,), "mallory's code had ended before"
    worker.close()
    sprung.join()
    assert roles.rows(
        roles.app, "SELECT status, status_reason FROM pgtrickle.pgt_stream_tables WHERE pgt_name = 'trap'"
    ) == [("SUSPENDED", "its code continued after it was canceled")]


def test_a_frozen_stream_table_does_not_keep_changes_of_others(roles: Roles) -> None:
    alice, m = roles.alice, roles.mallory
    roles.sql(alice, f"GRANT SELECT ON {alice}.orders TO {m}")
    mine = roles.create(alice, "mine", f"SELECT id, kind FROM {alice}.orders")
    hog = roles.create(m, "hog", f"SELECT id FROM {alice}.orders")
    roles.refresh(mine, hog)
    roles.sql(m, f"SELECT pgtrickle.alter_stream_table('{hog}', schedule => '3650d', tier => 'frozen')")
    roles.sql(roles.app, "SELECT pgtrickle.set('max_buffer_rows', '10000')")
    roles.sql(  # while a service is there, capture gives nobody up
        roles.app,
        "INSERT INTO pgtrickle.pgt_services (service_id, host, pid, version, kind, last_seen, lease_expires)"
        " SELECT gen_random_uuid(), 'h', 1, 'v', 'service', now() + interval '1 hour', now() + interval '1 hour'",
    )
    reason = "SELECT reinit_reason FROM pgtrickle.pgt_stream_tables WHERE pgt_name = 'hog'"
    with roles.service() as db, psycopg.connect(roles.database.superuser_dsn, autocommit=True) as superuser:

        def given_up() -> bool:
            roles.sql(alice, f"UPDATE {alice}.orders SET kind = 'a'")
            superuser.execute("SELECT pg_stat_force_next_flush()")
            db.refresh([mine])
            return roles.value(roles.app, reason) is not None

        roles.sql(alice, f"INSERT INTO {alice}.orders SELECT i, 'z', 1 FROM generate_series(100000, 120000) AS i")
        until(given_up)
        db.refresh([hog])
        with roles.connect(m) as conn:
            assert_equal_to_query(conn, hog, f"SELECT id FROM {alice}.orders")
    assert "not refreshed" in str(
        roles.value(
            roles.app, "SELECT max(reason) FROM pgtrickle.pgt_refresh_history AS h WHERE action = 'REINITIALIZE'"
        )
    )


def test_a_failing_stream_table_does_not_prevent_verification_of_others(roles: Roles) -> None:
    bob, m = roles.bob, roles.mallory
    roles.sql(
        m,
        f"CREATE FUNCTION {m}.boom(i int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS"
        " $$ BEGIN IF i > 1000 THEN RAISE 'boom %', i; END IF; RETURN i; END $$",
    )
    trap = roles.create(m, "trap", f"SELECT id, {m}.boom(v) AS v FROM {m}.src")
    mine = roles.create(bob, "mine", f"SELECT id, kind FROM {bob}.orders")
    roles.refresh(trap, mine)
    roles.sql(m, f"INSERT INTO {m}.src VALUES (2000, 2000)")
    with roles.service() as db:
        failed, equal = db.verify([trap, mine])
    assert (failed.name, failed.equal, failed.failed) == (trap, None, True)
    assert failed.reason is not None
    assert "boom 2000" in failed.reason
    assert (equal.name, equal.equal) == (mine, True)
