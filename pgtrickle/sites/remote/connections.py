"""Reaching other databases: connections that are kept for a while, and errors that say which database they are of."""

from __future__ import annotations

import select
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgtrickle.catalog.databases import DsnPolicy, is_node, reachable
from pgtrickle.catalog.install import installed_version, latest_version
from pgtrickle.catalog.trust import Trust
from pgtrickle.errors import DatabaseFailedError, PgtrickleError, UntrustedCatalogError
from pgtrickle.postgres.connection import connect_with_rights, limit_waits

IDLE_SECONDS = 60.0
RESTED_SECONDS = 0.5  # after which a connection is asked whether it still is one
RETRY_SECONDS = 5.0  # after a database could not be reached
# Of statements outside of cuts: whoever locks a table there shall not keep the service from other databases.
REMOTE_LOCK_TIMEOUT, REMOTE_STATEMENT_TIMEOUT = "10s", "10min"
_DISCOVERED = "pgtrickle set"
_GOING_DOWN = ("57P01", "57P02", "57P03")  # admin_shutdown, crash_shutdown, cannot_connect_now


@dataclass(frozen=True)
class Kept:
    """Who still reads a database, of those from one home: consumers and tables."""

    home: str
    consumers: tuple[tuple[str, int], ...]


def discovered(server: str, database: str) -> str:
    """The DSN of a database that a set's pattern found on its server. It says so: such a database may be anybody's."""
    return make_conninfo(server, dbname=database, fallback_application_name=_DISCOVERED)


def is_discovered(dsn: str) -> bool:
    return conninfo_to_dict(dsn).get("fallback_application_name") == _DISCOVERED


def dsn_from(home: psycopg.Connection[Any], name: str, dsn: str) -> str:
    """How a registered database is reached. A node of the cluster is reached as its coordinator is, but for the address."""
    if not is_node(name):
        return dsn
    known = {name: value for name, value in home.info.get_parameters().items() if name != "hostaddr"}
    if home.info.password:
        known["password"] = home.info.password
    return make_conninfo("", **(known | conninfo_to_dict(dsn)))


