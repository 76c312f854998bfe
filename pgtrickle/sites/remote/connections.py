"""Connections to remote databases, which are kept for a while, and errors with the database's name."""

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
RESTED_SECONDS = 0.5  # idle time after which a connection is tested with a round trip before it is used
RETRY_SECONDS = 5.0  # after a database could not be reached
# For statements outside of cuts, so that a lock in one database does not keep the service from others.
REMOTE_LOCK_TIMEOUT, REMOTE_STATEMENT_TIMEOUT = "10s", "10min"
_DISCOVERED = "pgtrickle set"
_GOING_DOWN = ("57P01", "57P02", "57P03")  # admin_shutdown, crash_shutdown, cannot_connect_now


@dataclass(frozen=True)
class Kept:
    """The consumers of one home database that still read a database, each with the OID of a table there."""

    home: str
    consumers: tuple[tuple[str, int], ...]


def discovered(server: str, database: str) -> str:
    """The DSN of a database that was found by a set's pattern. It is marked, because any role may own that database."""
    return make_conninfo(server, dbname=database, fallback_application_name=_DISCOVERED)


def is_discovered(dsn: str) -> bool:
    return conninfo_to_dict(dsn).get("fallback_application_name") == _DISCOVERED


def dsn_from(home: psycopg.Connection[Any], name: str, dsn: str) -> str:
    """The DSN to connect to a registered database; for a Citus node, the coordinator's with the node's address."""
    if not is_node(name):
        return dsn
    known = {name: value for name, value in home.info.get_parameters().items() if name != "hostaddr"}
    if home.info.password:
        known["password"] = home.info.password
    return make_conninfo("", **(known | conninfo_to_dict(dsn)))


@dataclass
class Connections:
    """Connections to remote databases, which are kept for a while. Safe to use from several threads."""

    trusted_owners: frozenset[str] = frozenset()  # roles whose catalogs are used, besides those that Trust allows
    dsn_policy: DsnPolicy | None = None  # limits what DSNs may use on this machine; None for no limits
    _idle: dict[str, list[tuple[float, psycopg.Connection[Any]]]] = field(default_factory=lambda: defaultdict(list))
    _failed: dict[str, tuple[float, DatabaseFailedError]] = field(default_factory=dict)
    # The state of set members at a consumer's last refresh, as of _poll_consumers(), by DSN and consumer.
    looks: dict[tuple[str, str], str] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _ended: bool = False

    @contextmanager
    def open(self, name: str, dsn: str) -> Iterator[psycopg.Connection[Any]]:
        """A connection that is not in a transaction. It is kept for reuse if it is still usable afterwards."""
        conn = self._take(dsn) or self._connect(name, dsn, self._trust(dsn))
        try:
            yield conn
        finally:
            self._give(dsn, conn)

    @contextmanager
    def open_server(self, name: str, dsn: str) -> Iterator[psycopg.Connection[Any]]:
        """A connection for reading the server's own catalogs, which is not kept.

        The owner of a pgtrickle catalog in that database is not checked.
        """
        with self._connect(name, dsn, None) as conn:
            yield conn

    def _trust(self, dsn: str) -> Trust:
        """The owners of catalogs that are trusted in a database.

        Registering a database by name means trusting its owner. One that was found by a pattern may belong to any role
        that can create databases.
        """
        return Trust(self.trusted_owners, database_owner=not is_discovered(dsn))

    def keep_only(self, name: str, dsn: str, kept: Kept) -> None:
        """Remove all consumers of one home database except these from a database."""
        with errors_naming(name), self.open(name, dsn) as conn:
            conn.execute(
                "SELECT pgtrickle._keep_consumers(%s, %s::text[], %s::bigint[])",
                (kept.home, [consumer for consumer, _ in kept.consumers], [there for _, there in kept.consumers]),
            )

    def close(self) -> None:
        self.close_idle(0)

    def end(self) -> None:
        """Close all connections; those in use are closed when they are returned."""
        with self._lock:
            self._ended = True
        self.close()

    def close_idle_to(self, dsn: str) -> None:
        """Close the idle connections to one database."""
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
            # Not under the lock: a machine that has vanished does not answer, and other threads must not wait for it.
            if (time.monotonic() - since < RESTED_SECONDS and _quiet(conn)) or _alive(conn):
                return conn

    def _connect(self, name: str, dsn: str, trust: Trust | None) -> psycopg.Connection[Any]:
        with self._lock:
            failed = self._failed.get(dsn)
        if failed is not None and time.monotonic() - failed[0] < RETRY_SECONDS:
            raise failed[1]
        policy = self.dsn_policy if not is_node(name) else None  # the DSN of a node comes from the home connection
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
        """Close connections that have been idle for so many seconds."""
        with self._lock:
            for kept in self._idle.values():
                for item in [item for item in kept if time.monotonic() - item[0] >= seconds]:
                    kept.remove(item)
                    item[1].close()


@contextmanager
def errors_naming(database: str) -> Iterator[None]:
    """Re-raise errors of lost connections and of servers that shut down with the database's name."""
    try:
        yield
    except psycopg.OperationalError as error:
        if error.sqlstate is not None and error.sqlstate[:2] != "08" and error.sqlstate not in _GOING_DOWN:
            raise
        raise DatabaseFailedError(
            f"the connection to database {database} was lost: {str(error).strip()}", "Refreshes go on when it is back."
        ) from None


def _quiet(conn: psycopg.Connection[Any]) -> bool:
    """Whether the server has sent nothing meanwhile: one that shuts down sends an error or closes the connection."""
    heard = select.poll()
    heard.register(conn.fileno(), select.POLLIN)
    return not heard.poll(0)


def _alive(conn: psycopg.Connection[Any]) -> bool:
    """Whether an idle connection was not closed by the server meanwhile."""
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
