"""The configuration of the service process from pgtrickle.toml and flags: servers, lease, addresses, log format.

Settings of a database are in `settings.py`.
"""

from __future__ import annotations

import ssl
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pgtrickle.catalog.databases import DsnPolicy
from pgtrickle.errors import PgtrickleError
from pgtrickle.service.connection_budget import LEAST

FILE = "pgtrickle.toml"


class ConfigError(PgtrickleError):
    """The configuration of the service cannot be used."""


@dataclass(frozen=True)
class ServerConfig:
    """A server to watch: the DSN of any of its databases, and optionally which of them to serve."""

    name: str
    dsn: str
    databases: tuple[str, ...] | None = None
    max_connections: int | None = None  # of the service to this server at a time; None for no limit
    trusted_owners: tuple[str, ...] = ()  # roles whose catalogs are served here, in addition to those of ServiceConfig


@dataclass(frozen=True)
class BrokerConfig:
    """Where a broker offers shared cuts to other services. TLS is required unless it listens on this machine only."""

    listen: str = "127.0.0.1:0"
    certificate: Path | None = None  # certificate chain of the broker, in PEM
    key: Path | None = None
    ca: Path | None = None  # trusted CAs for the certificates of other brokers; None for the system's roots

    def __post_init__(self) -> None:
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"broker cannot be {self.listen!r}", "It is host:port; port 0 is any free one.")
        if _is_wildcard(host):
            raise ConfigError(
                f"broker cannot be {self.listen!r}: other services connect to the address it names",
                "Give the address or host name under which they reach this machine.",
            )
        if (self.certificate is None) != (self.key is None):
            raise ConfigError(
                "broker_certificate and broker_key are needed together", "Both are PEM files in [service]."
            )
        if self.certificate is None and not is_loopback(host):
            raise ConfigError(
                f"broker cannot listen on {self.listen} without TLS: what it sends could be read on the network",
                "Set broker_certificate and broker_key in [service], or listen on this machine only: 127.0.0.1:0.",
            )
        self._check_files()

    def _check_files(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            if self.certificate is not None:
                # With no password argument, OpenSSL would prompt on the terminal for the one of an encrypted key.
                context.load_cert_chain(self.certificate, self.key, password="")
        except OSError as error:
            raise ConfigError(
                f"broker_certificate {self.certificate} and broker_key {self.key} cannot be used: {error}",
                "They are PEM files of a certificate and its private key, which is not encrypted.",
            ) from error
        try:
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except OSError as error:
            raise ConfigError(
                f"broker_ca {self.ca} cannot be used: {error}", "It is a PEM file of trusted certificates."
            ) from error


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only. `localhost` is the only host name that counts."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


@dataclass(frozen=True)
class ServiceConfig:
    """The configuration of a service process."""

    servers: tuple[ServerConfig, ...]
    lease_seconds: float = 30.0
    list_seconds: float = 10.0  # between checks for new databases
    replica_seconds: float = 30.0  # between checks whether a replica was promoted
    drain_seconds: float = 30.0  # how long running refreshes may take when the service stops
    http: str | None = "127.0.0.1:9187"
    broker: BrokerConfig = BrokerConfig()
    log_format: str = "text"
    log_level: str = "info"
    trusted_owners: tuple[str, ...] = ()  # roles whose catalogs are served, on all servers and in registered databases
    dsn_policy: DsnPolicy = field(default_factory=DsnPolicy)  # for DSNs of registered databases


_SERVICE_KEYS = {"lease_seconds", "list_seconds", "replica_seconds", "drain_seconds"}
_CHOICES = {"log_format": ("text", "json"), "log_level": ("info", "debug")}
_LISTS = {"trusted_owners", "dsn_variables", "dsn_options"}
_BROKER_FILES = {"broker_certificate": "certificate", "broker_key": "key", "broker_ca": "ca"}


def load_config(
    path: Path | None,
    dsn: str | None,
    databases: Sequence[str] = (),
    max_connections: int | None = None,
    trusted_owners: Sequence[str] = (),
    **given: Any,
) -> ServiceConfig:
    """The configuration from the file, or for a single server if a DSN is given. Flags take precedence."""
    if path is not None or (dsn is None and Path(FILE).exists()):
        config = _read(path or Path(FILE))
    else:
        config = ServiceConfig((ServerConfig("default", dsn or ""),))
    if databases:
        config = replace(config, servers=tuple(replace(one, databases=tuple(databases)) for one in config.servers))
    if max_connections is not None:
        _check_budget("--max-connections", max_connections)
        servers = tuple(replace(one, max_connections=max_connections) for one in config.servers)
        config = replace(config, servers=servers)
    config = replace(config, trusted_owners=(*config.trusted_owners, *trusted_owners))
    return replace(config, **{name: value for name, value in given.items() if value is not None})


def _read(path: Path) -> ServiceConfig:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "Give the file with --config.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", "docs/reference/service.md has an example.") from error
    unknown = set(data) - {"service", "servers"}
    if unknown:
        raise ConfigError(
            f"{path} has unknown tables: {', '.join(sorted(unknown))}", "It has [service] and [servers.NAME]."
        )
    servers = tuple(_server(path, name, entry) for name, entry in data.get("servers", {}).items())
    if not servers:
        raise ConfigError(f"{path} names no server", 'Add one: [servers.main] with dsn = "host=… user=…".')
    return _service(path, ServiceConfig(servers), data.get("service", {}))


