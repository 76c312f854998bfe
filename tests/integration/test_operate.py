"""The SQL functions for operators: their results are compared with rows of the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from pgtrickle.catalog.install import install
from pgtrickle.refresh.failures import Kind
from tests.support.database import TestDatabase
from tests.support.standby import await_replay, standby_of

pytestmark = pytest.mark.pgversions

Connection = psycopg.Connection[Any]

CHECKS = [
    "service", "scheduler", "settings", "suspended", "failing", "stale", "fuses", "change_buffers", "held_back_xmin",
    "capture", "requests",
]  # fmt: skip

FRONTIER = (
    "jsonb_build_object('node', (SELECT c.system_identifier || '/' || d.oid FROM pg_control_system() c"
    " JOIN pg_database d ON d.datname = current_database()), 'snapshot', pg_current_snapshot()::text)"
)


def rows(conn: Connection, query: str, parameters: list[Any] | None = None) -> list[dict[str, Any]]:
    return conn.cursor(row_factory=dict_row).execute(query.encode(), parameters).fetchall()


def one(conn: Connection, query: str, parameters: list[Any] | None = None) -> dict[str, Any]:
    (row,) = rows(conn, query, parameters)
    return row


def value(conn: Connection, query: str, parameters: list[Any] | None = None) -> Any:
    (found,) = one(conn, query, parameters).values()
    return found


def create(conn: Connection, name: str, query: str, **options: Any) -> int:
    arguments = "".join(f", {option} => %({option})s" for option in options)
    row = conn.execute(
        f"SELECT pgtrickle.create_stream_table(%(name)s, %(query)s, initialize => false{arguments})",
        {"name": name, "query": query, **options},
    ).fetchone()
    assert row is not None
    return int(row[0])


def fill(conn: Connection, pgt_id: int, ago: str = "0 s") -> None:
    """The state after a refresh that saw everything up to now; `ago` makes it older."""
    conn.execute(
        f"UPDATE pgtrickle.pgt_stream_tables SET frontier = {FRONTIER}, status = 'ACTIVE', reinit_reason = NULL,"
        " data_timestamp = clock_timestamp() - %s::interval WHERE pgt_id = %s",
        [ago, pgt_id],
    )


def service(conn: Connection, **columns: Any) -> UUID:
    """The row of a live service, with other values if given."""
    service_id = uuid4()
    conn.execute(
        "INSERT INTO pgtrickle.pgt_services (service_id, host, pid, version) VALUES (%s, 'there', 4711, '0')",
        [service_id],
    )
    for column, content in columns.items():
        conn.execute(
            psycopg.sql.SQL("UPDATE pgtrickle.pgt_services SET {} = %s WHERE service_id = %s").format(
                psycopg.sql.Identifier(column)
            ),
            [content, service_id],
        )
    return service_id


def tick(conn: Connection, service_id: UUID, ago: str = "0 s") -> None:
    conn.execute(
        "UPDATE pgtrickle.pgt_services SET ticked_at = clock_timestamp() - %s::interval,"
        " tick_snapshot = pg_current_snapshot() WHERE service_id = %s",
        [ago, service_id],
    )


def job(conn: Connection, service_id: UUID, status: str, ids: list[int], **ago: str) -> int:
    """A job with these times in the past; times that are not given are unknown."""
    return int(
        value(
            conn,
            "INSERT INTO pgtrickle.pgt_jobs (service_id, kind, pgt_ids, status, worker, worker_pid, enqueued_at, started_at,"
            " finished_at) VALUES (%s, 'FUSED', %s, %s, 'worker 1', 99, clock_timestamp() - %s::interval,"
            " clock_timestamp() - %s::interval, clock_timestamp() - %s::interval) RETURNING job_id",
            [service_id, ids, status, ago.get("enqueued", "0 s"), ago.get("started"), ago.get("finished")],
        )
    )


def history(conn: Connection, pgt_id: int, status: str, milliseconds: int = 0, **columns: Any) -> None:
    conn.execute(
        "INSERT INTO pgtrickle.pgt_refresh_history (pgt_id, pgt_schema, pgt_name, start_time, end_time, status, action,"
        " rows_inserted, rows_deleted, error, sqlstate, kind) SELECT pgt_id, pgt_schema, pgt_name, now(),"
        " now() + make_interval(secs => %(ms)s / 1000.0), %(status)s, %(action)s, %(inserted)s, %(deleted)s, %(error)s,"
        " %(sqlstate)s, %(kind)s FROM pgtrickle.pgt_stream_tables WHERE pgt_id = %(id)s",
        {"ms": milliseconds, "status": status, "id": pgt_id, "action": None, "inserted": None, "deleted": None,
         "error": None, "sqlstate": None, "kind": None, **columns},
    )  # fmt: skip


def attach(database: TestDatabase, setting: str) -> None:
    """ALTER DATABASE … SET, which requires a superuser for settings that no extension has declared."""
    with psycopg.connect(database.superuser_dsn, autocommit=True) as superuser:
        superuser.execute(f"ALTER DATABASE {database.name} SET {setting}".encode())


def check(conn: Connection, name: str) -> dict[str, Any]:
    found = rows(conn, "SELECT * FROM pgtrickle.health_check()")
    assert [row["check_name"] for row in found] == CHECKS
    return next(row for row in found if row["check_name"] == name)


@pytest.fixture
def shop(conn: Connection) -> Connection:
    """Two tables, in a database whose catalog belongs to the same role."""
    install(conn)
    conn.execute("CREATE SCHEMA shop")
    conn.execute("SET search_path = shop")
    conn.execute("CREATE TABLE orders (id int PRIMARY KEY, customer int, amount int)")
    conn.execute("CREATE TABLE customers (id int PRIMARY KEY, name text)")
    return conn


@pytest.fixture
def visitor(database: TestDatabase, shop: Connection) -> Iterator[Connection]:
    """A role without privileges."""
    with psycopg.connect(database.direct_dsn_as(database.create_role("visitor")), autocommit=True) as conn:
        yield conn


# The pool


def test_the_pool_without_a_service_shows_the_settings(shop: Connection) -> None:
    shop.execute("SELECT pgtrickle.set('max_dynamic_refresh_workers', '7')")
    status = one(shop, "SELECT * FROM pgtrickle.worker_pool_status()")
    assert status == {"active_workers": 0, "max_workers": 7, "per_db_cap": 4, "parallel_mode": "on"}


def test_the_pool_counts_jobs_here_and_workers_elsewhere(shop: Connection) -> None:
    totals = create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    first = service(shop, pool_size=8, pool_active=3)
    second = service(shop, pool_size=4, pool_active=0)
    by_hand = service(shop, kind="refresh", pool_active=9)
    gone = service(shop, pool_size=64, pool_active=64, lease_expires="-infinity")
    for owner in (first, second, second, by_hand, gone):
        job(shop, owner, "RUNNING", [totals], started="1 s")
    job(shop, first, "QUEUED", [totals])
    status = one(shop, "SELECT * FROM pgtrickle.worker_pool_status()")
    # 1 here and 2 elsewhere, 2 that the tick has not told yet, 1 by hand.
    assert (status["active_workers"], status["max_workers"]) == (6, 12)


def test_settings_are_those_of_the_service_not_of_the_session(shop: Connection) -> None:
    used = {"per_database_worker_quota": "3", "max_concurrent_refreshes": "5", "parallel_refresh_mode": "off"}
    running = service(shop, settings=Jsonb(used))
    shop.execute("SET pg_trickle.per_database_worker_quota = 9")
    shop.execute("SET pg_trickle.parallel_refresh_mode = 'on'")
    status = one(shop, "SELECT * FROM pgtrickle.worker_pool_status()")
    assert (status["per_db_cap"], status["parallel_mode"]) == (1, "off")
    for more, cap in (({"parallel_refresh_mode": "on"}, 3), ({"per_database_worker_quota": "0"}, 5)):
        shop.execute(
            "UPDATE pgtrickle.pgt_services SET settings = settings || %s WHERE service_id = %s", [Jsonb(more), running]
        )
        assert value(shop, "SELECT per_db_cap FROM pgtrickle.worker_pool_status()") == cap


def test_jobs_are_shown_while_unfinished_and_for_a_time_after(shop: Connection) -> None:
    totals = create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    names = create(shop, "names", "SELECT name FROM customers")
    running = service(shop)
    job(shop, running, "SUCCEEDED", [names], enqueued="9 min", started="8 min", finished="7 min")
    done = job(shop, running, "SUCCEEDED", [totals, names], enqueued="5 s", started="4 s", finished="2 s")
    works = job(shop, running, "RUNNING", [totals], enqueued="2 h", started="1 h")
    waits = job(shop, running, "QUEUED", [names, 987654], enqueued="1 s")
    found = {row["job_id"]: row for row in rows(shop, "SELECT * FROM pgtrickle.parallel_job_status(300)")}
    assert list(found) == [waits, works, done]
    assert found[done]["stream_tables"] == "shop.totals, shop.names"
    assert found[waits]["stream_tables"] == "shop.names, (dropped, id 987654)"
    assert found[done]["duration_ms"] == pytest.approx(2000, abs=100)
    assert found[works]["duration_ms"] > 3_599_000
    assert found[waits]["duration_ms"] is None
    assert (found[done]["kind"], found[done]["worker"], found[done]["worker_pid"]) == ("FUSED", "worker 1", 99)
    assert value(shop, "SELECT count(*) FROM pgtrickle.parallel_job_status(3600)") == 4
    assert value(shop, "SELECT count(*) FROM pgtrickle.parallel_job_status(5) WHERE status = 'QUEUED'") == 1


def test_jobs_of_a_service_that_is_gone_have_failed(shop: Connection) -> None:
    names = create(shop, "names", "SELECT name FROM customers")
    gone = service(shop)
    job(shop, gone, "QUEUED", [names])
    shop.execute("UPDATE pgtrickle.pgt_services SET lease_expires = clock_timestamp() - interval '1 min'")
    (lost,) = rows(shop, "SELECT * FROM pgtrickle.parallel_job_status()")
    assert (lost["status"], lost["error"]) == ("FAILED", "its service is gone")
    assert rows(shop, "SELECT * FROM pgtrickle.parallel_job_status(30)") == []


def test_the_inventory_has_connections_of_all_databases(
    database: TestDatabase, shop: Connection, visitor: Connection
) -> None:
    running = service(shop)
    gone = service(shop, kind="refresh", lease_expires="-infinity")
    with (
        psycopg.connect(database.direct_dsn, application_name="pgtrickle scheduler") as scheduler,
        psycopg.connect(database.direct_dsn, application_name="pgtrickle worker 3") as worker,
        psycopg.connect(database.server.dsn("postgres"), application_name="pgtrickle launcher") as launcher,
        psycopg.connect(database.direct_dsn, application_name="pgtrickle demo writer") as other,
    ):
        for conn in (shop, visitor):
            found = {
                row["pid"]: (row["database"], row["role"], row["name"], row["service"])
                for row in rows(
                    conn, "SELECT * FROM pgtrickle.server_worker_inventory WHERE state IS DISTINCT FROM 'gone'"
                )
            }
            assert found == {
                scheduler.info.backend_pid: (database.name, "scheduler", "pgtrickle scheduler", str(running)),
                worker.info.backend_pid: (database.name, "worker", "pgtrickle worker 3", str(running)),
                launcher.info.backend_pid: ("postgres", "launcher", "pgtrickle launcher", None),
                other.info.backend_pid: (database.name, "other", "pgtrickle demo writer", None),
                4711: (database.name, "other", "service on there", str(running)),
            }
    left = one(shop, "SELECT * FROM pgtrickle.server_worker_inventory WHERE state = 'gone'")
    assert (left["service"], left["name"]) == (str(gone), "refresh on there")


# Freshness


def test_staleness_is_zero_without_pending_changes(shop: Connection) -> None:
    totals = create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    assert value(shop, "SELECT pgtrickle._staleness(%s)", [totals]) is None
    fill(shop, totals, ago="1 h")
    assert value(shop, "SELECT pgtrickle._staleness(%s)", [totals]) == 0
    shop.execute("INSERT INTO customers VALUES (1, 'not read by it')")
    assert value(shop, "SELECT pgtrickle._staleness(%s)", [totals]) == 0


def test_a_change_counts_from_its_capture_and_from_ticks_that_did_not_see_it(shop: Connection) -> None:
    totals = create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    staleness = "SELECT pgtrickle._staleness(%s)"
    fill(shop, totals, ago="1 h")
    tick(shop, service(shop), ago="10 min")
    late = service(shop)
    tick(shop, late, ago="1 min")
    shop.execute("INSERT INTO orders VALUES (1, 1, 1)")
    assert value(shop, staleness, [totals]) < 30  # the first change after an hour
    # As if the statement had run two minutes ago, in a transaction that was committed later.
    shop.execute("UPDATE pgtrickle_changes.pgt_activity SET captured_at = clock_timestamp() - interval '2 min'")
    assert value(shop, staleness, [totals]) == pytest.approx(60, abs=30)
    shop.execute(
        "UPDATE pgtrickle.pgt_services SET earlier_ticks = ARRAY[ticked_at], earlier_snapshots = ARRAY[tick_snapshot]"
    )
    tick(shop, late)  # it has seen the change; the one before has not
    assert value(shop, staleness, [totals]) == pytest.approx(60, abs=30)
    shop.execute("DELETE FROM pgtrickle.pgt_services")
    assert value(shop, staleness, [totals]) == pytest.approx(120, abs=30)


def test_polled_and_re_initializing_stream_tables_are_as_stale_as_their_rows(shop: Connection) -> None:
    totals = create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    fill(shop, totals, ago="1 h")
    tick(shop, service(shop))
    for problem in ("reinit_reason = 'query changed'", "reinit_reason = NULL, polled = true"):
        shop.execute(f"UPDATE pgtrickle.pgt_stream_tables SET {problem}".encode())
        assert value(shop, "SELECT pgtrickle._staleness(%s)", [totals]) == pytest.approx(3600, abs=5)


def test_a_chain_is_as_stale_as_its_beginning(shop: Connection) -> None:
    totals = create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1", schedule="5s")
    top = create(shop, "top", "SELECT customer FROM totals WHERE n > 1", schedule="5s")
    fill(shop, totals, ago="10 min")
    fill(shop, top, ago="1 h")
    shop.execute("INSERT INTO orders VALUES (1, 1, 1)")
    shop.execute("UPDATE pgtrickle_changes.pgt_activity SET captured_at = '-infinity'")
    # `top` has everything that `totals` has, which lacks nothing older than its rows.
    assert value(shop, "SELECT pgtrickle._staleness(%s)", [top]) == pytest.approx(600, abs=5)
    found = rows(shop, "SELECT pgt_id, pending FROM pgtrickle._freshness() ORDER BY pgt_id")
    assert found == [{"pgt_id": totals, "pending": True}, {"pgt_id": top, "pending": False}]
    assert rows(shop, "SELECT pgt_id FROM pgtrickle._late_stream_tables() WHERE late") == [{"pgt_id": totals}]


def test_pending_means_the_same_everywhere(shop: Connection) -> None:
    for name, source in (("a", "orders"), ("b", "orders"), ("c", "customers"), ("d", "a")):
        create(shop, name, f"SELECT id FROM {source}")
    ids = [row["pgt_id"] for row in rows(shop, "SELECT pgt_id FROM pgtrickle.pgt_stream_tables ORDER BY 1")]
    for pgt_id in ids[1:]:
        fill(shop, pgt_id)
    with shop.transaction():
        shop.execute("INSERT INTO orders VALUES (1, 1, 1)")
        passed = value(shop, "SELECT pg_current_xact_id()::text::bigint")
    shop.execute(
        "UPDATE pgtrickle.pgt_stream_tables SET frontier = frontier || jsonb_build_object('passed', %s::bigint)"
        " WHERE pgt_name = 'b'",
        [passed],
    )
    found = rows(
        shop,
        "SELECT pgt_id, pending, pgtrickle._has_pending_changes(pgt_id) AS asked FROM pgtrickle._freshness() ORDER BY 1",
    )
    assert [row["pending"] for row in found] == [row["asked"] for row in found] == [True, False, False, False]
    shop.execute("INSERT INTO orders VALUES (2, 1, 1)")
    found = rows(
        shop,
        "SELECT pgt_id, pending, pgtrickle._has_pending_changes(pgt_id) AS asked FROM pgtrickle._freshness() ORDER BY 1",
    )
    assert [row["pending"] for row in found] == [row["asked"] for row in found] == [True, True, False, False]


# Health


def test_the_summary_of_an_empty_database(shop: Connection) -> None:
    assert one(shop, "SELECT * FROM pgtrickle.health_summary()") == {
        "total_stream_tables": 0, "active_count": 0, "error_count": 0, "suspended_count": 0, "stale_count": 0,
        "max_staleness_seconds": None, "scheduler_status": "STOPPED", "services": 0, "cache_hit_rate": None,
        "pending_requests": 0,
    }  # fmt: skip


def test_the_summary_counts(shop: Connection, visitor: Connection) -> None:
    ids = [create(shop, name, "SELECT id FROM orders", schedule="1m") for name in "abcdef"]
    for pgt_id in ids[:5]:
        fill(shop, pgt_id, ago="90 s")
    a, b, c, d, e, f = ids
    shop.execute("INSERT INTO orders VALUES (1, 1, 1)")
    shop.execute("UPDATE pgtrickle_changes.pgt_activity SET captured_at = '-infinity'")
    shop.execute("UPDATE pgtrickle.pgt_stream_tables SET consecutive_errors = 3 WHERE pgt_id = ANY (%s)", [[b, c]])
    shop.execute("UPDATE pgtrickle.pgt_stream_tables SET status = 'SUSPENDED' WHERE pgt_id = %s", [c])
    fill(shop, c, ago="1 h")
    shop.execute("UPDATE pgtrickle.pgt_stream_tables SET status = 'SUSPENDED' WHERE pgt_id = %s", [c])
    # Late: d by a minute. Not late: e is stretched, a and b have half a minute left, c is suspended, f is new.
    old = "UPDATE pgtrickle.pgt_stream_tables SET data_timestamp = now() - interval '3 min', stretch = %s WHERE pgt_id = %s"
    shop.execute(old, [1, d])
    shop.execute(old, [2, e])
    service(shop, plans_found=90, plans_made=10)
    service(shop, plans_found=0, plans_made=20)
    service(shop, plans_found=0, plans_made=999, lease_expires="-infinity")
    shop.execute("SELECT pgtrickle.refresh_stream_table('a')")
    summary = one(visitor, "SELECT * FROM pgtrickle.health_summary()")
    assert summary.pop("max_staleness_seconds") == pytest.approx(180, abs=5)
    assert summary == {
        "total_stream_tables": 6, "active_count": 3, "error_count": 1, "suspended_count": 1, "stale_count": 1,
        "scheduler_status": "ACTIVE", "services": 2, "cache_hit_rate": 0.75, "pending_requests": 1,
    }  # fmt: skip
    shop.execute("UPDATE pgtrickle.pgt_stream_tables SET created_at = now() - interval '1 day' WHERE pgt_id = %s", [f])
    assert value(shop, "SELECT stale_count FROM pgtrickle.health_summary()") == 2
    running = service(shop)
    job(shop, running, "RUNNING", [d, a], enqueued="1 min", started="1 s")
    assert rows(shop, "SELECT pgt_id FROM pgtrickle._late_stream_tables() WHERE late") == [{"pgt_id": f}]


def test_the_scheduler_is_active_paused_stopped_or_disabled(database: TestDatabase, shop: Connection) -> None:
    status = "SELECT scheduler_status FROM pgtrickle.health_summary()"
    assert value(shop, status) == "STOPPED"
    running = service(shop, settings=Jsonb({"enabled": "on"}))
    assert value(shop, status) == "ACTIVE"
    assert check(shop, "scheduler")["severity"] == "OK"
    shop.execute("SELECT pgtrickle.pause()")
    assert value(shop, status) == "PAUSED"
    assert check(shop, "scheduler")["remedy"] == "SELECT pgtrickle.resume();"
    shop.execute("SELECT pgtrickle.resume()")
    shop.execute("SET pg_trickle.enabled = off")  # only this session's
    assert value(shop, status) == "ACTIVE"
    shop.execute("RESET pg_trickle.enabled")
    attach(database, "pg_trickle.enabled = off")
    shop.execute("DELETE FROM pgtrickle.pgt_services WHERE service_id = %s", [running])
    assert value(shop, status) == "DISABLED"
    assert check(shop, "scheduler")["severity"] == check(shop, "service")["severity"] == "WARN"


def test_health_checks_without_problems(shop: Connection, visitor: Connection) -> None:
    fill(shop, create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1"))
    service(shop)
    found = rows(visitor, "SELECT * FROM pgtrickle.health_check()")
    assert [row["check_name"] for row in found] == CHECKS
    assert {(row["severity"], row["remedy"]) for row in found} == {("OK", None)}
    assert all(row["detail"] for row in found)


def test_waiting_requests_without_a_service(shop: Connection) -> None:
    create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    assert check(shop, "service")["severity"] == "ERROR"
    assert check(shop, "requests")["severity"] == "OK"
    shop.execute("SELECT pgtrickle.refresh_stream_table('totals')")
    waiting = check(shop, "requests")
    assert waiting["severity"] == "ERROR"
    assert waiting["detail"].startswith("1 waiting")
    service(shop)
    assert check(shop, "requests")["severity"] == "OK"


def test_invalid_values_of_settings(database: TestDatabase, shop: Connection) -> None:
    shop.execute("INSERT INTO pgtrickle.pgt_settings (name, value) VALUES ('lock_timeout_ms', 'soon')")
    attach(database, "pg_trickle.tiered_scheduling = 'perhaps'")
    wrong = check(shop, "settings")
    assert wrong["severity"] == "WARN"
    assert "pg_trickle.lock_timeout_ms cannot be 'soon' (pgtrickle.set): it takes milliseconds" in wrong["detail"]
    assert "pg_trickle.tiered_scheduling cannot be 'perhaps' (database)" in wrong["detail"]
    assert f"As a superuser: ALTER DATABASE {database.name} RESET pg_trickle.tiered_scheduling;" in wrong["remedy"]
    assert "SELECT pgtrickle.set('lock_timeout_ms', NULL);" in wrong["remedy"]
    shop.execute("SELECT pgtrickle.set('lock_timeout_ms', NULL)")
    assert "lock_timeout_ms" not in check(shop, "settings")["detail"]


def test_suspended_failing_and_blown(shop: Connection) -> None:
    update = "UPDATE pgtrickle.pgt_stream_tables SET status = %s, status_reason = %s, last_error = %s, consecutive_errors = %s"
    for name in ("asked", "broken", "stopped", "fused", "failing"):
        fill(shop, create(shop, name, "SELECT id FROM orders"))
    for name, state in {
        "asked": ("SUSPENDED", "by request", None, 0),
        "broken": ("SUSPENDED", "3 refreshes in a row failed", "boom", 3),
        "stopped": ("SUSPENDED", "emergency stop", None, 0),
        "fused": ("SUSPENDED", "9 changes, its fuse lets 5 pass", None, 0),
        "failing": ("ACTIVE", None, "bang", 2),
    }.items():
        shop.execute(f"{update} WHERE pgt_name = %s".encode(), [*state, name])
    shop.execute("UPDATE pgtrickle.pgt_stream_tables SET fuse_blown_at = now() WHERE pgt_name = 'fused'")
    suspended = check(shop, "suspended")
    assert suspended["severity"] == "ERROR"
    assert suspended["detail"] == (
        "shop.broken: 3 refreshes in a row failed; shop.stopped: emergency stop; shop.asked: by request"
    )
    assert "SELECT pgtrickle.resume_stream_table('shop.broken');" in suspended["remedy"]
    assert "SELECT pgtrickle.resume_capture();" in suspended["remedy"]
    assert check(shop, "failing") == {
        "check_name": "failing", "severity": "WARN", "detail": "shop.failing: 2 in a row, the last: bang",
        "remedy": "SELECT * FROM pgtrickle.diagnose_errors('shop.failing');",
    }  # fmt: skip
    fuse = check(shop, "fuses")
    assert (fuse["severity"], fuse["detail"]) == ("ERROR", "shop.fused: 9 changes, its fuse lets 5 pass")
    shop.execute(fuse["remedy"].encode())
    assert check(shop, "fuses")["severity"] == "OK"


def test_many_problems_of_a_kind_are_cut_short(shop: Connection) -> None:
    for number in range(7):
        create(shop, f"t{number}", "SELECT id FROM orders")
    shop.execute("UPDATE pgtrickle.pgt_stream_tables SET status = 'SUSPENDED', status_reason = 'x'")
    detail = check(shop, "suspended")["detail"]
    assert "shop.t4: x; and 2 more" in detail
    assert "shop.t5" not in detail


def test_a_late_stream_table(shop: Connection) -> None:
    fill(
        shop,
        create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1", schedule="5s"),
        ago="1 min",
    )
    shop.execute("INSERT INTO orders VALUES (1, 1, 1)")
    assert check(shop, "stale")["severity"] == "OK"  # for the moment
    shop.execute("UPDATE pgtrickle_changes.pgt_activity SET captured_at = clock_timestamp() - interval '1 min'")
    late = check(shop, "stale")
    assert late["severity"] == "WARN"
    assert late["detail"].startswith("shop.totals: for 6")
    assert late["detail"].endswith("10.0 s are allowed")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("ALTER TABLE orders DISABLE TRIGGER USER", "shop.orders: capture triggers are 4 disabled"),
        ("DROP TRIGGER {insert} ON orders", "shop.orders: capture triggers are 1 missing"),
        ("ALTER TABLE orders ENABLE REPLICA TRIGGER {insert}", "shop.orders: capture triggers are 1 disabled"),
    ],
)
def test_triggers_that_do_not_capture(shop: Connection, damage: str, problem: str) -> None:
    create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    insert = value(shop, "SELECT 'pgtrickle_capture_insert_' || source_stable_name FROM pgtrickle.pgt_change_tracking")
    assert check(shop, "capture")["severity"] == "OK"
    shop.execute(damage.format(insert=insert).encode())
    found = check(shop, "capture")
    assert (found["severity"], found["detail"]) == ("ERROR", problem)
    assert "SELECT pgtrickle._retrack('shop.orders');" in found["remedy"]
    shop.execute("SELECT pgtrickle._retrack('shop.orders')")
    assert check(shop, "capture")["severity"] == "OK"


def test_triggers_that_were_off_for_a_time(shop: Connection) -> None:
    create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    shop.execute("UPDATE pgtrickle.pgt_dependencies SET capture_signature = pgtrickle._capture_signature(source_relid)")
    assert check(shop, "capture")["severity"] == "OK"
    shop.execute("ALTER TABLE orders DISABLE TRIGGER USER")
    shop.execute("SELECT pgtrickle._retrack('orders')")
    found = check(shop, "capture")
    assert found["severity"] == "WARN"
    assert "changed since the last refresh" in found["detail"]


def test_an_emergency_stop_is_reported(shop: Connection) -> None:
    create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    shop.execute("SELECT pgtrickle.emergency_stop()")
    found = check(shop, "capture")
    assert (found["severity"], found["detail"]) == ("ERROR", "shop.orders: capture is stopped")
    shop.execute(found["remedy"].encode())
    assert check(shop, "capture")["severity"] == "OK"


def test_sessions_that_hold_back_vacuum(database: TestDatabase, shop: Connection) -> None:
    held = "SELECT holder, remedy FROM pgtrickle._vacuum_blockers('0 s')"
    with psycopg.connect(database.direct_dsn, application_name="forgotten") as other:
        assert rows(shop, held) == []  # open, but without a snapshot
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT 1")
        pid = other.info.backend_pid
        assert rows(shop, held) == [
            {
                "holder": f"process {pid} (role app, forgotten)",
                "remedy": f"End it, or SELECT pg_terminate_backend({pid});",
            }
        ]
        assert check(shop, "held_back_xmin")["severity"] == "OK"  # not for five minutes yet
    with psycopg.connect(database.direct_dsn) as other:
        other.execute("SELECT pg_current_xact_id()")
        other.execute("PREPARE TRANSACTION 'undecided'")
    (prepared,) = rows(shop, held)
    assert prepared["holder"] == "prepared transaction 'undecided' (role app)"
    shop.execute("ROLLBACK PREPARED 'undecided'")
    assert rows(shop, held) == []


def test_old_transactions_of_others_are_proved_by_frontiers(
    database: TestDatabase, shop: Connection, visitor: Connection
) -> None:
    totals = create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    with (
        psycopg.connect(database.direct_dsn) as reader,
        psycopg.connect(database.direct_dsn) as writer,
        psycopg.connect(database.direct_dsn) as young,
    ):
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT 1")
        shop.execute("INSERT INTO orders VALUES (1, 1, 1)")
        writer.execute("SELECT pg_current_xact_id()")
        shop.execute("INSERT INTO orders VALUES (2, 1, 1)")
        fill(shop, totals, ago="10 min")
        young.execute("SELECT pg_current_xact_id()")
        found = check(visitor, "held_back_xmin")
        assert found["severity"] == "WARN"
        for other in (reader, writer):
            assert f"SELECT pg_terminate_backend({other.info.backend_pid});" in found["remedy"]
        assert str(young.info.backend_pid) not in found["remedy"]
        for other in (reader, writer):
            other.rollback()
        assert check(visitor, "held_back_xmin")["severity"] == "OK"


def test_a_lagging_replication_slot(database: TestDatabase, shop: Connection) -> None:
    totals = create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    with psycopg.connect(database.superuser_dsn, autocommit=True) as superuser:
        # A temporary slot counts as used by its session, and goes with it.
        superuser.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', true)", [database.name])
        shop.execute("INSERT INTO orders VALUES (1, 1, 1)")
        assert check(shop, "held_back_xmin")["severity"] == "OK"
        fill(shop, totals, ago="10 min")
        found = check(shop, "held_back_xmin")
        assert found["severity"] == "WARN"
        assert f"replication slot {database.name} (active)" in found["detail"]


# Buffers


def test_buffers_are_counted_with_both_tables(shop: Connection, visitor: Connection) -> None:
    create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    create(shop, "names", "SELECT name FROM customers")
    create(shop, "both", "SELECT o.id FROM orders o JOIN customers c ON c.id = o.customer")
    shop.execute("INSERT INTO orders SELECT n, 1, 1 FROM generate_series(1, 100) AS n")
    stable_name = value(
        shop, "SELECT source_stable_name FROM pgtrickle.pgt_change_tracking WHERE source_relid = 'orders'::regclass"
    )
    shop.execute("SELECT setval(%s, 2)", [f"pgtrickle_changes.turn_{stable_name}"])
    shop.execute("UPDATE orders SET customer = 2 WHERE id <= 10")
    found = rows(visitor, "SELECT * FROM pgtrickle.change_buffer_sizes() ORDER BY row_count DESC LIMIT 20")
    assert found[0].pop("size_bytes") >= 16384
    found[1].pop("size_bytes")
    assert found == [
        {"source_schema": "shop", "source_name": "orders", "stable_name": stable_name, "row_count": 120, "readers": 2,
         "buffer": f"pgtrickle_changes.changes_{stable_name}"},
        {"source_schema": "shop", "source_name": "customers", "stable_name": found[1]["stable_name"], "row_count": 0,
         "readers": 2, "buffer": f"pgtrickle_changes.changes_{found[1]['stable_name']}"},
    ]  # fmt: skip


def test_counting_a_buffer_leaves_no_lock_behind_and_waits_for_none(database: TestDatabase, shop: Connection) -> None:
    create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    shop.execute("INSERT INTO orders VALUES (1, 1, 1)")
    buffer = value(shop, "SELECT buffer_relid::text FROM pgtrickle.pgt_change_tracking")
    with shop.transaction():
        assert value(shop, "SELECT row_count FROM pgtrickle.change_buffer_sizes()") == 1
        locked = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND relation = %s::regclass"
        assert value(shop, locked, [buffer]) == 0
    with psycopg.connect(database.direct_dsn) as other:
        other.execute(f"LOCK TABLE {buffer} IN ACCESS EXCLUSIVE MODE")
        (found,) = rows(shop, "SELECT buffer, size_bytes FROM pgtrickle.change_buffer_sizes()")
        assert found == {"buffer": buffer, "size_bytes": None}


def test_a_buffer_above_the_threshold_alerts(shop: Connection) -> None:
    create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    shop.execute("SELECT pgtrickle.set('buffer_alert_threshold', '50')")
    shop.execute("INSERT INTO orders SELECT n, 1, 1 FROM generate_series(1, 50) AS n")
    assert check(shop, "change_buffers")["severity"] == "OK"
    shop.execute("INSERT INTO orders VALUES (51, 1, 1)")
    found = check(shop, "change_buffers")
    assert found["severity"] == "WARN"
    assert found["detail"].startswith("shop.orders: 51 changes, ")


# Who reads what, and what was done


def test_the_tree(shop: Connection) -> None:
    create(shop, "base", "SELECT o.id, o.customer FROM orders o JOIN customers c ON c.id = o.customer")
    create(shop, "left_side", "SELECT id FROM base")
    create(shop, "right_side", "SELECT id FROM base")
    create(shop, "top", "SELECT l.id FROM left_side l JOIN right_side r ON r.id = l.id")
    create(shop, '"Lone one"', "SELECT id FROM orders")
    shop.execute("UPDATE pgtrickle.pgt_stream_tables SET status = 'ACTIVE' WHERE pgt_name = 'base'")
    found = rows(shop, "SELECT * FROM pgtrickle.dependency_tree()")
    assert [row["tree_line"] for row in found] == [
        'shop."Lone one" (INITIALIZING)',
        "`-- shop.orders (table)",
        "shop.top (INITIALIZING)",
        "+-- shop.left_side (INITIALIZING)",
        "|   `-- shop.base (ACTIVE)",
        "|       +-- shop.customers (table)",
        "|       `-- shop.orders (table)",
        "`-- shop.right_side (INITIALIZING)",
        "    `-- shop.base (ACTIVE), see above",
    ]
    assert [row["depth"] for row in found] == [0, 1, 0, 1, 2, 3, 3, 1, 2]
    assert {key: found[4][key] for key in ("pgt_schema", "pgt_name", "source_type", "status")} == {
        "pgt_schema": "shop", "pgt_name": "base", "source_type": "STREAM_TABLE", "status": "ACTIVE",
    }  # fmt: skip
    assert (found[5]["source_type"], found[5]["status"]) == ("TABLE", None)


def test_timeline_statistics_and_view(shop: Connection, visitor: Connection) -> None:
    totals = create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1", schedule="1m")
    create(shop, "idle", "SELECT name FROM customers")
    history(shop, totals, "COMPLETED", 100, action="REINITIALIZE", inserted=10, deleted=0)
    history(shop, totals, "COMPLETED", 200, action="DIFFERENTIAL", inserted=3, deleted=2)
    history(shop, totals, "FAILED", 0, error="boom", sqlstate="22012")
    for who, message in ((shop, "boom"), (visitor, "shown to the owner of the stream table and to administrators")):
        latest = rows(who, "SELECT * FROM pgtrickle.refresh_timeline(2)")
        assert [(row["stream_table"], row["status"], row["error"]) for row in latest] == [
            ("shop.totals", "FAILED", message), ("shop.totals", "COMPLETED", None),
        ]  # fmt: skip
    assert (latest[1]["action"], latest[1]["duration_ms"], latest[1]["rows_inserted"], latest[1]["rows_deleted"]) == (
        "DIFFERENTIAL", 200, 3, 2,
    )  # fmt: skip
    assert latest[1]["initiated_by"] == "MANUAL"
    idle, busy = rows(visitor, "SELECT * FROM pgtrickle.st_refresh_stats()")
    assert (idle["pgt_name"], idle["refreshes"], idle["avg_ms"], idle["last_refresh"]) == ("idle", 0, None, None)
    assert busy.pop("last_refresh") is not None
    assert busy == {
        "pgt_schema": "shop", "pgt_name": "totals", "refreshes": 2, "failures": 1, "avg_ms": 150, "p95_ms": 195,
        "max_ms": 200, "rows_inserted": 13, "rows_deleted": 2, "last_action": "DIFFERENTIAL",
    }  # fmt: skip
    fill(shop, totals)
    shop.execute(
        "UPDATE pgtrickle.pgt_stream_tables SET last_seconds = 0.2, consecutive_errors = 1, last_error = 'boom',"
        " last_change_at = now() - interval '2 min' WHERE pgt_id = %s",
        [totals],
    )
    ask = "SELECT * FROM pgtrickle.pg_stat_stream_tables WHERE pgt_name = 'totals'"
    assert "shown to the owner" in one(visitor, ask)["last_error"]
    shown = one(shop, ask)
    assert shown.pop("data_timestamp") is not None
    assert shown == {
        "pgt_id": totals, "pgt_schema": "shop", "pgt_name": "totals", "status": "ERROR", "refresh_mode": "AUTO",
        "tier": "warm", "schedule": "1m", "staleness_seconds": 0, "refreshes": 2, "failures": 1, "avg_ms": 150,
        "last_ms": 200, "consecutive_errors": 1, "last_error": "boom",
    }  # fmt: skip


def test_remedies_say_resume_only_where_it_is_suspended(shop: Connection) -> None:
    totals = create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    history(shop, totals, "COMPLETED")
    resume = "SELECT pgtrickle.resume_stream_table('shop.totals');"
    remedies = set()
    for kind in Kind:
        shop.execute("DELETE FROM pgtrickle.pgt_refresh_history WHERE status = 'FAILED'")
        history(shop, totals, "FAILED", error="boom", sqlstate="XX000", kind=kind)
        for status in ("ACTIVE", "SUSPENDED"):
            shop.execute("UPDATE pgtrickle.pgt_stream_tables SET status = %s", (status,))
            found = one(shop, "SELECT * FROM pgtrickle.diagnose_errors('totals')")
            assert (found["error"], found["sqlstate"], found["kind"]) == ("boom", "XX000", kind)
            assert (resume in found["remedy"]) == (status == "SUSPENDED" and kind is not Kind.FUSE)
            remedies.add(found["remedy"])
    assert len(remedies) == 2 * len(Kind) - 1, "each kind has its own"


def test_the_last_five_errors_newest_first(shop: Connection) -> None:
    totals = create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1")
    for number in range(7):
        history(shop, totals, "FAILED", error=f"error {number}")
    found = rows(shop, "SELECT * FROM pgtrickle.diagnose_errors('totals')")
    assert [row["error"] for row in found] == [f"error {number}" for number in (6, 5, 4, 3, 2)]
    with pytest.raises(psycopg.errors.UndefinedTable, match="there is no stream table nothing"):
        shop.execute("SELECT * FROM pgtrickle.diagnose_errors('nothing')")


def test_a_catalog_that_users_built_views_on_can_be_installed_again(shop: Connection) -> None:
    shop.execute("CREATE VIEW dashboard AS SELECT * FROM pgtrickle.pg_stat_stream_tables, pgtrickle.health_summary()")
    install(shop)
    assert rows(shop, "SELECT * FROM dashboard") == []


# On a standby


def test_a_standby_answers_and_counts_its_lag(database: TestDatabase, shop: Connection) -> None:
    totals = create(shop, "totals", "SELECT customer, count(*) AS n FROM orders GROUP BY 1", schedule="5s")
    shop.execute("INSERT INTO orders SELECT n, 1, 1 FROM generate_series(1, 100) AS n")
    fill(shop, totals, ago="1 h")
    tick(shop, service(shop, pool_size=4), ago="1 min")
    staleness = "SELECT pgtrickle._staleness(%s)"
    with (
        standby_of(database.server) as server,
        psycopg.connect(server.dsn(database.name, "app"), autocommit=True) as standby,
        psycopg.connect(server.dsn(database.name), autocommit=True) as superuser,
    ):
        shop.execute("SELECT pg_current_xact_id()")
        await_replay(shop, standby)
        superuser.execute("SELECT pg_wal_replay_pause()")
        lag = "SELECT extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp())::float8"
        before = value(standby, lag)
        assert before <= value(standby, staleness, [totals]) <= value(standby, lag)
        assert one(standby, "SELECT services, scheduler_status FROM pgtrickle.health_summary()") == {
            "services": 1, "scheduler_status": "ACTIVE",
        }  # fmt: skip
        assert value(standby, "SELECT row_count FROM pgtrickle.change_buffer_sizes()") == 100
        assert value(standby, "SELECT max_workers FROM pgtrickle.worker_pool_status()") == 4
        assert check(standby, "service")["severity"] == "OK"
        for call in ("parallel_job_status()", "dependency_tree()", "refresh_timeline()", "st_refresh_stats()",
                     "diagnose_errors('shop.totals')", "pg_stat_stream_tables", "server_worker_inventory"):  # fmt: skip
            rows(standby, f"SELECT * FROM pgtrickle.{call}")
        shop.execute("INSERT INTO orders VALUES (101, 1, 1)")
        superuser.execute("SELECT pg_wal_replay_resume()")
        await_replay(shop, standby)
        assert 0 < value(standby, staleness, [totals]) < 60
