"""A broker's data leaves the machine over TLS only, and only for clients that have the token."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
from pyarrow import flight

from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.service.broker.broker import Broker
from pgtrickle.service.broker.flight import request_shared_cut
from pgtrickle.service.config import BrokerConfig, ConfigError, ServerConfig, ServiceConfig, load_config
from pgtrickle.service.service import Service
from pgtrickle.sites.shared_cut import SharedCut
from tests.support.database import APP_ROLE
from tests.support.hub import Hub, hub_with
from tests.support.service import until

pytestmark = pytest.mark.pgversions  # the address and the token are in a catalog

SECONDS = 20.0


@dataclass(frozen=True)
class Pair:
    """A self-signed certificate and its key."""

    certificate: Path
    key: Path


def make_pair(directory: Path, address: str) -> Pair:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("the openssl command is not installed: no certificate can be made")
    directory.mkdir()
    pair = Pair(directory / "broker.crt", directory / "broker.key")
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    about = ["-subj", "/CN=broker", "-addext", f"subjectAltName=IP:{address}"]
    files = ["-keyout", str(pair.key), "-out", str(pair.certificate)]
    subprocess.run([program, "req", *kind, *about, *files], check=True, capture_output=True)
    return pair


@dataclass
class Elected:
    """An elected broker, as another service finds it in the catalog of the hub."""

    shop: Hub
    service: Service
    address: str
    token: str
    node: str

    def ask(self, ca: Path | None, token: str | None = None) -> SharedCut | None:
        consumers = [str(uuid4())]  # one that has used no offer yet
        return request_shared_cut(self.address, token or self.token, self.node, consumers, SECONDS, ca)


@contextmanager
def elected(server: EmbeddedServer, config: BrokerConfig) -> Iterator[Elected]:
    """One service with a broker, which has read something."""
    with hub_with(server, 1) as shop:
        home = shop.homes[0]
        config_ = ServiceConfig(
            (ServerConfig("test", home.superuser_dsn, (home.name,)),),
            list_seconds=0.2,
            broker=config,
            trusted_owners=(APP_ROLE,),
        )
        service = Service(config_)
        service.start()
        try:
            changes = iter(range(1, 1000))

            def is_scanned() -> bool:
                shop.change(next(changes))
                shop.await_exact()
                row = shop.conn.execute("SELECT count(last_tick) FROM pgtrickle.broker_status()").fetchone()
                return row == (1,)

            until(is_scanned, "a scan of the broker")
            row = shop.conn.execute(
                "SELECT address, token, pgtrickle._database_identity() FROM pgtrickle.pgt_broker"
            ).fetchone()
            assert row is not None
            yield Elected(shop, service, *row)
        finally:
            assert service.stop()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair") / "own", "127.0.0.1")


@pytest.fixture(scope="module")
def encrypted(server: EmbeddedServer, pair: Pair) -> Iterator[Elected]:
    with elected(server, BrokerConfig("127.0.0.1:0", pair.certificate, pair.key, pair.certificate)) as broker:
        yield broker


def test_with_the_ca_a_client_reads(encrypted: Elected, pair: Pair) -> None:
    assert encrypted.address.startswith("grpc+tls://127.0.0.1:")
    shared_cut = encrypted.ask(pair.certificate)
    assert shared_cut is not None
    assert shared_cut.sources


def test_another_service_finds_the_broker_and_verifies_it(encrypted: Elected, pair: Pair) -> None:
    """As a refresh does: through the catalog of the hub, with the CA of its own configuration."""
    hub, connections = encrypted.shop.hub, encrypted.service.watch.connections
    for ca, trusts in ((pair.certificate, True), (None, False)):
        other = Broker(uuid4(), connections, 30.0, BrokerConfig(ca=ca))
        other._intervals[hub.dsn] = SECONDS
        assert (other.shared_cut("hub", hub.dsn, encrypted.node, [str(uuid4())]) is not None) is trusts


def test_a_client_that_does_not_trust_the_certificate_gets_nothing(
    encrypted: Elected, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pgtrickle.broker")
    assert encrypted.ask(None) is None, "the system's roots did not sign it"
    assert encrypted.ask(make_pair(tmp_path / "other", "127.0.0.1").certificate) is None
    told = [record.getMessage() for record in caplog.records if "no offer from the broker" in record.getMessage()]
    assert ["certificate verify failed" in one for one in told] == [True, True]


def test_a_certificate_for_another_address_is_refused(server: EmbeddedServer, tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "elsewhere", "10.0.0.5")
    with elected(server, BrokerConfig("127.0.0.1:0", pair.certificate, pair.key)) as broker:
        assert broker.ask(pair.certificate) is None


def test_an_encrypted_broker_does_not_speak_plain_text(encrypted: Elected) -> None:
    plain = encrypted.address.replace("grpc+tls", "grpc")
    assert request_shared_cut(plain, encrypted.token, encrypted.node, [str(uuid4())], 2.0) is None


@pytest.mark.parametrize("token", ["wrong", "wröng", ""])
def test_a_wrong_token_is_refused(encrypted: Elected, pair: Pair, token: str) -> None:
    if token:
        assert encrypted.ask(pair.certificate, token) is None
    ask = {"token": token, "node": encrypted.node, "consumers": [str(uuid4())], "seconds": 1.0}
    get = {"token": token, "node": encrypted.node, "number": 1, "source": "x"}
    with flight.connect(encrypted.address, tls_root_certs=pair.certificate.read_bytes()) as client:
        with pytest.raises(flight.FlightUnauthenticatedError):
            list(client.do_action(flight.Action("offer", json.dumps(ask).encode())))
        with pytest.raises(flight.FlightUnauthenticatedError):
            client.do_get(flight.Ticket(json.dumps(get).encode())).read_all()


def test_the_token_is_not_sent_to_another_machine_in_plain_text(caplog: pytest.LogCaptureFixture) -> None:
    """0.0.0.0 is not a loopback address but leads to this machine, so the test sees connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"grpc://0.0.0.0:{listener.getsockname()[1]}"
        assert request_shared_cut(address, "secret", "node", ["somebody"], 1.0) is None
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert "is not asked" in caplog.text


