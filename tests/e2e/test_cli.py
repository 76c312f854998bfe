"""The command line as users run it: the real executable on a real server. These tests do not need Spark."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

import pgtrickle
from pgtrickle.catalog.install import install as install_catalog
from tests.support.database import TestDatabase

EXECUTABLE = Path(sys.executable).parent / "pgtrickle"
COMMANDS = [
    *("install", "uninstall", "upgrade", "create", "alter", "drop", "refresh"),
    *("list", "status", "explain", "history", "doctor", "demo", "run", "prepare", "verify"),
    *("wait", "pause", "resume", "drain", "top", "profile", "tune"),
]
ORDERS = (
    "CREATE TABLE orders (id int PRIMARY KEY, region text, amount numeric);"
    "INSERT INTO orders SELECT n, 'r' || n % 3, n FROM generate_series(1, 30) AS n"
)
REVENUE = "SELECT region, sum(amount) AS total FROM orders GROUP BY region"


def environment(dsn: str | None, **variables: str) -> dict[str, str]:
    """Without the caller's connection settings; the DSN is in the variable, as most users will have it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "PGTRICKLE"))}
    return kept | ({"PGTRICKLE_DSN": dsn} if dsn is not None else {}) | variables


def cli(dsn: str | None, *arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [EXECUTABLE, *arguments],
        env=environment(dsn, **variables),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def succeed(dsn: str | None, *arguments: str, stdin: str = "", **variables: str) -> str:
    done = cli(dsn, *arguments, stdin=stdin, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fail(code: int, dsn: str | None, *arguments: str, **variables: str) -> str:
    """The stderr output of a command that must fail with this exit code."""
    done = cli(dsn, *arguments, **variables)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stderr


@pytest.fixture
def shop(database: TestDatabase, conn: psycopg.Connection) -> TestDatabase:
    """A database with a catalog and a table, without stream tables."""
    install_catalog(conn)
    conn.execute(ORDERS)
    return database


def test_help_names_all_commands_and_gives_examples() -> None:
    text = succeed(None, "--help")
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert "Examples:" in text
    assert "5 not done in time" in text
    assert pgtrickle.__version__ in succeed(None, "--version")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    assert f"Usage: pgtrickle {command}" in succeed(None, command, "--help")


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("refresh",),
        ("refresh", "--all", "revenue"),
        ("create", "revenue", "--mode", "SOMETIMES", "SELECT 1"),
        ("create", "revenue", "  "),
        ("create", "revenue", "SELECT 1", "--file", "-"),
        ("alter", "revenue"),
        ("history", "revenue", "--limit", "0"),
        ("create", "revenue", "--file", "does-not-exist.sql"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    assert "Error" in fail(2, "host=nowhere.invalid", *arguments)


@pytest.mark.pgversions
def test_the_life_of_a_stream_table_without_a_refresh(database: TestDatabase, conn: psycopg.Connection) -> None:
    dsn = database.dsn
    conn.execute(ORDERS)
    version = succeed(dsn, "install")
    assert "is installed" in version
    assert succeed(dsn, "install") == version
    assert succeed(dsn, "upgrade").startswith("the catalog has version")
    assert json.loads(succeed(dsn, "list", "--json")) == []

    created = json.loads(succeed(dsn, "create", "revenue", REVENUE, "--schedule", "5m", "--no-init", "--json"))
    assert (created["name"], created["effective_mode"], created["key"]) == (
        "public.revenue",
        "DIFFERENTIAL",
        ["region"],
    )
    succeed(dsn, "create", "big", "--no-init", "--mode", "full", stdin="SELECT id FROM orders WHERE amount > 20;\n")
    listed = {table["name"]: table for table in json.loads(succeed(dsn, "list", "--json"))}
    assert listed.keys() == {"public.revenue", "public.big"}
    assert listed["public.revenue"]["schedule"] == "5m"
    assert listed["public.big"]["refresh_mode"] == "FULL"
    assert [line.split("\t")[0] for line in succeed(dsn, "list").splitlines()] == ["public.revenue", "public.big"]

    succeed(dsn, "alter", "revenue", "--schedule", "10s", "--placement", "spark", "--status", "suspended")
    (changed,) = [table for table in json.loads(succeed(dsn, "list", "--json")) if table["name"] == "public.revenue"]
    assert (changed["schedule"], changed["status"]) == ("10s", "SUSPENDED")
    succeed(dsn, "alter", "revenue", "--query", REVENUE.replace("GROUP", "WHERE amount > 1 GROUP"))
    assert "has another key" in fail(
        1, dsn, "alter", "revenue", "--query", "SELECT region, amount AS total FROM orders"
    )

    (status, _) = sorted(json.loads(succeed(dsn, "status", "--json")), key=lambda row: row["status"], reverse=True)
    assert (status["name"], status["staleness"], status["last_action"]) == ("public.revenue", None, None)
    assert "never filled" in succeed(dsn, "status")
    assert "delta plan:" in succeed(dsn, "explain", "revenue")
    assert "refresh_mode is FULL" in succeed(dsn, "explain", "big")
    assert json.loads(succeed(dsn, "explain", "revenue", "--json"))["query"].startswith("SELECT region")
    assert json.loads(succeed(dsn, "history", "revenue", "--json")) == []

    succeed(dsn, "drop", "big")
    assert "nothing was removed" in fail(1, dsn, "uninstall")  # nobody answers the question
    assert "removed" in succeed(dsn, "uninstall", "--yes", "--drop-tables")
    assert conn.execute("SELECT to_regnamespace('pgtrickle'), to_regclass('revenue')").fetchone() == (None, None)


@pytest.mark.parametrize("name", ['"Umsätze ""2026"""', 'public."with space"', "x" * 63])
def test_names_that_need_quotes(shop: TestDatabase, name: str) -> None:
    succeed(shop.dsn, "create", name, REVENUE, "--no-init")
    assert succeed(shop.dsn, "explain", name)
    (status,) = json.loads(succeed(shop.dsn, "status", "--json"))
    assert succeed(shop.dsn, "history", status["name"]) == ""
    succeed(shop.dsn, "drop", status["name"])


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELEC region FROM orders", 'syntax error at or near "SELEC"'),
        ("SELECT * FROM nowhere", 'relation "nowhere" does not exist'),
        ("SELECT colour FROM orders", 'column "colour" does not exist'),
        ("SELECT id, id FROM orders", "specified more than once"),
        ("SELECT FROM orders", "the query returns no columns"),
        ("SELECT 1 AS a; DROP TABLE orders", "cannot insert multiple commands"),
        ("SELECT 1 AS a; COMMIT; DROP TABLE orders", "cannot insert multiple commands"),
        ("DELETE FROM orders RETURNING id", "error"),
    ],
)
def test_an_invalid_query_is_refused(shop: TestDatabase, query: str, said: str) -> None:
    stderr = fail(1, shop.dsn, "create", "revenue", query, "--no-init")
    assert stderr.startswith("error: ")
    assert said in stderr
    assert json.loads(succeed(shop.dsn, "list", "--json")) == []
    assert len(shop_rows(shop)) == 30


def shop_rows(shop: TestDatabase) -> list[tuple[int]]:
    with psycopg.connect(shop.direct_dsn) as conn:
        return conn.execute("SELECT id FROM orders").fetchall()


def test_names_that_are_taken_reserved_or_unknown(shop: TestDatabase) -> None:
    succeed(shop.dsn, "create", "revenue", REVENUE, "--no-init")
    assert "already exists" in fail(1, shop.dsn, "create", "revenue", REVENUE, "--no-init")
    assert "already exists" in fail(1, shop.dsn, "create", "orders", REVENUE, "--no-init")
    assert "is reserved" in fail(1, shop.dsn, "create", "pgtrickle.revenue", REVENUE, "--no-init")
    for command in ("refresh", "explain", "history"):
        stderr = fail(1, shop.dsn, command, "nowhere")
        assert "there is no stream table nowhere" in stderr
        assert "hint: Stream tables here: public.revenue." in stderr
    assert "nowhere" in fail(1, shop.dsn, "drop", "nowhere")
    assert "nowhere" in fail(1, shop.dsn, "alter", "nowhere", "--schedule", "1s")
    succeed(shop.dsn, "create", "on_it", "SELECT total FROM revenue", "--no-init")
    assert "is read by public.on_it" in fail(1, shop.dsn, "drop", "revenue")
    succeed(shop.dsn, "drop", "revenue", "--cascade")
    assert json.loads(succeed(shop.dsn, "list", "--json")) == []


def test_differential_mode_names_the_unsupported_part(shop: TestDatabase) -> None:
    query = "SELECT id, row_number() OVER (ORDER BY amount) AS place FROM orders"
    stderr = fail(1, shop.dsn, "create", "places", query, "--mode", "DIFFERENTIAL", "--no-init")
    assert "cannot be maintained differentially" in stderr
    assert "hint: Use refresh_mode AUTO or FULL" in stderr
    created = json.loads(succeed(shop.dsn, "create", "places", query, "--no-init", "--json"))
    assert created["effective_mode"] == "FULL"
    assert created["mode_reason"]
    assert "cannot be maintained" in fail(1, shop.dsn, "alter", "places", "--mode", "DIFFERENTIAL")


def test_a_database_without_catalog_says_how_to_get_one(database: TestDatabase) -> None:
    for arguments in (
        ("list",), ("status",), ("refresh", "--all"), ("create", "x", "SELECT 1 AS a"), ("drop", "x"), ("run", "--once"),
        ("alter", "x", "--schedule", "1s"), ("uninstall", "--yes"), ("upgrade",), ("explain", "x"), ("history", "x"),
    ):  # fmt: skip
        stderr = fail(1, database.dsn, *arguments)
        assert "has no pgtrickle catalog" in stderr
        assert "hint: Run `pgtrickle install`." in stderr


def test_missing_privileges_are_named(shop: TestDatabase) -> None:
    guest = shop.create_role("guest")
    dsn = shop.dsn_as(guest)
    assert f"role {guest} may not read column region, amount of public.orders" in fail(
        1, dsn, "create", "public.x", REVENUE, "--no-init"
    )
    succeed(shop.dsn, "create", "revenue", REVENUE, "--no-init")
    assert "may not refresh stream table" in fail(1, dsn, "refresh", "revenue")
    assert "error: " in fail(1, dsn, "drop", "revenue")
    assert "belongs to role app" in fail(1, dsn, "uninstall", "--yes")
    assert "error: " in fail(1, dsn, "run", "--once")
    assert json.loads(succeed(dsn, "list", "--json"))[0]["owner"] == "app"


def test_an_owner_without_the_service_role_requests_a_refresh(shop: TestDatabase, conn: psycopg.Connection) -> None:
    owner = shop.create_role("owner")
    conn.execute(sql.SQL("GRANT CREATE ON SCHEMA public TO {o}; GRANT SELECT, TRIGGER ON orders TO {o}").format(
        o=sql.Identifier(owner)))  # fmt: skip
    succeed(shop.dsn_as(owner), "create", "revenue", REVENUE, "--no-init")
    stderr = fail(1, shop.dsn_as(owner), "refresh", "revenue")
    assert "no service is running" in stderr
    assert conn.execute("SELECT status, requested_by FROM pgtrickle.pgt_requests").fetchall() == [("PENDING", owner)]
    with psycopg.connect(shop.superuser_dsn, autocommit=True) as superuser:
        superuser.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(sql.Identifier(owner)))


