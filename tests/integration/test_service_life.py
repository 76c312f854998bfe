"""What a service reports about the databases that it serves, and how it releases them."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import psycopg
import pytest
from psycopg import sql

import pgtrickle
from pgtrickle.embedded.binaries import ServerVersion
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.observability.metrics_server import serve_http
from pgtrickle.service import launcher as launcher_module
from pgtrickle.service.service import Service
from pgtrickle.sites.remote.connections import Connections
from tests.support.database import APP_ROLE, TestDatabase, fresh_database, prepare_server
from tests.support.service import running_service, until

pytestmark = pytest.mark.direct("PgBouncer keeps its connections")


def prepare(dsn: str) -> None:
    """An empty table and a stream table: a refresh needs no Spark."""
    with pgtrickle.connect(dsn) as db:
        db.install()
        db.conn.execute("CREATE TABLE item (id int PRIMARY KEY)")
        db.create_stream_table(
            "items",
            "SELECT id FROM item",
            schedule="100ms",
            refresh_mode="FULL",
            initialize=False,
        )


@contextmanager
def readiness(service: Service) -> Iterator[str]:
    """The address of a service's readiness endpoint."""
    http = serve_http(service, "127.0.0.1:0")
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}/readyz"
    finally:
        http.shutdown()
        http.server_close()


def ask(address: str) -> tuple[int, dict[str, Any]]:
    try:
        with urlopen(address, timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as refusal:
        with refusal:
            return refusal.code, json.loads(refusal.read())


def test_readiness_names_databases_that_are_not_served(database: TestDatabase, server: EmbeddedServer) -> None:
    prepare(database.dsn)
    with fresh_database(server, "wrong") as wrong, fresh_database(server, "bare") as bare:
        with pgtrickle.connect(wrong.superuser_dsn) as db:
            db.install()
        with (
            running_service(database.dsn, database.name, wrong.name, bare.name) as service,
            readiness(service) as address,
        ):
            until(lambda: service.launchers[0].databases[database.name].served)
            status, answer = ask(address)
            assert (status, answer["ready"], answer["problems"]) == (503, False, {})
            assert answer["unserved"]["test"].keys() == {wrong.name, bare.name}
            assert answer["unserved"]["test"][bare.name] == "it has no pgtrickle catalog"
            with pgtrickle.connect(wrong.superuser_dsn) as db:
                db.uninstall()
            for one in (wrong, bare):
                prepare(one.dsn)
            until(lambda: ask(address) == (200, {"ready": True, "problems": {}, "unserved": {}}), "readiness")
            with psycopg.connect(bare.superuser_dsn, autocommit=True) as admin:
                alter = sql.SQL("ALTER DATABASE {} SET pg_trickle.enabled = off")
                admin.execute(alter.format(sql.Identifier(bare.name)))
            until(lambda: not service.launchers[0].databases[bare.name].served)
            until(lambda: ask(address)[0] == 200, "readiness, for what is switched off is not missing")


def errors_naming(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """The log entries about a database."""
    return [record.getMessage() for record in caplog.records if getattr(record, "database", None) == name]


def test_a_removed_catalog_or_database_is_logged_in_one_line(
    database: TestDatabase, server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pgtrickle")
    prepare(database.dsn)
    with fresh_database(server, "dropped") as dropped:
        prepare(dropped.dsn)
        with running_service(server.dsn("postgres", APP_ROLE), database.name, dropped.name) as service:
            databases = service.launchers[0].databases
            until(lambda: databases[database.name].served and databases[dropped.name].served)
            with pgtrickle.connect(database.dsn) as db:
                db.uninstall()
            until(lambda: "no longer served: its pgtrickle catalog was removed" in errors_naming(caplog, database.name))
            with pgtrickle.connect(database.dsn) as db:
                db.install()
            until(lambda: databases[database.name].served)
            with psycopg.connect(server.dsn("postgres"), autocommit=True) as admin:
                admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(dropped.name)))
                until(lambda: dropped.name not in databases)
                admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(dropped.name)))
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_after_a_restart_of_the_server_databases_are_served_at_once(
    pg_version: ServerVersion, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That is quicker than making sure that a scheduler keeps running."""
    caplog.set_level(logging.INFO, "pgtrickle")
    monkeypatch.setattr(launcher_module, "LONGEST_BACKOFF", 100_000.0)
    base = Path(tempfile.mkdtemp(prefix="pgtrickle-test-"))
    try:
        with EmbeddedServer(base / "data", version=pg_version, settings={"fsync": "off"}) as server:
            prepare_server(server)
            with fresh_database(server, "restarted") as database:
                prepare(database.dsn)
                with running_service(server.dsn("postgres", APP_ROLE), database.name) as service:
                    until(lambda: service.launchers[0].databases[database.name].served)
                    server.restart()
                    until(lambda: "served again" in errors_naming(caplog, database.name))
                    assert service.launchers[0].databases[database.name].problem is None
    finally:
        shutil.rmtree(base)


def test_a_drained_database_can_be_copied_and_renamed(server: EmbeddedServer) -> None:
    with (
        fresh_database(server, "drained") as database,
        psycopg.connect(server.dsn("postgres"), autocommit=True) as admin,
    ):
        prepare(database.dsn)
        name, copy = sql.Identifier(database.name), sql.Identifier(database.name + "_copy")
        # The launcher's own connection is to the same database.
        with running_service(database.dsn, database.name) as service:
            with psycopg.connect(database.direct_dsn, autocommit=True) as conn:
                conn.execute("CALL pgtrickle.refresh_and_wait('items')")
                conn.execute("CALL pgtrickle.drain('1 minute')")
            admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(copy, name))
            admin.execute(sql.SQL("DROP DATABASE {}").format(copy))
            admin.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(name, copy))
            admin.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(copy, name))
            with psycopg.connect(database.direct_dsn, autocommit=True) as conn:
                conn.execute("SELECT pgtrickle.resume()")
                conn.execute("CALL pgtrickle.refresh_and_wait('items')")
            assert service.launchers[0].databases[database.name].served


def test_a_connection_in_use_at_the_end_is_closed_when_it_is_released(database: TestDatabase) -> None:
    """A poll of another database may still be running when the service has stopped."""
    prepare(database.dsn)
    connections = Connections()
    with connections.open("other", database.dsn) as kept:
        pass
    with connections.open("other", database.dsn) as conn:
        assert conn is kept
        connections.end()
        assert not conn.closed
    assert conn.closed
