"""Every statement and setting printed in pg_trickle's scaling guide and multi-database plan, against a live service.

The printed texts are in tests/fixtures/compatibility; docs/reference/compatibility.md describes what they do here.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row

from pgtrickle.catalog.install import install
from pgtrickle.embedded.account import hand_over, server_account
from pgtrickle.embedded.binaries import ServerVersion
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.errors import EmbeddedServerError
from pgtrickle.service.service import Service
from tests.support.database import SERVER_SETTINGS, TestDatabase, fresh_database, prepare_server
from tests.support.oracle import assert_equal_to_query
from tests.support.service import fresh, running_service, until
from tests.support.standby import await_replay, standby_of

pytestmark = pytest.mark.pgversions

Connection = psycopg.Connection[Any]
Row = dict[str, Any]

FIXTURES = Path(__file__).parents[1] / "fixtures" / "compatibility"
SCALING = tomllib.loads((FIXTURES / "scaling.toml").read_text(encoding="utf-8"))
DATABASES = tomllib.loads((FIXTURES / "several_databases.toml").read_text(encoding="utf-8"))

TOTALS = "SELECT grp, count(*) AS n, sum(val) AS total FROM item GROUP BY grp"
LEASE_SECONDS = 3.0  # the service tells what it uses three times as often


def rows(conn: Connection, query: str, *parameters: object) -> list[Row]:
    return conn.cursor(row_factory=dict_row).execute(query.encode(), parameters or None).fetchall()


def value(conn: Connection, query: str, *parameters: object) -> Any:
    row = conn.execute(query.encode(), parameters or None).fetchone()
    return row[0] if row is not None else None


def run(conn: Connection, statement: dict[str, Any]) -> list[Row]:
    """The result of a statement, which must have the columns named on its page."""
    cursor = conn.cursor(row_factory=dict_row).execute(statement.get("run", statement["printed"]).encode())
    assert cursor.description is not None
    assert set(statement["columns"]) <= {column.name for column in cursor.description}
    return cursor.fetchall()


# Statements


@dataclass(frozen=True)
class Live:
    """A database with four stream tables, and a service with one worker.

    `totals` follows its table, `names` is refreshed when asked, `broken` failed once, `stopped` is suspended with 140
    changes waiting for it.
    """

    database: TestDatabase
    service: Service
    owner: Connection
    visitor: Connection  # a role without any right of its own

    @property
    def plans(self) -> tuple[int, int]:
        tended = self.service.launchers[0].databases[self.database.name].tended
        assert tended is not None
        return tended.workers.plans.found, tended.workers.plans.made


@dataclass(frozen=True)
class Busy:
    """The only worker refreshes `totals`, which is locked; `names` waits for the worker."""

    live: Live
    blocker: int
    since: float  # when the worker was seen to wait for the lock
    began: Any  # on the server's clock, before there was anything to do


@pytest.fixture(scope="module")
def live(server: EmbeddedServer) -> Iterator[Live]:
    with (
        fresh_database(server, "compatibility") as database,
        psycopg.connect(database.direct_dsn, autocommit=True) as owner,
        psycopg.connect(database.direct_dsn_as(database.create_role("visitor")), autocommit=True) as visitor,
    ):
        install(owner)
        owner.execute("SELECT pgtrickle.set('pg_trickle.max_dynamic_refresh_workers', '1')")
        owner.execute("SELECT pgtrickle.set('pg_trickle.per_database_worker_quota', '1')")
        for table in ("item", "other", "fragile", "visit"):
            create_table = sql.SQL(
                "CREATE TABLE {} (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, grp int, val int)"
            )
            owner.execute(create_table.format(sql.Identifier(table)))
        with running_service(database.dsn, database.name, lease_seconds=LEASE_SECONDS) as service:
            for name, query, schedule in (
                ("totals", TOTALS, "100ms"),
                ("names", "SELECT id FROM other", "1h"),
                ("broken", "SELECT id, 1 / val AS x FROM fragile", "1h"),
                ("stopped", "SELECT id, grp FROM visit", "1h"),
            ):
                owner.execute("SELECT pgtrickle.create_stream_table(%s, %s, %s)", (name, query, schedule))
                fresh(owner, name)
            owner.execute("INSERT INTO fragile (val) VALUES (0)")
            owner.execute(
                "SELECT pgtrickle.alter_stream_table('broken', tier => 'frozen')"
            )  # not tried again by itself
            with pytest.raises(psycopg.errors.ExternalRoutineException, match="division by zero"):
                owner.execute("CALL pgtrickle.refresh_and_wait('broken')")
            owner.execute("SELECT pgtrickle.alter_stream_table('stopped', status => 'SUSPENDED')")
            owner.execute("INSERT INTO visit (grp) SELECT 1 FROM generate_series(1, 120)")
            owner.execute("UPDATE visit SET grp = 2 WHERE id <= 10")
            yield Live(database, service, owner, visitor)


@pytest.fixture
def busy(live: Live) -> Iterator[Busy]:
    with working(live) as state:
        yield state


@contextmanager
def working(live: Live) -> Iterator[Busy]:
    """A worker that is blocked, and a job that waits for it; afterwards both are done."""
    owner, began = live.owner, value(live.owner, "SELECT clock_timestamp()")
    with psycopg.connect(live.database.direct_dsn) as blocker:
        pid = blocker.info.backend_pid
        blocker.execute("LOCK TABLE totals IN SHARE MODE")
        owner.execute("INSERT INTO item (grp, val) SELECT i, i FROM generate_series(1, 3) AS i")
        waits = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"
        until(lambda: value(owner, waits, pid) == 1, "a worker that waits for the lock")
        since = time.monotonic()
        owner.execute("SELECT pgtrickle.refresh_stream_table('names')")
        until(lambda: value(owner, "SELECT count(*) FROM pgtrickle.pgt_jobs WHERE status = 'QUEUED'") == 1)
        until(lambda: value(owner, "SELECT stale_count FROM pgtrickle.health_summary()") == 1)
        told = "SELECT (plans_found, plans_made) = (%s, %s) FROM pgtrickle.pgt_services"
        until(lambda: value(owner, told, *live.plans), "the service's word on its plans")
        yield Busy(live, pid, since, began)
    fresh(owner, "totals", "names")
    until(lambda: value(owner, "SELECT count(*) FROM pgtrickle.pgt_jobs WHERE finished_at IS NULL") == 0)
    until(lambda: live.service.pool.active == 0)


def check_pool(busy: Busy, found: list[Row]) -> None:
    assert found == [{"active_workers": 1, "max_workers": 1, "per_db_cap": 1, "parallel_mode": "on"}]
    pool = busy.live.service.pool
    assert (pool.active, pool.size, pool.queued) == (1, 1, 1)


def check_scheduler_loop(busy: Busy, found: list[Row]) -> None:
    assert found == [{"active_workers": 1, "max_workers": 1}]


def check_saturated(busy: Busy, found: list[Row]) -> None:
    assert found == [{"saturated": True}]


def check_jobs(busy: Busy, found: list[Row]) -> None:
    owner = busy.live.owner
    (running,) = [row for row in found if row["status"] == "RUNNING"]
    assert running["stream_tables"] == "public.totals"
    worker = "SELECT application_name, pg_blocking_pids(pid) AS blockers FROM pg_stat_activity WHERE pid = %s"
    assert rows(owner, worker, running["worker_pid"]) == [
        {"application_name": "pgtrickle worker 0", "blockers": [busy.blocker]}
    ]
    elapsed = value(owner, "SELECT extract(epoch FROM clock_timestamp() - %s)", busy.began)
    assert 0 < running["duration_ms"] < float(elapsed) * 1000
    (queued,) = [row for row in found if row["status"] == "QUEUED"]
    assert (queued["stream_tables"], queued["kind"]) == ("public.names", "IMMEDIATE")
    assert (queued["duration_ms"], queued["worker_pid"], queued["started_at"]) == (None, None, None)
    (failed,) = [row for row in found if row["status"] == "FAILED"]
    assert failed["stream_tables"] == "public.broken"
    assert "division by zero" in failed["error"] or "shown to the owner" in failed["error"]  # to a visitor


def check_summary(busy: Busy, found: list[Row]) -> None:
    (summary,) = found
    assert {name: number for name, number in summary.items() if name.endswith("_count")} == {
        "active_count": 2, "error_count": 1, "suspended_count": 1, "stale_count": 1,
    }  # fmt: skip
    assert summary["total_stream_tables"] == 4
    assert (summary["scheduler_status"], summary["services"], summary["pending_requests"]) == ("ACTIVE", 1, 1)
    plans_found, plans_made = busy.live.plans
    assert plans_made >= 4, "each stream table was planned once"
    assert plans_found >= 1, "the one that works now had been planned before"
    assert summary["cache_hit_rate"] == pytest.approx(plans_found / (plans_found + plans_made))


def check_buffers(busy: Busy, found: list[Row]) -> None:
    # An update is two rows of a buffer: what was, and what is.
    assert (found[0]["source_name"], found[0]["row_count"]) == ("visit", 120 + 2 * 10)
    assert {row["source_name"] for row in found} == {"visit", "item", "other", "fragile"}
    counts = [row["row_count"] for row in found]
    assert counts == sorted(counts, reverse=True)
    for row in found:
        buffer = sql.Identifier(*row["buffer"].split("."))
        counted = busy.live.owner.execute(sql.SQL("SELECT count(*) FROM {}").format(buffer)).fetchone()
        assert counted == (row["row_count"],)
        assert row["readers"] == 1


def check_longest(busy: Busy, found: list[Row]) -> None:
    seconds: dict[str, list[float]] = {}
    for row in rows(busy.live.owner, "SELECT * FROM pgtrickle.pgt_refresh_history"):
        if row["status"] == "COMPLETED":
            seconds.setdefault(row["pgt_name"], []).append((row["end_time"] - row["start_time"]).total_seconds())
    assert set(seconds) == {"totals", "names", "broken", "stopped"}
    assert [row["pgt_name"] for row in found] == sorted(seconds, key=lambda name: -mean(seconds[name]))
    for row in found:
        took = seconds[row["pgt_name"]]
        assert row["pgt_schema"] == "public"
        assert row["refreshes"] == len(took)
        assert float(row["avg_sec"]) == pytest.approx(mean(took), abs=1e-6)
        assert float(row["max_sec"]) == pytest.approx(max(took), abs=1e-6)
    assert len(seconds["broken"]) == 1, "its refresh that failed does not count"


def check_utilization(busy: Busy, found: list[Row]) -> None:
    (sample,) = found
    assert busy.began < sample.pop("ts") <= value(busy.live.owner, "SELECT clock_timestamp()")
    assert sample == {"active": 1, "pool_size": 1, "queue_depth": 1}


CHECKS: dict[str, Callable[[Busy, list[Row]], None]] = {
    "worker_pool_status": check_pool,
    "parallel_job_status": check_jobs,
    "health_summary": check_summary,
    "change_buffer_sizes": check_buffers,
    "scheduler_loop": check_scheduler_loop,
    "saturated": check_saturated,
    "longest": check_longest,
    "utilization": check_utilization,
}
CALLS = [SCALING["statements"]["refresh_stream_table"], DATABASES["statements"]["manual_refresh"]]


@pytest.mark.parametrize("name", [name for name in SCALING["statements"] if name != "refresh_stream_table"])
def test_statements_of_the_scaling_guide_return_correct_results(busy: Busy, name: str) -> None:
    for conn in (busy.live.owner, busy.live.visitor):
        CHECKS[name](busy, run(conn, SCALING["statements"][name]))


def test_statements_of_the_scaling_guide_show_finished_work(live: Live) -> None:
    statements = SCALING["statements"]
    with working(live) as busy:
        (unfinished,) = [
            row for row in run(live.owner, statements["parallel_job_status"]) if row["status"] == "RUNNING"
        ]
        held = time.monotonic() - busy.since
    jobs = {row["job_id"]: row for row in run(live.visitor, statements["parallel_job_status"])}
    done = jobs[unfinished["job_id"]]
    assert (done["status"], done["worker_pid"]) == ("SUCCEEDED", unfinished["worker_pid"])
    assert done["duration_ms"] == pytest.approx((done["finished_at"] - done["started_at"]).total_seconds() * 1000)
    assert done["duration_ms"] > held * 1000
    # The service tells of its workers in other databases at its next beat.
    until(lambda: run(live.visitor, statements["scheduler_loop"]) == [{"active_workers": 0, "max_workers": 1}])
    assert run(live.visitor, statements["saturated"]) == [{"saturated": False}]
    (sample,) = run(live.visitor, statements["utilization"])
    assert (sample["active"], sample["pool_size"], sample["queue_depth"]) == (0, 1, 0)
    longest = {row["pgt_name"]: row for row in run(live.visitor, statements["longest"])}
    assert longest["totals"]["max_sec"] > held, "the refresh that waited for the lock"
    assert_equal_to_query(live.owner, "totals", TOTALS)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call["printed"])
def test_a_requested_refresh_is_done(live: Live, call: dict[str, Any]) -> None:
    live.owner.execute("INSERT INTO other (grp) VALUES (1)")
    missing = "SELECT count(*) FROM (SELECT id FROM other EXCEPT SELECT id FROM names) AS missing"
    assert value(live.owner, missing) == 1, "its schedule is an hour"
    (row,) = run(live.owner, call)
    (request,) = row.values()
    done = "SELECT status FROM pgtrickle.pgt_requests WHERE request_id = %s"
    until(lambda: value(live.owner, done, request) == "DONE")
    assert_equal_to_query(live.owner, "names", "SELECT id FROM other")
    last = "SELECT initiated_by, action FROM pgtrickle.get_refresh_history('names', 1)"
    assert rows(live.owner, last) == [{"initiated_by": "REQUEST", "action": "DIFFERENTIAL"}]


def test_objects_of_the_plan_for_several_databases(live: Live) -> None:
    statements = DATABASES["statements"]
    for conn in (live.owner, live.visitor):
        found = run(conn, statements["pgt_stream_tables"])
        assert {row["pgt_name"]: row["status"] for row in found} == {
            "totals": "ACTIVE", "names": "ACTIVE", "broken": "ACTIVE", "stopped": "SUSPENDED",
        }  # fmt: skip
        buffers = [row["buffer"] for row in run(conn, statements["changes"])]
        assert len(buffers) == 4
        assert all(re.fullmatch(r"pgtrickle_changes\.changes_[0-9a-f]{16}", buffer) for buffer in buffers)
        assert all(value(live.owner, "SELECT to_regclass(%s)", buffer) is not None for buffer in buffers)


def test_there_is_no_extension(live: Live) -> None:
    """`pgtrickle install` takes its place: this database has everything that the pages name."""
    with psycopg.connect(live.database.superuser_dsn, autocommit=True) as superuser:
        for conn in (live.owner, superuser):
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="not available"):
                conn.execute(DATABASES["statements"]["create_extension"]["printed"])
    assert value(live.owner, "SELECT pgtrickle.version()") is not None


def test_a_replica_refuses_to_refresh(live: Live) -> None:
    with (
        standby_of(live.database.server) as server,
        psycopg.connect(server.dsn(live.database.name, "app"), autocommit=True) as replica,
    ):
        await_replay(live.owner, replica)
        for call in CALLS:
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction, match="a standby cannot refresh stream tables"):
                run(replica, call)
        assert_equal_to_query(replica, "totals", TOTALS)
        assert value(replica, "SELECT pgtrickle.get_staleness('totals')") is not None
        for name in CHECKS:
            run(replica, SCALING["statements"][name])


# Settings


@dataclass(frozen=True)
class Tuned:
    """A separate server with one database, and a service that serves it."""

    database: TestDatabase
    service: Service

    @contextmanager
    def superuser(self) -> Iterator[Connection]:
        with psycopg.connect(self.database.superuser_dsn, autocommit=True) as conn:
            yield conn

    @contextmanager
    def owner(self) -> Iterator[Connection]:
        with psycopg.connect(self.database.direct_dsn, autocommit=True) as conn:
            yield conn

    def used(self) -> dict[str, str]:
        """The settings that the service says it uses."""
        with self.owner() as conn:
            return value(conn, "SELECT settings FROM pgtrickle.pgt_services") or {}

    def configure(self, lines: str, *, restart: bool = False) -> None:
        """Lines of the server's postgresql.conf."""
        path = included(self.database.server)
        path.write_text(lines)
        hand_over(path, server_account())
        if restart:
            self.database.server.restart()
        else:
            with self.superuser() as conn:
                conn.execute("SELECT pg_reload_conf()")


