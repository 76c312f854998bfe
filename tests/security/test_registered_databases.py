"""A registered database that is read with a separate login, and in which mallory is an ordinary role."""

from __future__ import annotations

import json
import socket
import struct
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyarrow import flight

import pgtrickle
from pgtrickle.catalog.databases import reachable
from pgtrickle.catalog.trust import require_private_path
from pgtrickle.errors import ConnectionFailedError, DatabaseFailedError, UntrustedCatalogError
from pgtrickle.service.broker.broker import Broker
from pgtrickle.service.config import ServiceConfig, load_config
from pgtrickle.sites.remote.connections import Connections
from tests.security.roles import Roles
from tests.support.database import TestDatabase, fresh_database
from tests.support.service import until

pytestmark = pytest.mark.pgversions

_SHADOWS = """
CREATE FUNCTION public.unnest(text[]) RETURNS SETOF text LANGUAGE plpgsql AS
    $$ BEGIN PERFORM {m}.evil(); RETURN QUERY SELECT pg_catalog.unnest($1); END $$;
CREATE FUNCTION public.unnest(bigint[]) RETURNS SETOF bigint LANGUAGE plpgsql AS
    $$ BEGIN PERFORM {m}.evil(); RETURN QUERY SELECT pg_catalog.unnest($1); END $$;
CREATE FUNCTION public.format(text, text, text) RETURNS text LANGUAGE plpgsql AS
    $$ BEGIN PERFORM {m}.evil(); RETURN pg_catalog.format($1, $2, $3); END $$;
"""


@dataclass(frozen=True)
class Crm:
    """The other database, and the login that reads it."""

    roles: Roles  # as it has them
    reader: str

    @property
    def database(self) -> TestDatabase:
        return self.roles.database


@contextmanager
def crm(roles: Roles) -> Iterator[Crm]:
    with fresh_database(roles.database.server, "crm") as database:
        reader = roles.database.create_role("reader")
        there = Roles(database, roles.alice, roles.bob, roles.mallory)
        with psycopg.connect(database.superuser_dsn, autocommit=True) as conn:
            for owner in (roles.alice, roles.mallory):
                conn.execute(f"CREATE SCHEMA {owner} AUTHORIZATION {owner}".encode())
                conn.execute(f"GRANT USAGE ON SCHEMA {owner} TO PUBLIC".encode())
        with pgtrickle.connect(database.dsn) as db:
            db.install(service_role=reader)
        there.sql(
            roles.alice,
            f"CREATE TABLE {roles.alice}.customers (id int PRIMARY KEY, secret text)",
            f"GRANT SELECT, TRIGGER ON {roles.alice}.customers TO {reader}",
        )
        there.sql(
            roles.mallory,
            f"CREATE FUNCTION {roles.mallory}.evil() RETURNS void LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE LOG 'evil ran as %', current_user; END $$",
        )
        with roles.service() as db:
            db.add_database("crm", database.direct_dsn_as(reader))
        yield Crm(there, reader)


def test_functions_in_public_do_not_shadow_those_of_postgresql(roles: Roles) -> None:
    with crm(roles) as other:
        with psycopg.connect(other.database.superuser_dsn, autocommit=True) as conn:
            conn.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
        other.roles.sql(roles.mallory, _SHADOWS.format(m=roles.mallory))
        with roles.service() as db:
            query = f"SELECT id, secret FROM crm.{roles.alice}.customers"
            db.create_stream_table("public.st", query, initialize=False)
            asked = db.engine.remote.ask("crm", "SELECT n FROM unnest(%s::text[]) AS n", (["a", "b"],))
            db.drop_stream_table("public.st")
        assert asked == [("a",), ("b",)]
        other.roles.assert_powerless()


def test_a_brokers_token_of_one_database_is_useless_for_another(roles: Roles) -> None:
    with crm(roles) as other, fresh_database(roles.database.server, "mallorys") as own:
        with psycopg.connect(own.superuser_dsn, autocommit=True) as conn:
            conn.execute(f"ALTER DATABASE {own.name} OWNER TO {roles.mallory}".encode())
        with pgtrickle.connect(own.direct_dsn_as(roles.mallory)) as db:
            db.install(service_role=other.reader)
        connections = Connections()
        broker = Broker(uuid.uuid4(), connections, lease_seconds=30.0)
        try:
            for database in (own, other.database):
                broker.serve(database.name, database.direct_dsn_as(other.reader), 1.0)
            address, token, node = _broker(own, roles.mallory)
            _, crm_token, crm_node = _broker(other.database, roles.app)
            assert node != crm_node
            assert _offer(address, token, node) is None  # nobody wants anything there
            assert _offer(address, crm_token, crm_node) is None
            with pytest.raises(flight.FlightUnauthenticatedError):
                _offer(address, token, crm_node)
            with pytest.raises(flight.FlightUnauthenticatedError):
                _rows(address, token, crm_node)
        finally:
            broker.stop()
            connections.close()


