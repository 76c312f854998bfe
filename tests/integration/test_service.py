"""The running service: schedules, groups, errors, pauses, and several services at once."""

from __future__ import annotations

import json
import threading
from typing import Any

import psycopg
import pytest
from psycopg import sql

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.service.settings import Settings, read_settings
from tests.support.database import TestDatabase, fresh_database
from tests.support.oracle import assert_equal_to_query
from tests.support.service import fresh, running_service, until

Connection = psycopg.Connection[Any]

TOTALS = "SELECT grp, count(*) AS n, sum(val) AS total FROM item GROUP BY grp"


@pytest.fixture
def shop(database: TestDatabase, conn: Connection) -> Connection:
    prepare(database.dsn)
    return conn


def prepare(dsn: str) -> None:
    with pgtrickle.connect(dsn) as db:
        db.install()
        db.conn.execute("CREATE TABLE item (id int PRIMARY KEY, grp int, val int)")
        db.conn.execute("INSERT INTO item SELECT i, i % 5, i FROM generate_series(1, 60) AS i")


def create(conn: Connection, name: str, query: str, schedule: str = "100ms", **options: object) -> None:
    conn.execute("SELECT pgtrickle.create_stream_table(%s, %s, %s)", (name, query, schedule))
    for option, value in options.items():
        alter = sql.SQL("SELECT pgtrickle.alter_stream_table({}, {} => {})")
        conn.execute(alter.format(sql.Literal(name), sql.Identifier(option), sql.Literal(value)))


def value(conn: Connection, query: str, *parameters: object) -> Any:
    row = conn.execute(query.encode(), parameters or None).fetchone()
    return row[0] if row is not None else None


def state(conn: Connection, name: str) -> tuple[str, str | None]:
    row = conn.execute(
        "SELECT status, status_reason FROM pgtrickle.pgt_stream_tables WHERE pgt_name = %s", (name,)
    ).fetchone()
    assert row is not None
    return row[0], row[1]