def included(server: EmbeddedServer) -> Path:
    """A file that the server's postgresql.conf includes."""
    return server.data_dir / "printed.conf"


@contextmanager
def own_server(version: ServerVersion) -> Iterator[EmbeddedServer]:
    base = Path(tempfile.mkdtemp(prefix="pgtrickle-compatibility-"))
    try:
        with EmbeddedServer(base / "data", version=version, settings=SERVER_SETTINGS) as server:
            with (server.data_dir / "postgresql.conf").open("a") as config:
                config.write(f"include_if_exists '{included(server).name}'\n")
            prepare_server(server)
            yield server
    finally:
        shutil.rmtree(base)


@pytest.fixture(scope="module")
def tuned(pg_version: ServerVersion) -> Iterator[Tuned]:
    with own_server(pg_version) as server, fresh_database(server, "tuned") as database:
        with psycopg.connect(database.direct_dsn) as conn:
            install(conn)
        with running_service(database.dsn, database.name, lease_seconds=LEASE_SECONDS) as service:
            yield Tuned(database, service)


def lines_of(printed: str) -> list[str]:
    """The lines of a block that set pgtrickle's settings, as PostgreSQL reads them."""
    lines = [line for line in printed.strip().splitlines() if not line.startswith(("#", "max_worker_processes"))]
    # The operator of CloudNativePG writes `name: "value"` into postgresql.conf as name = 'value'.
    return [re.sub(r'^([\w.]+): "(.*)"$', r"\1 = '\2'", line) for line in lines]