def test_an_unreachable_server_is_exit_code_4_and_no_password_is_shown() -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        plain = f"postgresql://app:s3cret@127.0.0.1:{port}/shop"
        for stderr in (
            fail(4, None, "--dsn", plain, "list"),
            fail(4, None, "list", "--dsn", plain),
            fail(4, f"host=127.0.0.1 port={port} dbname=shop password=s3cret", "list"),
            fail(4, "postgresql//app:s3cret@127.0.0.1/shop", "list"),
            fail(4, "postgresql://app:p@s3cret@127.0.0.1/shop", "list"),
            fail(4, "host=127.0.0.1 password=s3cret nonsense", "list"),
        ):
            assert stderr.startswith("error: ")
            assert "hint: " in stderr
            assert "s3cret" not in stderr
            assert "Give a DSN" not in stderr
        without = fail(4, None, "list", PGHOST="127.0.0.1", PGPORT=str(port), PGPASSWORD="s3cret")
        assert f"port {port} failed" in without
        assert "Give a DSN" in without


@pytest.mark.direct("PgBouncer here asks for no password")
def test_a_wrong_password_is_exit_code_4(shop: TestDatabase) -> None:
    guest = shop.create_role("guest")
    with _password_required(shop, guest, "r1ght"):
        right = f"{shop.dsn_as(guest)}?password=r1ght"
        assert json.loads(succeed(right, "list", "--json")) == []
        stderr = fail(4, right.replace("r1ght", "wr0ng"), "list")
    assert "password authentication failed" in stderr
    assert "wr0ng" not in stderr


