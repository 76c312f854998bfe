"""The commands tune, profile and top on a real server. No service runs; the tests write the rows it would write."""

from __future__ import annotations

import csv
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import click
import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgtrickle.api.database import connect
from pgtrickle.catalog.install import install as install_catalog
from pgtrickle.cli.commands.profile import profile
from pgtrickle.cli.commands.top import top
from pgtrickle.cli.commands.tune import tune
from pgtrickle.errors import NotInstalledError
from pgtrickle.observability.tuning import PROFILES, read_setting
from tests.support.database import TestDatabase, fresh_database

pytestmark = pytest.mark.pgversions

SERVICE = "5e1f1e55-0000-4000-8000-000000000001"
REVENUE = "SELECT region, sum(amount) AS total FROM orders GROUP BY region"


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """The commands run in this process and handle its signals."""
    taken = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in taken.items():
        signal.signal(number, handler)


@pytest.fixture
def shop(database: TestDatabase, conn: psycopg.Connection) -> TestDatabase:
    """A database with a catalog and two stream tables."""
    install_catalog(conn)
    conn.execute("CREATE TABLE orders (id int PRIMARY KEY, region text, amount numeric)")
    with connect(database.dsn) as db:
        db.create_stream_table("revenue", REVENUE, schedule="5s", initialize=False)
        db.create_stream_table('"[big]"', "SELECT id FROM orders WHERE amount > 20", initialize=False)
    return database


def run(command: click.Command, dsn: str, *arguments: str) -> Result:
    return CliRunner().invoke(
        command, [*arguments, "--dsn", dsn], catch_exceptions=False, standalone_mode=False, terminal_width=110
    )


def value(conn: psycopg.Connection, name: str) -> str:
    setting = read_setting(conn, name)
    assert setting is not None
    return setting.value


def start_service(conn: psycopg.Connection, pool_size: int, active: int) -> None:
    conn.execute(
        "INSERT INTO pgtrickle.pgt_services (service_id, host, pid, version, kind, lease_expires, pool_size, pool_active,"
        " ticked_at, settings) VALUES (%(id)s, 'test', 1, '0', 'service', clock_timestamp() + interval '5 minutes', %(size)s,"
        " %(active)s, clock_timestamp(), jsonb_build_object('max_dynamic_refresh_workers', %(size)s::text,"
        " 'parallel_refresh_mode', 'on', 'per_database_worker_quota', '0', 'scheduler_interval_ms', '1000'))",
        {"id": SERVICE, "size": pool_size, "active": active},
    )


def add_jobs(conn: psycopg.Connection, status: str, number: int) -> None:
    started = "clock_timestamp()" if status == "RUNNING" else "NULL"
    conn.execute(
        sql.SQL(
            "INSERT INTO pgtrickle.pgt_jobs (service_id, kind, pgt_ids, status, started_at, worker, worker_pid)"
            " SELECT %s, 'SINGLETON', ARRAY[s.pgt_id], %s, {}, 'worker-1', pg_backend_pid()"
            " FROM generate_series(1, %s), pgtrickle.pgt_stream_tables AS s WHERE s.pgt_name = 'revenue'"
        ).format(sql.SQL(started)),
        (SERVICE, status, number),
    )


# tune


def test_tune_prints_sizes_profiles_and_the_budget(shop: TestDatabase) -> None:
    text = run(tune, shop.dsn).stdout
    assert "Very Large  200+" in text
    assert f"Database {shop.name} has 2 stream tables" in text
    for chosen in PROFILES.values():
        assert all(line in text for line in chosen.as_configuration())
    assert "max_connections" in text
    assert "need not be raised" in text
    assert "4g for Spark's driver" in text
    assert "`pgtrickle profile`" in text
    # The guide's figure was not measured here.
    assert "50 ms" not in text
    assert "P99" not in text