@dataclass
class Connections:
    """Connections to other databases, kept for a while. For all threads."""

    trusted_owners: frozenset[str] = frozenset()  # roles whose catalogs are used, besides those that Trust has
    dsn_policy: DsnPolicy | None = None  # what DSNs may take from this machine; anything, if None
    _idle: dict[str, list[tuple[float, psycopg.Connection[Any]]]] = field(default_factory=lambda: defaultdict(list))
    _failed: dict[str, tuple[float, DatabaseFailedError]] = field(default_factory=dict)
    looks: dict[tuple[str, str], str] = field(default_factory=dict)  # by database and consumer, at its last refresh
    _lock: Lock = field(default_factory=Lock)
    _ended: bool = False

    @contextmanager
    def open(self, name: str, dsn: str) -> Iterator[psycopg.Connection[Any]]:
        """A connection, not in a transaction; kept for the next one if it still is of use."""
        conn = self._take(dsn) or self._connect(name, dsn, self._trust(dsn))
        try:
            yield conn
        finally:
            self._give(dsn, conn)

    @contextmanager
    def open_server(self, name: str, dsn: str) -> Iterator[psycopg.Connection[Any]]:
        """A connection to look at the server's own catalogs; whose pgtrickle that database has is not asked. Not kept."""
        with self._connect(name, dsn, None) as conn:
            yield conn

    def _trust(self, dsn: str) -> Trust:
        """Who registers a database by its name trusts its owner; a pattern fits databases of anybody who can create one."""
        return Trust(self.trusted_owners, database_owner=not is_discovered(dsn))

    def keep_only(self, name: str, dsn: str, kept: Kept) -> None:
        """Tell a database that of the stream tables of one home only these still read it."""
        with errors_naming(name), self.open(name, dsn) as conn:
            conn.execute(
                "SELECT pgtrickle._keep_consumers(%s, %s::text[], %s::bigint[])",
                (kept.home, [consumer for consumer, _ in kept.consumers], [there for _, there in kept.consumers]),
            )

    def close(self) -> None:
        self.close_idle(0)

    def end(self) -> None:
        """Close them all; those in use when they are given back."""
        with self._lock:
            self._ended = True
        self.close()

    def close_idle_to(self, dsn: str) -> None:
        """Close connections to one database that are not in use."""
        with self._lock:
            idle = self._idle.pop(dsn, [])
        for _, conn in idle:
            conn.close()

    def _take(self, dsn: str) -> psycopg.Connection[Any] | None:
        self.close_idle()
        while True:
            with self._lock:
                if not self._idle[dsn]:
                    return None
                since, conn = self._idle[dsn].pop()
            # Not under the lock: a machine that vanished does not answer, and others wait for nobody.
            if (time.monotonic() - since < RESTED_SECONDS and _quiet(conn)) or _alive(conn):
                return conn

    def _connect(self, name: str, dsn: str, trust: Trust | None) -> psycopg.Connection[Any]:
        with self._lock:
            failed = self._failed.get(dsn)
        if failed is not None and time.monotonic() - failed[0] < RETRY_SECONDS:
            raise failed[1]
        policy = self.dsn_policy if not is_node(name) else None  # nodes have the home's own DSN
        try:
            conn = connect_with_rights(reachable(name, dsn, policy=policy), trust, application_name="pgtrickle reader")
            limit_waits(conn, REMOTE_LOCK_TIMEOUT, REMOTE_STATEMENT_TIMEOUT)
        except UntrustedCatalogError as error:
            raise DatabaseFailedError(f"database {name} is not read: {error.message}", error.hint) from None
        except (psycopg.OperationalError, PgtrickleError) as error:
            why = error.message if isinstance(error, PgtrickleError) else str(error).strip()
            lost = DatabaseFailedError(
                f"database {name} cannot be reached: {why}",
                f"`pgtrickle database check {name}` tells when it can be; refreshes then go on by themselves.",
            )
            with self._lock:
                self._failed[dsn] = (time.monotonic(), lost)
            raise lost from None
        with self._lock:
            self._failed.pop(dsn, None)
        return conn

    def _give(self, dsn: str, conn: psycopg.Connection[Any]) -> None:
        of_use = not conn.closed and conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        with self._lock:
            if of_use and not self._ended:
                self._idle[dsn].append((time.monotonic(), conn))
                return
        conn.close()

    def close_idle(self, seconds: float = IDLE_SECONDS) -> None:
        """Close connections that were not needed for a while."""
        with self._lock:
            for kept in self._idle.values():
                for item in [item for item in kept if time.monotonic() - item[0] >= seconds]:
                    kept.remove(item)
                    item[1].close()


@contextmanager
def errors_naming(database: str) -> Iterator[None]:
    """A connection that is lost, or what a server says that goes down, is told with the database's name."""
    try:
        yield
    except psycopg.OperationalError as error:
        if error.sqlstate is not None and error.sqlstate[:2] != "08" and error.sqlstate not in _GOING_DOWN:
            raise
        raise DatabaseFailedError(
            f"the connection to database {database} was lost: {str(error).strip()}", "Refreshes go on when it is back."
        ) from None


def _quiet(conn: psycopg.Connection[Any]) -> bool:
    """Whether nothing was heard from the other side meanwhile: a server that goes down says so, or hangs up."""
    heard = select.poll()
    heard.register(conn.fileno(), select.POLLIN)
    return not heard.poll(0)


def _alive(conn: psycopg.Connection[Any]) -> bool:
    """Whether a connection that rested was not closed from the other side meanwhile."""
    try:
        conn.execute("")
    except psycopg.OperationalError:
        conn.close()
        return False
    return True


def check_catalog(conn: psycopg.Connection[Any], database: str) -> None:
    version = installed_version(conn)
    if version != latest_version():
        what = "has no pgtrickle catalog" if version is None else f"has a pgtrickle catalog of version {version}"
        raise DatabaseFailedError(
            f"database {database} {what}, and this release needs version {latest_version()}",
            f"Run there: pgtrickle install --service-role {conn.info.user}",
        )
