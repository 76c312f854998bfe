"""What is the service's own business, not a database's: servers, lease, address, log. From pgtrickle.toml and flags."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pgtrickle.errors import PgtrickleError
from pgtrickle.service.connections import LEAST

FILE = "pgtrickle.toml"


class ConfigError(PgtrickleError):
    """The configuration of the service cannot be used."""


@dataclass(frozen=True)
class ServerConfig:
    """A server to watch: a DSN of any of its databases, and which of them, if not all."""

    name: str
    dsn: str
    databases: tuple[str, ...] | None = None
    max_connections: int | None = None  # of ours to it at a time; as many as it takes, if None


@dataclass(frozen=True)
class ServiceConfig:
    servers: tuple[ServerConfig, ...]
    lease_seconds: float = 30.0
    list_seconds: float = 10.0  # between looks for new databases
    replica_seconds: float = 30.0  # between looks whether a replica was promoted
    drain_seconds: float = 30.0  # for what runs, when the service is told to end
    http: str | None = "127.0.0.1:9187"
    broker: str = "127.0.0.1:0"  # where a broker offers what it read to other services
    log_format: str = "text"


_SERVICE_KEYS = {"lease_seconds", "list_seconds", "replica_seconds", "drain_seconds"}


def load_config(
    path: Path | None,
    dsn: str | None,
    databases: Sequence[str] = (),
    max_connections: int | None = None,
    **given: Any,
) -> ServiceConfig:
    """The configuration: the file's, or one server where a DSN is given; flags that are given come first."""
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
    unknown = set(entry) - {"dsn", "databases", "max_connections"}
    if unknown or not isinstance(entry.get("dsn"), str):
        raise ConfigError(
            f"{path}: server {name} needs a dsn and may have databases and max_connections",
            f"Unknown: {', '.join(sorted(unknown))}." if unknown else None,
        )
    databases, most = entry.get("databases"), entry.get("max_connections")
    if most is not None:
        _check_budget(f"{path}: server {name}", most)
    return ServerConfig(name, entry["dsn"], tuple(databases) if databases is not None else None, most)


def _check_budget(where: str, most: object) -> None:
    if not isinstance(most, int) or most < LEAST:
        raise ConfigError(
            f"{where}: max_connections cannot be {most!r}", f"It is a number of connections, at least {LEAST}."
        )


def _service(path: Path, config: ServiceConfig, entry: Mapping[str, Any]) -> ServiceConfig:
    changes: dict[str, Any] = {}
    for name, value in entry.items():
        if name in _SERVICE_KEYS:
            if not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"{path}: {name} must be a number of seconds, not {value!r}", f"Write {name} = 30.")
            changes[name] = float(value)
        elif name == "http" and isinstance(value, str):
            changes[name] = value or None
        elif (name == "broker" and ":" in str(value)) or (name == "log_format" and value in ("text", "json")):
            changes[name] = value
        else:
            known = ", ".join(sorted(_SERVICE_KEYS | {"http", "broker", "log_format"}))
            raise ConfigError(f"{path}: [service] cannot have {name} = {value!r}", f"It has {known}.")
    return replace(config, **changes)