def test_tune_computes_the_budget_from_the_server(shop: TestDatabase, conn: psycopg.Connection) -> None:
    conn.execute("SELECT pgtrickle.set('max_dynamic_refresh_workers', '9'), pgtrickle.set('merge_work_mem_mb', '100')")
    with fresh_database(shop.server, "second") as second, fresh_database(shop.server, "disabled") as disabled:
        for other in (second, disabled):
            with psycopg.connect(other.direct_dsn, autocommit=True) as there:
                install_catalog(there)
                if other is disabled:
                    there.execute("SELECT pgtrickle.set('enabled', 'off')")
        found = json.loads(run(tune, shop.dsn, "--json", "--services", "2").stdout)
    (server,) = found["servers"]
    assert server["max_connections"] == 200
    assert server["version"] == conn.info.server_version // 10000
    assert server["in_use"] >= 1  # `conn`
    databases = {each["name"]: each for each in server["databases"]}
    assert databases[shop.name]["stream_tables"] == 2
    assert databases[second.name]["enabled"]
    assert not databases[disabled.name]["enabled"]
    # Databases of other tests may be there.
    served = [each for each in databases.values() if each["stream_tables"] is not None and each["enabled"]]
    assert {shop.name, second.name} <= {each["name"] for each in served}
    budget = server["budget"]
    kept_idle = max(0, sum(each["at_once"] for each in served) - 9)
    assert budget["needed"] == 2 * (1 + len(served) + 9 + kept_idle)
    assert budget["apply_mb"] == 2 * 9 * 100
    assert budget["fits"]
    assert budget["worker_processes"] == 0
    assert found["advice"]["recommended"] == 2
    assert found["advice"]["max_dynamic_refresh_workers"] == 9
    text = run(tune, shop.dsn).stdout
    assert "lower max_dynamic_refresh_workers from 9 to 2" in text
    assert "At most 4 of them work for it at once" in text


def test_tune_reports_too_few_connections(shop: TestDatabase) -> None:
    role = shop.create_role("narrow")
    with psycopg.connect(shop.superuser_dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("ALTER ROLE {} CONNECTION LIMIT 4").format(sql.Identifier(role)))
    text = run(tune, shop.dsn_as(role)).stdout
    assert "TOO FEW" in text
    assert f"aise the limit of role {role} to " in text


def test_tune_works_without_a_catalog(database: TestDatabase) -> None:
    assert "has no pgtrickle catalog" in run(tune, database.dsn).stdout
    assert json.loads(run(tune, database.dsn, "--json").stdout)["advice"]["stream_tables"] is None


def test_tune_counts_the_servers_and_databases_of_the_configuration(shop: TestDatabase, tmp_path: Path) -> None:
    path = tmp_path / "pgtrickle.toml"
    path.write_text(
        f'[servers.one]\ndsn = "{shop.dsn}"\ndatabases = ["{shop.name}"]\n\n'
        f'[servers.two]\ndsn = "{shop.superuser_dsn}"\ndatabases = ["postgres"]\n'
    )
    done = CliRunner().invoke(tune, ["--config", str(path), "--json"], catch_exceptions=False, standalone_mode=False)
    first, second = json.loads(done.stdout)["servers"]
    assert ([each["name"] for each in first["databases"]], first["role"]) == ([shop.name], "app")
    assert [each["name"] for each in second["databases"]] == ["postgres"]
    assert (first["budget"]["needed"], second["budget"]["needed"]) == (1 + 1 + 4, 1 + 0 + 4)


@pytest.mark.parametrize("name", PROFILES)
def test_tune_prints_a_profile_in_both_forms(name: str) -> None:
    # No database is asked.
    done = run(tune, "host=nowhere.invalid", "--profile", name)
    assert all(line in done.stdout for line in PROFILES[name].as_configuration())
    assert all(line in done.stdout for line in PROFILES[name].as_sql())
    found = json.loads(run(tune, "host=nowhere.invalid", "--profile", name, "--json").stdout)
    assert found["settings"] == PROFILES[name].settings