def settings_of(lines: list[str]) -> dict[str, str]:
    """Names and values as printed."""
    found = [re.fullmatch(r"(pg_trickle\.\w+) = '?(\w+)'?(?: -- .*)?", line) for line in lines]
    assert all(found), lines
    return {match[1]: match[2] for match in found if match is not None}


def plain(name: str) -> str:
    return name.removeprefix("pg_trickle.")


def other_than(text: str) -> str:
    """Another value of the same setting."""
    return str(int(text) + 1) if text.isdigit() else {"on": "off", "true": "off", "transaction": "off"}[text]


@contextmanager
def by_postgresql_conf(tuned: Tuned, lines: list[str]) -> Iterator[None]:
    tuned.configure("\n".join(line.partition(" -- ")[0] for line in lines) + "\n")
    try:
        yield
    finally:
        tuned.configure("")


@contextmanager
def by_alter_system(tuned: Tuned, lines: list[str]) -> Iterator[None]:
    with tuned.superuser() as conn, ExitStack() as undone:
        undone.callback(conn.execute, "SELECT pg_reload_conf()")
        undone.callback(conn.execute, "ALTER SYSTEM RESET ALL")
        for line in lines:
            if conn.info.server_version < 170000:
                conn.execute(f"SET {line}".encode())  # so that the server knows the name
            conn.execute(f"ALTER SYSTEM SET {line}".encode())
        conn.execute("SELECT pg_reload_conf()")
        yield