def test_a_setting_changed_while_a_scheduler_connects_takes_effect(
    database: TestDatabase, shop: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session keeps the settings it started with: they may be older than those that the scheduler has read."""
    changed: list[str] = []

    def read_changed(conn: Connection) -> Settings:
        if not changed:  # the scheduler's session has begun
            with psycopg.connect(database.superuser_dsn, autocommit=True) as superuser:
                superuser.execute(f"ALTER DATABASE {database.name} RESET ALL".encode())
            changed.append(value(shop, "SELECT pgtrickle.set('pg_trickle.enabled', 'off')"))
        return read_settings(conn)

    with psycopg.connect(database.superuser_dsn, autocommit=True) as superuser:
        superuser.execute(f"ALTER DATABASE {database.name} SET pg_trickle.enabled = on".encode())
    monkeypatch.setattr("pgtrickle.service.scheduler.read_settings", read_changed)
    with running_service(database.dsn, database.name) as service:
        until(lambda: changed and service.launchers[0].databases[database.name].problem == "pg_trickle.enabled is off")


@pytest.mark.direct("PgBouncer keeps its connections")
@pytest.mark.pgversions
def test_stream_tables_are_filled_and_follow_their_sources(database: TestDatabase, shop: Connection) -> None:
    with running_service(database.dsn, database.name):
        create(shop, "totals", TOTALS)
        create(shop, "large", "SELECT id, grp FROM item WHERE val > 30")
        until(lambda: value(shop, "SELECT count(*) FROM pgtrickle.pgt_stream_tables WHERE status = 'ACTIVE'") == 2)
        for statement in (
            "INSERT INTO item SELECT i, 9, i FROM generate_series(100, 120) AS i",
            "UPDATE item SET grp = grp + 1 WHERE id % 7 = 0",
            "DELETE FROM item WHERE val BETWEEN 20 AND 40",
        ):
            shop.execute(statement.encode())
            fresh(shop, "totals", "large")
            assert_equal_to_query(shop, "totals", TOTALS)
            assert_equal_to_query(shop, "large", "SELECT id, grp FROM item WHERE val > 30")
        assert value(shop, "SELECT pgtrickle.get_staleness('totals')") == 0
        kinds = {row[0] for row in shop.execute("SELECT initiated_by FROM pgtrickle.pgt_refresh_history")}
        assert kinds <= {"REQUEST", "SCHEDULE"}
        # What changed nothing leaves no history.
        assert (
            value(
                shop,
                "SELECT count(*) FROM pgtrickle.pgt_refresh_history WHERE action = 'NO_DATA' AND initiated_by = 'SCHEDULE'",
            )
            == 0
        )
    assert value(shop, "SELECT count(*) FROM pgtrickle.pgt_services") == 0
    left = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'pgtrickle %'"
    until(lambda: value(shop, left) == 0, "the end of all connections")


def test_a_change_reaches_the_end_of_a_chain(database: TestDatabase, shop: Connection) -> None:
    depth = 20
    with running_service(database.dsn, database.name):
        create(shop, "s0", TOTALS)
        for i in range(1, depth):
            create(shop, f"s{i}", f"SELECT grp, n, total + 1 AS total FROM s{i - 1}", "calculated")
        shop.execute("UPDATE item SET val = val + 100 WHERE grp = 3")
        fresh(shop, f"s{depth - 1}")
        query = f"SELECT grp, count(*) AS n, sum(val) + {depth - 1} AS total FROM item GROUP BY grp"
        assert_equal_to_query(shop, f"s{depth - 1}", query)


@pytest.mark.direct("groups are refreshed level by level behind one")
def test_readers_of_a_diamond_never_see_a_partial_change(database: TestDatabase, shop: Connection) -> None:
    half = "SELECT grp, sum(val) AS total FROM item WHERE id % 2 = {} GROUP BY grp"
    create(shop, "even", half.format(0))
    create(shop, "odd", half.format(1))
    create(
        shop,
        "merged",
        "SELECT coalesce(sum(e.total), 0) AS even, coalesce(sum(o.total), 0) AS odd"
        " FROM even AS e FULL JOIN odd AS o USING (grp)",
    )
    seen: set[tuple[Any, ...]] = set()
    over = threading.Event()

    def look() -> None:
        with psycopg.connect(database.direct_dsn, autocommit=True) as reader:
            while not over.is_set():
                row = reader.execute(
                    "SELECT (SELECT sum(total) FROM even), (SELECT sum(total) FROM odd), even, odd FROM merged"
                ).fetchone()
                if row is not None:
                    seen.add(row)

    with running_service(database.dsn, database.name):
        fresh(shop, "merged")
        watching = threading.Thread(target=look)
        watching.start()
        for i in range(6):
            # Each adds the same to both halves.
            shop.execute("INSERT INTO item VALUES (%s, 1, 10), (%s, 1, 10)", (1000 + 2 * i, 1001 + 2 * i))
            fresh(shop, "merged")
        over.set()
        watching.join()
    assert len(seen) >= 3, "the reader saw several states"
    difference = value(shop, "SELECT sum(val) FILTER (WHERE id % 2 = 0) - sum(val) FILTER (WHERE id % 2 = 1) FROM item")
    for even, odd, even_in_both, odd_in_both in seen:
        assert (even, odd) == (even_in_both, odd_in_both)
        assert even - odd == difference
    assert value(shop, "SELECT count(*) FROM pgtrickle.pgt_jobs WHERE kind = 'GROUP' AND status = 'SUCCEEDED'") >= 3


@pytest.mark.direct("groups are refreshed level by level behind one")
def test_readers_of_a_requested_group_never_see_a_partial_transfer(database: TestDatabase, shop: Connection) -> None:
    """Two tables that are related only by the transactions that write both."""
    balances = "SELECT count(*) AS n, sum(amount) AS total FROM {}"
    for name, table in (("here", "account_1"), ("there", "account_2")):
        shop.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, amount int)".encode())
        shop.execute(f"INSERT INTO {table} SELECT i, 100 FROM generate_series(1, 50) AS i".encode())
        create(shop, name, balances.format(table))
    shop.execute("SELECT pgtrickle.create_refresh_group('money', ARRAY['here', 'there'])")
    seen: set[tuple[Any, ...]] = set()
    over = threading.Event()

    def look() -> None:
        with psycopg.connect(database.direct_dsn, autocommit=True) as reader:
            while not over.is_set():
                row = reader.execute("SELECT h.total, t.total FROM here AS h, there AS t").fetchone()
                if row is not None:
                    seen.add(row)

    with running_service(database.dsn, database.name):
        fresh(shop, "here", "there")
        watching = threading.Thread(target=look)
        watching.start()
        for i in range(1, 7):
            with shop.transaction():
                shop.execute("UPDATE account_1 SET amount = amount - 7 WHERE id = %s", (i,))
                shop.execute("UPDATE account_2 SET amount = amount + 7 WHERE id = %s", (i,))
            fresh(shop, "here", "there")
        over.set()
        watching.join()
    assert len(seen) >= 3, "the reader saw several states"
    assert {here + there for here, there in seen} == {10_000}


def test_a_failing_stream_table_is_suspended_and_the_others_continue(database: TestDatabase, shop: Connection) -> None:
    with (
        running_service(database.dsn, database.name),
        psycopg.connect(database.direct_dsn, autocommit=True) as listener,
    ):
        listener.execute("LISTEN pgtrickle_alert")
        create(shop, "totals", TOTALS)
        create(shop, "broken", "SELECT id, 1 / (val - 1000) AS x FROM item")
        fresh(shop, "totals", "broken")
        shop.execute("INSERT INTO item VALUES (5000, 1, 1000)")
        until(lambda: state(shop, "broken")[0] == "SUSPENDED")
        assert "division by zero" in (state(shop, "broken")[1] or "")
        fresh(shop, "totals")
        assert_equal_to_query(shop, "totals", TOTALS)
        events = [json.loads(notice.payload)["event"] for notice in listener.notifies(timeout=2)]
        assert "auto_suspended" in events
        stored = {
            row[0] for row in shop.execute("SELECT event FROM pgtrickle.events() WHERE channel = 'pgtrickle_alert'")
        }
        assert {"refresh_failed", "auto_suspended"} <= stored
        assert value(shop, "SELECT severity FROM pgtrickle.health_check() WHERE check_name = 'suspended'") != "OK"
        shop.execute("DELETE FROM item WHERE id = 5000")
        shop.execute("SELECT pgtrickle.resume_stream_table('broken')")
        fresh(shop, "broken")
        assert_equal_to_query(shop, "broken", "SELECT id, 1 / (val - 1000) AS x FROM item")


def test_a_locked_source_delays_only_its_readers(database: TestDatabase, shop: Connection) -> None:
    shop.execute("CREATE TABLE other (id int PRIMARY KEY)")
    with running_service(database.dsn, database.name):
        create(shop, "totals", TOTALS)
        create(shop, "others", "SELECT id FROM other")
        fresh(shop, "totals", "others")
        with psycopg.connect(database.direct_dsn) as blocker:
            blocker.execute("INSERT INTO item VALUES (7000, 1, 1)")
            blocker.execute("LOCK TABLE item")
            shop.execute(
                "INSERT INTO pgtrickle_changes.pgt_activity SELECT source_stable_name, pg_current_xact_id()::text::bigint"
                " FROM pgtrickle.pgt_change_tracking WHERE source_relid = 'item'::regclass"
            )
            until(
                lambda: value(
                    shop,
                    "SELECT count(*) FROM pgtrickle.pgt_refresh_history WHERE error LIKE '%locked by another session%'",
                )
            )
            shop.execute("INSERT INTO other VALUES (1)")
            fresh(shop, "others")
            assert state(shop, "totals") == ("ACTIVE", None), "a lock is no reason to suspend"
        fresh(shop, "totals")
        assert_equal_to_query(shop, "totals", TOTALS)


def test_a_fuse_stops_a_flood_until_an_operator_decides(database: TestDatabase, shop: Connection) -> None:
    with running_service(database.dsn, database.name):
        create(shop, "totals", TOTALS, fuse_ceiling=50)
        fresh(shop, "totals")
        shop.execute("INSERT INTO item SELECT i, 1, 1 FROM generate_series(1000, 1100) AS i")
        until(lambda: state(shop, "totals")[0] == "SUSPENDED")
        assert "fuse" in (state(shop, "totals")[1] or "")
        assert value(shop, "SELECT count(*) FROM pgtrickle.fuse_status() WHERE blown_at IS NOT NULL") == 1
        with pytest.raises(psycopg.errors.FeatureNotSupported):
            shop.execute("SELECT pgtrickle.reset_fuse('totals', 'skip_changes')")
        shop.execute("SELECT pgtrickle.reset_fuse('totals')")
        fresh(shop, "totals")
        assert_equal_to_query(shop, "totals", TOTALS)


def test_pause_drain_and_resume(database: TestDatabase, shop: Connection) -> None:
    with running_service(database.dsn, database.name):
        create(shop, "totals", TOTALS)
        fresh(shop, "totals")
        shop.execute("CALL pgtrickle.drain('1 minute')")
        shop.execute("INSERT INTO item VALUES (900, 1, 1)")
        with pytest.raises(psycopg.errors.QueryCanceled):
            shop.execute("CALL pgtrickle.wait_until_fresh('totals', '1 second')")
        assert value(shop, "SELECT scheduler_status FROM pgtrickle.health_summary()") == "PAUSED"
        shop.execute("SELECT pgtrickle.resume()")
        fresh(shop, "totals")
        assert_equal_to_query(shop, "totals", TOTALS)


def test_an_attached_partition_is_noticed_without_a_change(database: TestDatabase, shop: Connection) -> None:
    shop.execute("CREATE TABLE log (id int, day int) PARTITION BY LIST (day)")
    shop.execute("CREATE TABLE log_1 PARTITION OF log FOR VALUES IN (1)")
    shop.execute("CREATE TABLE log_2 AS SELECT i AS id, 2 AS day FROM generate_series(1, 10) AS i")
    query = "SELECT day, count(*) AS n FROM log GROUP BY day"
    with running_service(database.dsn, database.name):
        create(shop, "days", query)
        fresh(shop, "days")
        shop.execute("ALTER TABLE log ATTACH PARTITION log_2 FOR VALUES IN (2)")
        until(lambda: value(shop, "SELECT n FROM days WHERE day = 2") == 10)
        assert_equal_to_query(shop, "days", query)


def test_time_dependent_queries_are_refreshed_on_schedule(database: TestDatabase, shop: Connection) -> None:
    with running_service(database.dsn, database.name):
        create(shop, "clock", "SELECT max(id) AS id, now() AS at FROM item", refresh_mode="FULL")
        until(lambda: value(shop, "SELECT at FROM clock") is not None)
        first = value(shop, "SELECT at FROM clock")
        until(lambda: value(shop, "SELECT at FROM clock") > first)


@pytest.mark.direct("PgBouncer's connections keep the settings that they began with")
def test_settings_are_reloaded_and_invalid_ones_logged(database: TestDatabase, shop: Connection) -> None:
    with running_service(database.dsn, database.name) as service:
        shop.execute("SELECT pgtrickle.set('max_dynamic_refresh_workers', '7')")
        until(lambda: service.pool.size == 7)
        until(lambda: value(shop, "SELECT max_workers FROM pgtrickle.worker_pool_status()") == 7)
        with psycopg.connect(database.superuser_dsn, autocommit=True) as admin:
            admin.execute(
                sql.SQL("ALTER DATABASE {} SET pg_trickle.scheduler_interval_ms = 'often'").format(
                    sql.Identifier(database.name)
                )
            )
            until(
                lambda: (
                    value(shop, "SELECT severity FROM pgtrickle.health_check() WHERE check_name = 'settings'") != "OK"
                )
            )
            admin.execute(
                sql.SQL("ALTER DATABASE {} SET pg_trickle.enabled = off").format(sql.Identifier(database.name))
            )
            until(lambda: service.launchers[0].databases[database.name].problem == "pg_trickle.enabled is off")
            admin.execute(sql.SQL("ALTER DATABASE {} RESET ALL").format(sql.Identifier(database.name)))
        create(shop, "totals", TOTALS)
        fresh(shop, "totals")


def test_a_scheduler_that_keeps_crashing_is_reported_in_the_database(database: TestDatabase, shop: Connection) -> None:
    # Between two attempts no service looks after it; during one there is a service, in trouble.
    health = (
        "SELECT string_agg(detail, '; ') FROM pgtrickle.health_check() WHERE check_name IN ('service', 'scheduler')"
    )
    with running_service(database.dsn, database.name) as service:
        until(lambda: value(shop, "SELECT services FROM pgtrickle.health_summary()") == 1)
        shop.execute("ALTER FUNCTION pgtrickle._tier(text, timestamptz) RENAME TO _gone")
        until(lambda: "function pgtrickle._tier" in value(shop, health))
        watched = service.launchers[0].databases[database.name]
        assert watched.tended is not None
        assert watched.tended.counters.crashes >= 2
        shop.execute("ALTER FUNCTION pgtrickle._gone(text, timestamptz) RENAME TO _tier")
        create(shop, "totals", TOTALS)
        fresh(shop, "totals")


@pytest.mark.direct("the server names PgBouncer's connections, not the service's")
def test_two_databases_are_independent(database: TestDatabase, server: EmbeddedServer, shop: Connection) -> None:
    with fresh_database(server, "second") as second, psycopg.connect(second.direct_dsn, autocommit=True) as there:
        prepare(second.dsn)
        with running_service(database.dsn, database.name, second.name), psycopg.connect(database.direct_dsn) as blocker:
            create(shop, "totals", TOTALS)
            create(there, "totals", TOTALS)
            fresh(shop, "totals")
            blocker.execute("LOCK TABLE pgtrickle.pgt_stream_tables")  # nothing at all can be done in the first
            there.execute("INSERT INTO item VALUES (800, 1, 1)")
            fresh(there, "totals")
            assert_equal_to_query(there, "totals", TOTALS)
            blocker.rollback()
            shop.execute("INSERT INTO item VALUES (800, 1, 1)")
            fresh(shop, "totals")
            assert_equal_to_query(shop, "totals", TOTALS)
            where = {
                row[0]
                for row in there.execute(
                    "SELECT DISTINCT database FROM pgtrickle.server_worker_inventory WHERE role = 'scheduler'"
                )
            }
            assert {database.name, second.name} <= where


def test_two_services_share_the_work_and_do_nothing_twice(database: TestDatabase, shop: Connection) -> None:
    names = [f"t{i}" for i in range(6)]
    with running_service(database.dsn, database.name), running_service(database.dsn, database.name):
        for name in names:
            create(shop, name, TOTALS)
        for i in range(8):
            shop.execute("INSERT INTO item VALUES (%s, 1, 1)", (2000 + i,))
            fresh(shop, *names[:2])
        fresh(shop, *names)
        for name in names:
            assert_equal_to_query(shop, name, TOTALS)
        # Each change was applied by one of them: no two refreshes of a stream table began at one frontier.
        twice = (
            "SELECT pgt_id, frontier ->> 'snapshot' FROM pgtrickle.pgt_refresh_history"
            " WHERE action = 'DIFFERENTIAL' GROUP BY 1, 2 HAVING count(*) > 1"
        )
        assert shop.execute(twice).fetchall() == []
        assert value(shop, "SELECT count(DISTINCT service_id) FROM pgtrickle.pgt_services WHERE kind = 'service'") == 2


def test_a_long_interval_does_not_lose_the_lease(database: TestDatabase, shop: Connection) -> None:
    with running_service(database.dsn, database.name, lease_seconds=2):
        until(lambda: value(shop, "SELECT count(*) FROM pgtrickle.pgt_services") == 1)
        shop.execute("SELECT pgtrickle.set('scheduler_interval_ms', '12000')")
        until(lambda: value(shop, "SELECT settings ->> 'scheduler_interval_ms' FROM pgtrickle.pgt_services") == "12000")
        seen = value(shop, "SELECT last_seen FROM pgtrickle.pgt_services")
        later = "SELECT last_seen > %s + interval '3 seconds' FROM pgtrickle.pgt_services"
        until(lambda: value(shop, later, seen), "a renewal after more than a lease")
        assert value(shop, "SELECT lease_expires > clock_timestamp() FROM pgtrickle.pgt_services") is True
        # A request is heard all the same.
        create(shop, "totals", TOTALS)
        fresh(shop, "totals")
