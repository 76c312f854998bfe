"""A PostgreSQL of its own for a measurement, and a database with the catalog in it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

import pgtrickle
from pgtrickle.api.database import Database
from pgtrickle.embedded.server import EmbeddedServer

# Durable as PostgreSQL is by default. Checkpoints are made between measurements, not during them.
SETTINGS = {
    "shared_buffers": "2GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "fsync": "on",
    "synchronous_commit": "on",
}


@dataclass(frozen=True)
class Bench:
    """A database of an ordinary role, and the superuser who makes checkpoints."""

    db: Database
    conn: psycopg.Connection[Any]  # the writer's
    admin: psycopg.Connection[Any]

    def new_database(self, name: str) -> str:
        """One more database of that role, with the catalog in it; gives its DSN."""
        self.admin.execute(sql.SQL("CREATE DATABASE {} OWNER app TEMPLATE template0").format(sql.Identifier(name)))
        dsn = psycopg.conninfo.make_conninfo(self.conn.info.dsn, dbname=name)
        with pgtrickle.connect(dsn) as db:
            db.install()
        return dsn

    def settle(self) -> None:
        """Write out what earlier statements left, so that the next one does not pay for it."""
        self.admin.execute("CHECKPOINT")


@contextmanager
def bench_server(more: Mapping[str, str] | None = None) -> Iterator[Bench]:
    """A server in a temporary directory, gone at the end."""
    with (
        tempfile.TemporaryDirectory(prefix="pgtrickle-bench-", ignore_cleanup_errors=True) as directory,
        EmbeddedServer(Path(directory) / "data", settings=SETTINGS | dict(more or {})) as server,
    ):
        with psycopg.connect(server.dsn(), autocommit=True) as setup:
            setup.execute("CREATE ROLE app LOGIN")
            setup.execute("CREATE DATABASE bench OWNER app TEMPLATE template0")
        with (
            pgtrickle.connect(server.dsn("bench", "app")) as db,
            psycopg.connect(server.dsn("bench", "app"), autocommit=True) as conn,
            psycopg.connect(server.dsn("bench"), autocommit=True) as admin,
        ):
            db.install()
            yield Bench(db, conn, admin)