@pytest.mark.parametrize("address", ["10.0.0.5:7432", "broker.example:7432", "[2001:db8::1]:7432"])
def test_another_address_than_loopback_needs_a_certificate(address: str, tmp_path: Path) -> None:
    file = tmp_path / "pgtrickle.toml"
    file.write_text(f'[service]\nbroker = "{address}"\n[servers.main]\ndsn = ""\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="without TLS") as refused:
        load_config(file, None)
    assert address in str(refused.value)
    assert "broker_certificate and broker_key" in (refused.value.hint or "")


def test_with_a_certificate_any_address_is_accepted(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "pgtrickle.toml"
    file.write_text(
        f'[service]\nbroker = "10.0.0.5:7432"\nbroker_certificate = "{pair.certificate}"\nbroker_key = "{pair.key}"\n'
        f'broker_ca = "{pair.certificate}"\n[servers.main]\ndsn = ""\n',
        encoding="utf-8",
    )
    expected = BrokerConfig("10.0.0.5:7432", pair.certificate, pair.key, pair.certificate)
    assert load_config(file, None).broker == expected


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.8.9.10:7432", "localhost:0", "[::1]:7432"])
def test_loopback_needs_no_certificate(address: str) -> None:
    assert BrokerConfig(address).certificate is None


@pytest.mark.parametrize(
    "address", ["7432", ":7432", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:65536", "0.0.0.0:7432"]
)
def test_an_address_that_nobody_can_connect_to_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="broker cannot be"):
        BrokerConfig(address)


def test_mismatched_files_are_refused_at_start(pair: Pair, tmp_path: Path) -> None:
    other = make_pair(tmp_path / "other", "127.0.0.1")
    missing, text = tmp_path / "missing.pem", tmp_path / "text.pem"
    text.write_text("no certificate", encoding="utf-8")
    with pytest.raises(ConfigError, match="needed together"):
        BrokerConfig(certificate=pair.certificate)
    for certificate, key in ((pair.certificate, other.key), (missing, pair.key), (text, pair.key)):
        with pytest.raises(ConfigError, match=f"broker_certificate {certificate}"):
            BrokerConfig(certificate=certificate, key=key)
    for ca in (missing, text):
        with pytest.raises(ConfigError, match=f"broker_ca {ca}"):
            BrokerConfig(ca=ca)