@contextmanager
def _password_required(shop: TestDatabase, role: str, password: str) -> Iterator[None]:
    rules = shop.server.data_dir / "pg_hba.conf"
    former = rules.read_text()
    with psycopg.connect(shop.superuser_dsn, autocommit=True) as conn:
        conn.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), sql.Literal(password)))
        rules.write_text(f"host all {role} 127.0.0.1/32 scram-sha-256\n{former}")
        try:
            # Asked for in the same session, the file is read before the next connection is accepted.
            conn.execute("SELECT pg_reload_conf()")
            yield
        finally:
            rules.write_text(former)
            conn.execute("SELECT pg_reload_conf()")


def test_nothing_is_removed_without_confirmation(shop: TestDatabase) -> None:
    for answer in ("n\n", ""):
        done = cli(shop.dsn, "uninstall", stdin=answer)
        assert done.returncode == 1
        assert done.stderr.endswith("nothing was removed\n")
        assert "interrupted" not in done.stderr
    succeed(shop.dsn, "list")
    assert "is removed" in succeed(shop.dsn, "uninstall", stdin="y\n")


def test_a_query_over_the_current_time_is_warned_about(shop: TestDatabase) -> None:
    done = cli(shop.dsn, "create", "recent", "SELECT id, now() AS at FROM orders", "--no-init")
    assert done.returncode == 0
    assert done.stderr.count("the query of stream table public.recent depends on the current time") == 1
    assert "hint: Give it the longest" in done.stderr