@contextmanager
def by_alter_database(tuned: Tuned, lines: list[str]) -> Iterator[None]:
    with tuned.superuser() as conn, ExitStack() as undone:
        undone.callback(conn.execute, f"ALTER DATABASE {tuned.database.name} RESET ALL".encode())
        for line in lines:
            conn.execute(f"ALTER DATABASE {tuned.database.name} SET {line}".encode())
        yield


@contextmanager
def by_set(tuned: Tuned, lines: list[str]) -> Iterator[None]:
    """Set as an ordinary role; previous values are reset by the role that set them."""
    with tuned.owner() as conn:
        assert value(conn, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") is False
        for name, setting in settings_of(lines).items():
            conn.execute("SELECT pgtrickle.set(%s, %s)", (name, setting))
        yield


FORMS: dict[str, Callable[[Tuned, list[str]], AbstractContextManager[None]]] = {
    "postgresql.conf": by_postgresql_conf,
    "ALTER SYSTEM": by_alter_system,
    "ALTER DATABASE": by_alter_database,
    "pgtrickle.set": by_set,
}


@contextmanager
def otherwise(tuned: Tuned, settings: dict[str, str]) -> Iterator[None]:
    """Store other values for these settings, to show where a value comes from."""
    with tuned.owner() as conn, ExitStack() as undone:
        for name, setting in settings.items():
            undone.callback(conn.execute, "SELECT pgtrickle.set(%s, NULL)", (name,))
            conn.execute("SELECT pgtrickle.set(%s, %s)", (name, other_than(setting)))
        yield


def await_use(tuned: Tuned, settings: dict[str, str]) -> None:
    """Wait until the service uses exactly these settings, and its pool matches them."""
    defaults = tuned_defaults(tuned)
    wanted = defaults | {plain(name): "on" if text == "true" else text for name, text in settings.items()}
    until(lambda: tuned.used() == wanted, f"the use of {settings}")
    cap = min(int(wanted["per_database_worker_quota"]) or 64, int(wanted["max_concurrent_refreshes"]))
    pool = {
        "active_workers": 0, "max_workers": int(wanted["max_dynamic_refresh_workers"]), "per_db_cap": cap,
        "parallel_mode": wanted["parallel_refresh_mode"],
    }  # fmt: skip

    def agrees() -> bool:
        with tuned.owner() as conn:
            return run(conn, SCALING["statements"]["worker_pool_status"]) == [pool]

    until(agrees, f"a pool of {pool}")
    assert tuned.service.pool.size == pool["max_workers"]


def tuned_defaults(tuned: Tuned) -> dict[str, str]:
    with tuned.owner() as conn:
        return {row["name"]: row["default_value"] for row in rows(conn, "SELECT * FROM pgtrickle._known_settings()")}


@pytest.mark.parametrize("block", SCALING["settings"])
@pytest.mark.parametrize("form", FORMS)
def test_the_service_uses_settings_as_printed(tuned: Tuned, form: str, block: str) -> None:
    lines = lines_of(SCALING["settings"][block]["printed"])
    settings = settings_of(lines)
    with otherwise(tuned, settings), FORMS[form](tuned, lines):
        await_use(tuned, settings)


def test_alter_system_accepts_new_names_since_17(database: TestDatabase, pg_version: ServerVersion) -> None:
    (line,) = lines_of(SCALING["settings"]["tiered_scheduling"]["printed"])
    refused = pytest.raises(psycopg.errors.UndefinedObject, match="unrecognized configuration parameter")
    with psycopg.connect(database.superuser_dsn, autocommit=True) as conn:
        with refused if pg_version < 17 else nullcontext():
            conn.execute(f"ALTER SYSTEM SET {line}".encode())
        conn.execute("ALTER SYSTEM RESET ALL")


def test_resetting_settings_restores_the_defaults(tuned: Tuned) -> None:
    lines = lines_of(SCALING["settings"]["high_throughput"]["printed"])
    with by_postgresql_conf(tuned, lines):
        await_use(tuned, settings_of(lines))
    await_use(tuned, {})
    defaults = SCALING["defaults"]
    assert {name: tuned.used()[name] for name in defaults} == defaults
    with tuned.owner() as conn:
        check = "SELECT severity FROM pgtrickle.health_check() WHERE check_name = 'settings'"
        assert value(conn, check) == "OK"


def test_the_budget_holds_after_a_restart_of_the_server(tuned: Tuned) -> None:
    printed = SCALING["settings"]["worker_budget"]["printed"]
    tuned.configure(printed, restart=True)
    try:
        with tuned.superuser() as conn:
            assert value(conn, "SHOW max_worker_processes") == "40"
        await_use(tuned, settings_of(lines_of(printed)))
    finally:
        tuned.configure("", restart=True)
    await_use(tuned, {})


def test_a_comment_in_sql_is_not_a_comment_in_postgresql_conf(tuned: Tuned) -> None:
    tuned.configure(SCALING["settings"]["tiered_scheduling"]["printed"])
    try:
        with tuned.superuser() as conn:
            wrong = "SELECT error FROM pg_file_settings WHERE error IS NOT NULL AND sourcefile LIKE '%printed.conf'"
            assert rows(conn, wrong) == [{"error": "syntax error"}]
    finally:
        tuned.configure("")


def test_the_pool_has_the_sizes_that_the_guide_names(tuned: Tuned) -> None:
    sizes = SCALING["pool"]
    with tuned.owner() as conn, ExitStack() as undone:
        undone.callback(conn.execute, "SELECT pgtrickle.set('max_dynamic_refresh_workers', NULL)")
        for size in (*sizes["recommended"], *sizes["profiled"], sizes["most"]):
            conn.execute("SELECT pgtrickle.set('pg_trickle.max_dynamic_refresh_workers', %s)", (str(size),))
            await_pool_of(conn, size)
            assert tuned.service.pool.size == size
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            conn.execute("SELECT pgtrickle.set('max_dynamic_refresh_workers', %s)", (str(sizes["most"] + 1),))


def await_pool_of(conn: Connection, size: int) -> None:
    until(lambda: run(conn, SCALING["statements"]["utilization"])[0]["pool_size"] == size, f"a pool of {size}")


def test_databases_are_disabled_and_limited(tuned: Tuned) -> None:
    """The settings of the plan for several databases, and its view of all workers."""
    enabled, most = (DATABASES["settings"][name]["printed"] for name in ("enabled", "max_databases"))
    inventory = DATABASES["statements"]["server_worker_inventory"]
    server = tuned.database.server
    with fresh_database(server, "first") as first, fresh_database(server, "second") as second:
        for database in (first, second):
            with psycopg.connect(database.direct_dsn) as conn:
                install(conn)
        with (
            psycopg.connect(first.direct_dsn, autocommit=True) as owner,
            psycopg.connect(first.superuser_dsn, autocommit=True) as superuser,
            running_service(first.dsn, first.name, second.name, lease_seconds=LEASE_SECONDS) as service,
        ):

            def served() -> set[str]:
                found = {row["database"] for row in run(owner, inventory) if row["role"] == "scheduler"}
                return found & {first.name, second.name}

            both = {first.name, second.name}
            until(lambda: served() == both)

            def launchers() -> list[str]:
                return sorted(row["database"] for row in run(owner, inventory) if row["role"] == "launcher")

            # Its look at a database before the scheduler starts may not be quite over.
            until(lambda: launchers() == sorted([first.name, tuned.database.name]), "one for each service")

            connected = (
                "SELECT pid, datname AS database FROM pg_stat_activity WHERE application_name = 'pgtrickle scheduler'"
            )
            schedulers = [row for row in run(owner, inventory) if row["role"] == "scheduler"]
            assert {(row["pid"], row["database"]) for row in schedulers} == {
                (row["pid"], row["database"]) for row in rows(superuser, connected)
            }

            superuser.execute(f"ALTER DATABASE {second.name} SET {enabled} = off".encode())
            until(lambda: served() == {first.name})
            owner.execute("SELECT pgtrickle.set(%s, '1')", (most,))
            until(lambda: {one.most_databases for one in service.launchers[0].settings} >= {1})
            superuser.execute(f"ALTER DATABASE {second.name} SET {enabled} = on".encode())
            watched = service.launchers[0].databases[second.name]
            until(lambda: watched.problem == "pg_trickle.max_databases is 1")
            assert served() == {first.name}
            with psycopg.connect(second.direct_dsn, autocommit=True) as there:
                health = rows(there, "SELECT detail FROM pgtrickle.health_check() WHERE check_name = 'service'")
                assert [row["detail"] for row in health] == [
                    "no service serves this database; the last attempt failed: pg_trickle.max_databases is 1"
                ]
            owner.execute("SELECT pgtrickle.set(%s, NULL)", (most,))
            until(lambda: served() == both)

            with psycopg.connect(second.direct_dsn, autocommit=True) as there:
                # As an ordinary role: ALTER DATABASE … SET counts first, so it goes.
                superuser.execute(f"ALTER DATABASE {second.name} RESET ALL".encode())
                there.execute("SELECT pgtrickle.set(%s, 'off')", (enabled,))
                until(lambda: served() == {first.name})
                there.execute("SELECT pgtrickle.set(%s, 'on')", (enabled,))
                until(lambda: served() == both)


def test_an_ordinary_role_cannot_attach_settings_to_a_database(tuned: Tuned) -> None:
    """That is the reason for pgtrickle.set()."""
    with tuned.owner() as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
        conn.execute(f"ALTER DATABASE {tuned.database.name} SET pg_trickle.enabled = off".encode())


def test_a_server_configured_to_load_the_library_does_not_start(pg_version: ServerVersion) -> None:
    """The only printed line that must not be used, because there is no library."""
    name, _, library = DATABASES["settings"]["shared_preload_libraries"]["printed"].partition(" = ")
    base = Path(tempfile.mkdtemp(prefix="pgtrickle-compatibility-"))
    try:
        server = EmbeddedServer(base / "data", version=pg_version, settings={"fsync": "off", name: library.strip("'")})
        with pytest.raises(EmbeddedServerError, match='could not access file "pg_trickle"'):
            server.start()
    finally:
        shutil.rmtree(base)