@pytest.mark.parametrize("name", PROFILES)
def test_tune_applies_a_profile_as_an_ordinary_role(shop: TestDatabase, conn: psycopg.Connection, name: str) -> None:
    text = run(tune, shop.dsn, "--profile", name, "--apply").stdout
    settings = PROFILES[name].settings
    assert {setting: value(conn, setting) for setting in settings} == settings
    assert f"pg_trickle.scheduler_interval_ms: 1000 (default) → {settings['scheduler_interval_ms']}" in text
    assert "pg_trickle.tiered_scheduling: on, as before" in text
    again = json.loads(run(tune, shop.dsn, "--profile", name, "--apply", "--json").stdout)
    assert all(change["before"] == change["after"] for change in again["changes"])


def test_tune_prints_sql_that_runs(shop: TestDatabase, conn: psycopg.Connection) -> None:
    for chosen in PROFILES.values():
        for statement in chosen.as_sql():
            conn.execute(statement.encode())
        assert {setting: value(conn, setting) for setting in chosen.settings} == chosen.settings


def test_tune_names_values_overridden_by_the_servers_configuration(shop: TestDatabase) -> None:
    with psycopg.connect(shop.superuser_dsn, autocommit=True) as admin:
        admin.execute(
            sql.SQL("ALTER DATABASE {} SET pg_trickle.scheduler_interval_ms = 300").format(sql.Identifier(shop.name))
        )
    text = run(tune, shop.dsn, "--profile", "low-latency", "--apply").stdout
    assert "pg_trickle.scheduler_interval_ms: stays 300, set for the database" in text


@pytest.mark.direct("PgBouncer takes no start-up options")
def test_tune_sets_all_or_nothing(shop: TestDatabase, conn: psycopg.Connection) -> None:
    stranger = shop.create_role("stranger")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="may not change the setting"):
        run(tune, shop.dsn_as(stranger), "--profile", "low-latency", "--apply")
    # The last setting of the profile fails for want of its row's lock: the first ones are not kept either.
    conn.execute("SELECT pgtrickle.set('tiered_scheduling', 'off')")
    impatient = make_conninfo(shop.dsn, options="-c lock_timeout=100ms")
    with psycopg.connect(shop.direct_dsn) as blocker:
        blocker.execute("SELECT FROM pgtrickle.pgt_settings WHERE name = 'tiered_scheduling' FOR UPDATE")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            run(tune, impatient, "--profile", "low-latency", "--apply")
    assert value(conn, "scheduler_interval_ms") == "1000"


@pytest.mark.parametrize("arguments", [("--apply",), ("--profile", "fast")])
def test_tune_wrong_usage(arguments: tuple[str, ...]) -> None:
    with pytest.raises(click.UsageError):
        run(tune, "host=nowhere.invalid", *arguments)


# profile