def _server(path: Path, name: str, entry: Mapping[str, Any]) -> ServerConfig:
    unknown = set(entry) - {"dsn", "databases", "max_connections", "trusted_owners"}
    if unknown or not isinstance(entry.get("dsn"), str):
        raise ConfigError(
            f"{path}: server {name} needs a dsn and may have databases, max_connections and trusted_owners",
            f"Unknown: {', '.join(sorted(unknown))}." if unknown else None,
        )
    databases, most = entry.get("databases"), entry.get("max_connections")
    if most is not None:
        _check_budget(f"{path}: server {name}", most)
    owners = _names(f"{path}: server {name}", "trusted_owners", entry.get("trusted_owners", []))
    return ServerConfig(name, entry["dsn"], tuple(databases) if databases is not None else None, most, owners)


def _names(where: str, key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{where}: {key} cannot be {value!r}", f'It is a list of names: {key} = ["name"].')
    return tuple(value)


def _check_budget(where: str, most: object) -> None:
    if not isinstance(most, int) or most < LEAST:
        raise ConfigError(
            f"{where}: max_connections cannot be {most!r}", f"It is a number of connections, at least {LEAST}."
        )


def _service(path: Path, config: ServiceConfig, entry: Mapping[str, Any]) -> ServiceConfig:
    changes: dict[str, Any] = {}
    broker: dict[str, Any] = {}
    lists: dict[str, tuple[str, ...]] = {}
    for name, value in entry.items():
        if name in _SERVICE_KEYS:
            if not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"{path}: {name} must be a number of seconds, not {value!r}", f"Write {name} = 30.")
            changes[name] = float(value)
        elif name == "http" and isinstance(value, str):
            changes[name] = value or None
        elif name == "broker" and isinstance(value, str):
            broker["listen"] = value
        elif name in _BROKER_FILES and isinstance(value, str):
            broker[_BROKER_FILES[name]] = Path(value)
        elif name in _CHOICES and value in _CHOICES[name]:
            changes[name] = value
        elif name in _LISTS:
            lists[name] = _names(f"{path}: [service]", name, value)
        else:
            others = {"http", "broker"} | _CHOICES.keys() | _LISTS
            known = ", ".join(sorted(_SERVICE_KEYS | _BROKER_FILES.keys() | others))
            raise ConfigError(f"{path}: [service] cannot have {name} = {value!r}", f"It has {known}.")
    policy = DsnPolicy(lists.get("dsn_variables", DsnPolicy.variables), lists.get("dsn_options", DsnPolicy.options))
    owners = lists.get("trusted_owners", ())
    return replace(config, broker=BrokerConfig(**broker), trusted_owners=owners, dsn_policy=policy, **changes)
