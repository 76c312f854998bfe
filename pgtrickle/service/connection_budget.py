"""The service's connections, with application names that identify them in the server's own views.

With a budget, the service never has more connections to a server at a time, however many databases it has: idle
connections yield their slot to active ones.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from pgtrickle.catalog.trust import Trust
from pgtrickle.postgres.connection import connect_with_rights
from pgtrickle.service.scheduling.fair_queue import ServerLimit

# Notice a server that vanished within half a minute; with the kernel's defaults it would take two hours.
_ALIVE = {"connect_timeout": 10, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}

GONE_SECONDS = 5.0  # how long to wait for the server to end a session
LEAST = 4  # the launcher, a scheduler, a worker, and a spare one


def open_connection(
    dsn: str, name: str, database: str | None = None, trust: Trust | None = None
) -> psycopg.Connection[Any]:
    """Connect to the DSN's database, or to another one on its server, whose catalog (if any) must be trusted."""
    target = {"dbname": database} if database is not None else {}
    known = psycopg.conninfo.conninfo_to_dict(dsn)
    alive = {key: value for key, value in _ALIVE.items() if key not in known}
    conninfo = make_conninfo(dsn, application_name=f"pgtrickle {name}", **target, **alive)
    return connect_with_rights(conninfo, (trust or Trust()) if database is not None else None)


def close_and_wait(conn: psycopg.Connection[Any]) -> None:
    """Close a connection and wait until the server has ended its session, which frees the connection slot."""
    if conn.closed:
        return
    # The backend closes its end of the socket when it exits. libpq does not wait for that.
    with socket.socket(fileno=os.dup(conn.fileno())) as other_end:
        conn.close()
        other_end.settimeout(GONE_SECONDS)
        with suppress(OSError):  # the connection was lost, or the server takes too long: continue anyway
            while other_end.recv(4096):
                pass


class Budget:
    """The service's connections to one server: at most `most` at a time, or unlimited if None."""

    def __init__(self, dsn: str, most: int | None = None, trust: Trust | None = None) -> None:
        self.dsn = dsn
        self.most = most
        self.trust = trust
        self._open = 0
        self._resting: list[psycopg.Connection[Any]] = []  # idle connections, the longest idle first
        self._changed = threading.Condition()
        # Reserve slots for the launcher and for the schedulers, which renew the lease.
        self._workers = threading.BoundedSemaphore(most - 2) if most is not None else None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Hold one of the slots for workers; waits until one is free."""
        with self._workers if self._workers is not None else nullcontext():
            yield

    def limit(self, server: str) -> ServerLimit | None:
        """How many workers can have a connection to the server; None if there is no budget."""
        return ServerLimit(server, self.most - 2) if self.most is not None else None

    @property
    def bounded(self) -> bool:
        return self.most is not None

    def open(self, name: str, database: str | None = None) -> psycopg.Connection[Any]:
        """Open a connection. Closes an idle one or waits if the budget is used up."""
        with self._changed:
            while self.most is not None and self._open >= self.most and not self._resting:
                self._changed.wait()
            given_up = self._resting.pop(0) if self.most is not None and self._open >= self.most else None
            self._open += given_up is None
        if given_up is not None:
            close_and_wait(given_up)
        try:
            return open_connection(self.dsn, name, database, self.trust)
        except BaseException:
            self._gone()
            raise

    def close(self, conn: psycopg.Connection[Any]) -> None:
        """Close a connection that is in use and free its slot."""
        if self.bounded:
            close_and_wait(conn)
        conn.close()
        self._gone()

    def rest(self, conn: psycopg.Connection[Any]) -> None:
        """Mark a connection as idle: it may be closed to free its slot."""
        with self._changed:
            self._resting.append(conn)
            self._changed.notify()

    def resume(self, conn: psycopg.Connection[Any]) -> bool:
        """Take an idle connection back into use; False if it was closed meanwhile."""
        with self._changed:
            kept = any(conn is other for other in self._resting)
            self._resting = [other for other in self._resting if other is not conn]
        if kept and conn.closed:
            self._gone()
        return kept and not conn.closed

    @contextmanager
    def using(self, name: str, database: str | None = None) -> Iterator[psycopg.Connection[Any]]:
        """Open a connection for the block and close it afterwards."""
        conn = self.open(name, database)
        try:
            yield conn
        finally:
            self.close(conn)

    def _gone(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify()


class Seat:
    """A connection that is used repeatedly.

    With a budget it is idle between uses, and may be replaced by a new connection the next time.
    """

    def __init__(self, budget: Budget, name: str, database: str) -> None:
        self._budget = budget
        self._name = name
        self._database = database
        self._conn: psycopg.Connection[Any] | None = None
        self._given_up = False
        self.opened = 0  # how many times

    @property
    def rests(self) -> bool:
        """Whether the connection may be closed between uses."""
        return self._budget.bounded

    @property
    def held(self) -> psycopg.Connection[Any] | None:
        """The connection, if it stays open between uses."""
        return None if self._budget.bounded else self._conn

    @property
    def broken(self) -> bool:
        """Whether the connection was lost rather than released."""
        if self._conn is None:
            return not self._given_up
        return not self._budget.bounded and (self._conn.closed or self._conn.broken)

    @contextmanager
    def use(self) -> Iterator[psycopg.Connection[Any]]:
        if self._conn is None or (self._budget.bounded and not self._budget.resume(self._conn)):
            self._conn, self._given_up = None, False
            self._conn = self._budget.open(self._name, self._database)
            self.opened += 1
        try:
            yield self._conn
        finally:
            if self._budget.bounded:
                self._budget.rest(self._conn)

    def give_up(self) -> None:
        """Close the connection until the next use."""
        self.close()
        self._given_up = True

    def close(self) -> None:
        if self._conn is not None and (not self._budget.bounded or self._budget.resume(self._conn)):
            self._budget.close(self._conn)
        self._conn = None