def _broker(database: TestDatabase, administrator: str) -> tuple[str, str, str]:
    """The broker in the catalog of a database."""
    found: list[Any] = []
    with psycopg.connect(database.direct_dsn_as(administrator), autocommit=True) as conn:

        def elected() -> bool:
            query = "SELECT address, token, pgtrickle._database_identity() FROM pgtrickle.pgt_broker"
            found[:] = conn.execute(query).fetchall()
            return bool(found)

        until(elected, "a broker is elected")
    address, token, node = found[0]
    return address, token, node


def _offer(address: str, token: str, node: str) -> Any:
    body = {"token": token, "node": node, "consumers": [], "seconds": 0.1}
    with flight.connect(address) as client:
        (result,) = client.do_action(flight.Action("offer", json.dumps(body).encode()))
        return json.loads(result.body.to_pybytes())


def _rows(address: str, token: str, node: str) -> Any:
    ticket = {"token": token, "node": node, "number": 1, "source": "x"}
    with flight.connect(address) as client:
        return client.do_get(flight.Ticket(json.dumps(ticket).encode())).read_all()


def test_behind_a_pooler_a_search_path_that_everybody_may_write_to_is_refused(roles: Roles) -> None:
    """A pooler in transaction mode does not keep the search path that the service would set."""
    with crm(roles) as other:
        with psycopg.connect(other.database.superuser_dsn, autocommit=True) as conn:
            conn.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
        with (
            psycopg.connect(other.database.direct_dsn_as(other.reader)) as conn,
            pytest.raises(UntrustedCatalogError, match="schema public"),
        ):
            require_private_path(conn)
        options = "-c search_path=pg_catalog,pg_temp"
        with psycopg.connect(other.database.direct_dsn_as(other.reader), options=options) as conn:
            require_private_path(conn)


class Eavesdropper:
    """A server that asks every client for its password in clear text."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with client, suppress(OSError, struct.error):
                client.settimeout(5)
                length, code = struct.unpack("!II", client.recv(8, socket.MSG_WAITALL))
                while code in (80877103, 80877104):  # SSLRequest, GSSENCRequest
                    client.sendall(b"N")
                    length, code = struct.unpack("!II", client.recv(8, socket.MSG_WAITALL))
                client.recv(length - 8, socket.MSG_WAITALL)
                client.sendall(b"R" + struct.pack("!II", 8, 3))  # AuthenticationCleartextPassword
                _, length = struct.unpack("!cI", client.recv(5, socket.MSG_WAITALL))
                self.heard.append(client.recv(length - 4, socket.MSG_WAITALL).rstrip(b"\0"))


@pytest.mark.parametrize(
    "taken",
    ["password=${HR_PASSWORD}", "", "passfile={file}", "service=hr", "hostaddr=127.0.0.1"],
)
def test_a_registered_database_gets_no_secret_of_another(
    taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passwords = tmp_path / "passwords"
    passwords.write_text("hr.example:*:*:*:secret of a file\n127.0.0.1:*:*:*:secret of a file\n")
    passwords.chmod(0o600)
    services = tmp_path / "services"
    services.write_text("[hr]\npassword=secret of a service\n")
    for name, value in {
        "HR_PASSWORD": "secret of the environment",
        "PGPASSWORD": "secret of the service itself",
        "PGSERVICEFILE": str(services),
    }.items():
        monkeypatch.setenv(name, value)
    if "hostaddr" in taken:  # gets what the file has for the host
        monkeypatch.setenv("PGPASSFILE", str(passwords))
    eavesdropper = Eavesdropper()
    host = "hr.example" if "hostaddr" in taken else "127.0.0.1"
    dsn = f"host={host} port={eavesdropper.port} user=u dbname=x {taken.replace('{file}', str(passwords))}"
    connections = Connections(dsn_policy=ServiceConfig(()).dsn_policy)
    try:
        with pytest.raises(DatabaseFailedError), connections.open("hr", dsn):
            pass
    finally:
        eavesdropper.close()
    assert [heard for heard in eavesdropper.heard if b"secret" in heard] == []


def test_the_service_takes_variables_that_its_configuration_allows(tmp_path: Path) -> None:
    file = tmp_path / "pgtrickle.toml"
    file.write_text('[servers.main]\ndsn = ""\n[service]\ndsn_variables = ["HR_*"]\ndsn_options = ["sslkey"]\n')
    environ = {"HR_PASSWORD": "known", "PGTRICKLE_PASSWORD": "known"}
    by_default, policy = ServiceConfig(()).dsn_policy, load_config(file, None).dsn_policy
    assert "known" in reachable("hr", "host=h sslkey=x password=${HR_PASSWORD}", environ, policy)
    assert "known" in reachable("hr", "host=h password=${PGTRICKLE_PASSWORD}", environ, by_default)
    with pytest.raises(ConnectionFailedError, match="dsn_variables"):
        reachable("hr", "host=h password=${PGTRICKLE_PASSWORD}", environ, policy)