def test_libpq_variables_name_the_database(shop: TestDatabase) -> None:
    where = {"PGHOST": "127.0.0.1", "PGPORT": str(shop.server.port), "PGDATABASE": shop.name, "PGUSER": "app"}
    assert json.loads(succeed(None, "list", "--json", **where)) == []


@pytest.mark.direct("doctor finds the pooler too")
@pytest.mark.pgversions
def test_doctor_reports_problems_and_remedies(shop: TestDatabase, conn: psycopg.Connection) -> None:
    succeed(shop.dsn, "create", "revenue", REVENUE, "--no-init")
    alone = {
        finding["check"]: finding["remedy"]
        for finding in json.loads(cli(shop.dsn, "doctor", "--json").stdout)["findings"]
    }
    assert alone["service"] == "Start one: pgtrickle run"
    assert set(alone) <= {"service", "stale"}, "nobody has filled it"
    conn.execute("INSERT INTO pgtrickle.pgt_services VALUES (gen_random_uuid(), 'here', 1, 'test')")
    conn.execute("UPDATE pgtrickle.pgt_stream_tables SET tier = 'frozen'")  # so that it cannot be late
    assert succeed(shop.dsn, "doctor") == "no problems found\n"
    assert json.loads(succeed(shop.dsn, "doctor", "--json")) == {"ok": True, "findings": []}
    conn.execute("DELETE FROM pgtrickle.pgt_services")

    conn.execute("ALTER TABLE orders DISABLE TRIGGER ALL")
    conn.execute("SELECT pgtrickle.refresh_stream_table('revenue')")
    conn.execute("UPDATE pgtrickle.pgt_stream_tables SET consecutive_errors = 2, last_error = 'disk full'")
    conn.execute("SELECT pgtrickle.alter_stream_table('revenue', status => 'SUSPENDED')")
    with psycopg.connect(shop.direct_dsn) as idle:
        idle.execute("SELECT 1")
        done = cli(shop.dsn, "doctor", "--json", "--held-seconds", "0", JAVA_HOME="/nonexistent")
    assert done.returncode == 1
    findings = json.loads(done.stdout)["findings"]
    said = {(finding["check"], finding["subject"]) for finding in findings}
    assert {("java", "this machine"), ("capture", "orders"), ("requests", shop.name)} <= said
    texts = " ".join(finding["problem"] for finding in findings)
    for part in ("4 disabled", "1 refresh requests waiting", "disk full", "is suspended", "transaction open for"):
        assert part in texts
    assert all(finding["remedy"] for finding in findings)

    conn.execute("DROP TRIGGER pgtrickle_capture_insert_" + _stable_name(conn) + " ON orders")
    assert "1 missing and 3 disabled" in cli(shop.dsn, "doctor").stdout
    conn.execute("SELECT pgtrickle._retrack('orders')")
    assert "capture:" not in cli(shop.dsn, "doctor").stdout


def _stable_name(conn: psycopg.Connection) -> str:
    row = conn.execute("SELECT source_stable_name FROM pgtrickle.pgt_change_tracking").fetchone()
    assert row is not None
    return str(row[0])


@pytest.mark.direct("doctor finds the pooler too")
def test_doctor_checks_the_catalog(database: TestDatabase, conn: psycopg.Connection) -> None:
    done = cli(database.dsn, "doctor")
    assert done.returncode == 1
    assert "has no pgtrickle catalog" in done.stdout
    install_catalog(conn, target=1)
    assert "Run `pgtrickle upgrade`" in cli(database.dsn, "doctor").stdout
    succeed(database.dsn, "upgrade")
    assert succeed(database.dsn, "doctor") == "no problems found\n"
    conn.execute("BEGIN; CREATE TABLE t (a int); PREPARE TRANSACTION 'doctor'")
    done = cli(database.dsn, "doctor", "--held-seconds", "0")
    assert "prepared transaction doctor" in done.stdout
    conn.execute("ROLLBACK PREPARED 'doctor'")
