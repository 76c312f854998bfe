"""Connections of the service: named for what they do, so that the server's own views tell who is who."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from pgtrickle.engine.connection import connect

# A server that vanished is noticed within half a minute, not after the kernel's two hours.
_ALIVE = {"connect_timeout": 10, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}


def open_connection(dsn: str, name: str, database: str | None = None) -> psycopg.Connection[Any]:
    """A connection to the DSN's database, or to another one of the same server."""
    target = {"dbname": database} if database is not None else {}
    known = psycopg.conninfo.conninfo_to_dict(dsn)
    alive = {key: value for key, value in _ALIVE.items() if key not in known}
    conninfo = make_conninfo(dsn, application_name=f"pgtrickle {name}", **target, **alive)
    return connect(conninfo)
