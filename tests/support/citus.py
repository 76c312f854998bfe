"""A Citus cluster of a coordinator and workers, if a build of Citus is installed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql

from pgtrickle.embedded.server import HOST, EmbeddedServer
from tests.support.database import APP_ROLE, SERVER_SETTINGS, prepare_server
from tests.support.service import until

SETTINGS = SERVER_SETTINGS | {
    "shared_preload_libraries": "citus",
    "max_prepared_transactions": "100",
    "citus.shard_count": "4",
    "citus.recover_2pc_interval": "2s",
    "citus.node_conninfo": "sslmode=disable",
}

TEMPLATE = "citus_template"


def citus_binaries() -> Path | None:
    """The programs of a PostgreSQL 18 with Citus, in ~/.pgtrickle/citus or in the directory in PGTRICKLE_CITUS."""
    place = Path(os.environ.get("PGTRICKLE_CITUS", Path.home() / ".pgtrickle" / "citus"))
    for library in sorted(place.glob("**/citus.so")):
        for directory in library.parents:
            if (directory / "bin" / "postgres").is_file():
                return directory / "bin"
    return None


@dataclass
class Cluster:
    """The servers of a cluster, the coordinator first."""

    servers: list[EmbeddedServer]
    name: str = field(default_factory=lambda: f"cluster_{uuid4().hex[:8]}")

    def dsn(self, node: int = 0) -> str:
        return self.servers[node].dsn(self.name, APP_ROLE)

    def superuser_dsn(self, node: int = 0) -> str:
        return self.servers[node].dsn(self.name)

    def prepare(self, node: int) -> None:
        """Create the database of one node."""
        with psycopg.connect(self.servers[node].dsn(), autocommit=True) as conn:
            conn.execute("SET citus.enable_ddl_propagation = off")
            until(partial(_copied, conn, self.name), f"{self.name} is created")

    def have_address(self) -> None:
        """Tell workers the coordinator's address; a cluster of one node does not need it."""
        with psycopg.connect(self.superuser_dsn(), autocommit=True) as conn:
            conn.execute("SELECT citus_set_coordinator_host(%s, %s)", (HOST, self.servers[0].port))

    def add(self, node: int) -> None:
        """Add a worker to the cluster."""
        with psycopg.connect(self.superuser_dsn(), autocommit=True) as conn:
            conn.execute("SELECT citus_add_node(%s, %s)", (HOST, self.servers[node].port))


@contextmanager
def servers(number: int) -> Iterator[list[EmbeddedServer]]:
    """Start servers that can be nodes of clusters."""
    binaries = citus_binaries()
    assert binaries is not None
    base = Path(tempfile.mkdtemp(prefix="pgtrickle-citus-"))
    try:
        with ExitStack() as stack:
            made = []
            for i in range(number):
                server = EmbeddedServer(base / f"node{i}", settings=SETTINGS, binaries=binaries)
                made.append(stack.enter_context(server))
                prepare_server(server)
                _make_template(server)
            yield made
    finally:
        shutil.rmtree(base)


def _make_template(server: EmbeddedServer) -> None:
    """Create a template database with Citus and the rights of a service: CREATE EXTENSION takes most of a second."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute("SET citus.enable_ddl_propagation = off")
        conn.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(TEMPLATE)))
    with psycopg.connect(server.dsn(TEMPLATE), autocommit=True) as conn:
        conn.execute("CREATE EXTENSION citus")
        conn.execute(sql.SQL("GRANT UPDATE ON pg_catalog.pg_dist_transaction TO {}").format(sql.Identifier(APP_ROLE)))
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(sql.Identifier(TEMPLATE)))
        until(partial(_is_left, conn), "Citus has left the template")


def _copied(conn: psycopg.Connection[Any], name: str) -> bool:
    """Copy the template; False if that failed because Citus has connected to it, as its background processes do."""
    _is_left(conn)
    create = sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE {}")
    try:
        conn.execute(create.format(sql.Identifier(name), sql.Identifier(APP_ROLE), sql.Identifier(TEMPLATE)))
    except psycopg.errors.ObjectInUse:
        return False
    return True


def _is_left(conn: psycopg.Connection[Any]) -> bool:
    """End the connections that Citus's background processes have to the template; True if there were none."""
    ended = conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (TEMPLATE,))
    return not ended.fetchall()


@contextmanager
def cluster(nodes: list[EmbeddedServer], workers: int = 2) -> Iterator[Cluster]:
    """A fresh database on a coordinator and its workers, which hold the shards; the other servers can be added.

    Without workers it is a single-node cluster, in which the coordinator holds the shards.
    """
    made = Cluster(nodes)
    for node in range(len(nodes)):
        made.prepare(node)
    try:
        if workers:
            made.have_address()
        for node in range(1, workers + 1):
            made.add(node)
        yield made
    finally:
        for server in nodes:
            if not server.is_running:
                server.start()
            until(partial(_dropped, server, made.name), f"{made.name} is dropped")


def _dropped(server: EmbeddedServer, database: str) -> bool:
    """Drop the database; False if Citus has connected to it meanwhile, as its background processes do."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        try:
            conn.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(database)))
        except psycopg.errors.ObjectInUse:
            return False
    return True