def test_profile_writes_csv_picture_and_verdict(shop: TestDatabase, conn: psycopg.Connection, tmp_path: Path) -> None:
    start_service(conn, pool_size=4, active=4)
    add_jobs(conn, "RUNNING", 4)
    add_jobs(conn, "QUEUED", 3)
    out = tmp_path / "new" / "folder"
    done = run(profile, shop.dsn, "--seconds", "1", "--interval", "0.25", "--out", str(out), "--json")
    verdict = json.loads(done.stdout)
    assert verdict["verdict"] == "undersized"
    assert verdict["pool_size"] == 4
    with (out / "profile.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == verdict["samples"]
    assert 1 <= len(rows) <= 4  # fewer on a machine that is busy
    assert all((row["active"], row["pool_size"], row["queue_depth"]) == ("4", "4", "3") for row in rows)
    assert len({datetime.fromisoformat(row["ts"]) for row in rows}) == len(rows)
    assert (out / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_profile_prints_the_verdict(shop: TestDatabase, conn: psycopg.Connection, tmp_path: Path) -> None:
    start_service(conn, pool_size=8, active=2)
    add_jobs(conn, "RUNNING", 2)
    text = run(profile, shop.dsn, "--seconds", "0.1", "--out", str(tmp_path)).stdout
    assert text.startswith("oversized: less than half of the workers were busy")
    assert "The largest number of busy workers was 2" in text
    assert str(tmp_path / "profile.png") in text


def test_profile_without_matplotlib(shop: TestDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib", "matplotlib.figure", "matplotlib.ticker"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "profile.png").write_bytes(b"of an earlier run")
    done = run(profile, shop.dsn, "--seconds", "0.1", "--out", str(tmp_path))
    assert "no service serves this database" in done.stderr
    assert "pip install matplotlib" in done.stderr
    assert "written: " in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["profile.csv"]


def test_profile_keeps_its_samples_on_ctrl_c(shop: TestDatabase, tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    process = start(
        "profile", "--dsn", shop.dsn, "--seconds", "600", "--interval", "0.05", "--out", str(tmp_path), "--json"
    )
    until(lambda: path.exists() and path.read_text().count("\n") >= 4, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "ended early" in stderr
    assert json.loads(stdout)["samples"] == path.read_text().count("\n") - 1
    assert (tmp_path / "profile.png").exists()


def test_profile_and_top_need_a_catalog(database: TestDatabase, tmp_path: Path) -> None:
    with pytest.raises(NotInstalledError):
        run(profile, database.dsn, "--seconds", "1", "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(NotInstalledError):
        run(top, database.dsn, "--once")


# top


def test_top_prints_one_frame(shop: TestDatabase, conn: psycopg.Connection) -> None:
    text = run(top, shop.dsn, "--once").stdout
    assert shop.name in text
    assert "2 stream tables" in text
    assert "no jobs" in text
    assert "no events" in text
    start_service(conn, pool_size=4, active=1)
    add_jobs(conn, "RUNNING", 1)
    add_jobs(conn, "QUEUED", 9)
    conn.execute(
        "INSERT INTO pgtrickle.pgt_events (event, pgt_id, payload)"
        " SELECT 'fuse_blown', pgt_id, jsonb_build_object('stream_table', 'public.revenue', 'reason', E'too\\nmuch')"
        " FROM pgtrickle.pgt_stream_tables WHERE pgt_name = 'revenue'"
    )
    text = run(top, shop.dsn, "--once").stdout
    assert "1 of 4 workers busy" in text
    (revenue,) = [line for line in text.splitlines() if line.startswith("public.revenue ")]
    assert "never filled" in revenue
    assert " 5s " in revenue
    assert 'public."[big]"' in text
    assert text.index("RUNNING") < text.index("QUEUED")
    assert "and 5 more" in text
    assert "fuse_blown" in text
    assert "too much" in text


def test_top_shows_the_stalest_first(shop: TestDatabase, conn: psycopg.Connection) -> None:
    conn.execute(
        "UPDATE pgtrickle.pgt_stream_tables SET status = 'ACTIVE', data_timestamp = clock_timestamp() -"
        " CASE pgt_name WHEN 'revenue' THEN interval '1 hour' ELSE interval '1 minute' END"
    )
    text = run(top, shop.dsn, "--once").stdout
    assert text.index("public.revenue") < text.index('public."[big]"')


def test_top_is_live_on_a_terminal_and_ends_with_ctrl_c(shop: TestDatabase, conn: psycopg.Connection) -> None:
    start_service(conn, pool_size=4, active=0)
    terminal, end = pty.openpty()
    process = start("top", "--dsn", shop.dsn, "--interval", "0.1", stdout=end)
    os.close(end)
    shown = bytearray()

    def appears(text: str) -> Callable[[], bool]:
        def look() -> bool:
            if select.select([terminal], [], [], 1)[0]:
                shown.extend(os.read(terminal, 65536))
            return text.encode() in shown

        return look

    try:
        until(appears("never filled"), process)
        # What comes later is seen too.
        add_jobs(conn, "QUEUED", 1)
        until(appears("SINGLETON"), process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()
        os.close(terminal)


def start(command: str, *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """A command in a separate process, for signals."""
    program = f"from pgtrickle.cli.commands.{command} import {command}; {command}()"
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment
    )


def until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
