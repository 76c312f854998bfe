"""Fixtures for all tests: a real server per pytest process, and a fresh database per test."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pgtrickle.embedded.binaries import ServerVersion
from pgtrickle.embedded.server import EmbeddedServer
from tests.support.database import SERVER_SETTINGS, TestDatabase, fresh_database, prepare_server
from tests.support.pgbouncer import Pooler, pgbouncer_program, pooler_before
from tests.support.remote_shop import RemoteShop, open_remote_shop

VERSIONS: dict[str, ServerVersion] = {"15": 15, "16": 16, "18": 18}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pg", choices=sorted(VERSIONS), default="18", help="major version of PostgreSQL (default: 18)")

    parser.addoption(
        "--pooler", action="store_true", help="let pgtrickle connect through PgBouncer in transaction mode"
    )
    parser.addoption(
        "--update-golden", action="store_true", help="write what golden cases give to their files instead of comparing"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-golden") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--update-golden needs a single process: leave out -n")
    # Processes that a script starts in the background ignore SIGINT, and so would the commands that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Run the longest tests first, so that no worker is still running them when the others have finished.
    items.sort(key=lambda item: "test_oracle" not in item.nodeid)
    for item in items if config.getoption("--pooler") else ():
        if pgbouncer_program() is None:
            item.add_marker(pytest.mark.skip("PgBouncer is not installed (on Debian: apt-get install pgbouncer)"))
        elif (direct := item.get_closest_marker("direct")) is not None:
            item.add_marker(pytest.mark.skip(f"without a pooler only: {direct.args[0]}"))


def pytest_report_header(config: pytest.Config) -> str:
    return f"PostgreSQL: {config.getoption('--pg')}"


@pytest.fixture
def update_golden(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--update-golden"))


@pytest.fixture(scope="session")
def pg_version(pytestconfig: pytest.Config) -> ServerVersion:
    return VERSIONS[pytestconfig.getoption("--pg")]


@pytest.fixture(scope="session")
def server(pg_version: ServerVersion) -> Iterator[EmbeddedServer]:
    # Not pytest's own temporary directory: a later pytest run would make it inaccessible to the server's account.
    base = Path(tempfile.mkdtemp(prefix="pgtrickle-test-"))
    try:
        with EmbeddedServer(base / "data", version=pg_version, settings=SERVER_SETTINGS) as running:
            prepare_server(running)
            yield running
    finally:
        shutil.rmtree(base)


@pytest.fixture(scope="session")
def pooler(server: EmbeddedServer, pytestconfig: pytest.Config) -> Iterator[Pooler | None]:
    """The pooler between pgtrickle and the server with `--pooler`, otherwise None."""
    if not pytestconfig.getoption("--pooler"):
        yield None
        return
    with pooler_before(server) as running:
        yield running


@pytest.fixture(scope="module")
def other_server(pg_version: ServerVersion) -> Iterator[EmbeddedServer]:
    """A server of another version, which tests may kill and restore."""
    base = Path(tempfile.mkdtemp(prefix="pgtrickle-test-"))
    try:
        version: ServerVersion = 16 if pg_version == 18 else 18
        settings = SERVER_SETTINGS | {"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"}
        with EmbeddedServer(base / "data", version=version, settings=settings) as running:
            prepare_server(running)
            yield running
    finally:
        shutil.rmtree(base)


@pytest.fixture
def database(server: EmbeddedServer, pooler: Pooler | None, request: pytest.FixtureRequest) -> Iterator[TestDatabase]:
    with fresh_database(server, request.node.name, pooler) as fresh:
        yield fresh


@pytest.fixture
def remote_shop(server: EmbeddedServer, other_server: EmbeddedServer) -> Iterator[RemoteShop]:
    """A shop in three databases, on two servers."""
    with open_remote_shop(server, other_server) as shop:
        yield shop


@pytest.fixture
def conn(database: TestDatabase) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database.direct_dsn, autocommit=True) as connection:
        yield connection
