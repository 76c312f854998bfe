"""Connections of the service: named for what they do, so that the server's own views tell who is who.

Where a budget is set there are never more of them to a server at a time, however many databases it has: who rests gives way
to who works.
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

# A server that vanished is noticed within half a minute, not after the kernel's two hours.
_ALIVE = {"connect_timeout": 10, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}

GONE_SECONDS = 5.0  # that the server may take to end a session
LEAST = 4  # the launcher, a scheduler, a worker, and one to spare


def open_connection(
    dsn: str, name: str, database: str | None = None, trust: Trust | None = None
) -> psycopg.Connection[Any]:
    """A connection to the DSN's database, or to another one of the same server whose catalog, if any, is to be trusted."""
    target = {"dbname": database} if database is not None else {}
    known = psycopg.conninfo.conninfo_to_dict(dsn)
    alive = {key: value for key, value in _ALIVE.items() if key not in known}
    conninfo = make_conninfo(dsn, application_name=f"pgtrickle {name}", **target, **alive)
    return connect_with_rights(conninfo, (trust or Trust()) if database is not None else None)


def close_and_wait(conn: psycopg.Connection[Any]) -> None:
    """Close a connection and wait until the server has ended its session: only then its place there is free."""
    if conn.closed:
        return
    # The server's process closes its end by ending. libpq does not wait for that.
    with socket.socket(fileno=os.dup(conn.fileno())) as other_end:
        conn.close()
        other_end.settimeout(GONE_SECONDS)
        with suppress(OSError):  # it was lost, or takes long: no reason not to go on
            while other_end.recv(4096):
                pass


class Budget:
    """How many connections to one server there may be; None for as many as it takes."""

    def __init__(self, dsn: str, most: int | None = None, trust: Trust | None = None) -> None:
        self.dsn = dsn
        self.most = most
        self.trust = trust
        self._open = 0
        self._resting: list[psycopg.Connection[Any]] = []  # the one that rested longest first
        self._changed = threading.Condition()
        # Workers leave places for the launcher and the schedulers, who keep the lease.
        self._workers = threading.BoundedSemaphore(most - 2) if most is not None else None

    @contextmanager
    def working(self) -> Iterator[None]:
        """One more worker has a connection in use."""
        with self._workers if self._workers is not None else nullcontext():
            yield

    def limit(self, server: str) -> ServerLimit | None:
        """How many workers find a connection."""
        return ServerLimit(server, self.most - 2) if self.most is not None else None

    @property
    def bounded(self) -> bool:
        return self.most is not None

    def open(self, name: str, database: str | None = None) -> psycopg.Connection[Any]:
        """A connection; waits until there is room for it."""
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
        """Give a connection back that is in use."""
        if self.bounded:
            close_and_wait(conn)
        conn.close()
        self._gone()

    def rest(self, conn: psycopg.Connection[Any]) -> None:
        """It is not needed for now: others may have its place."""
        with self._changed:
            self._resting.append(conn)
            self._changed.notify()

    def resume(self, conn: psycopg.Connection[Any]) -> bool:
        """Whether a connection that rested is still there; then it is in use again."""
        with self._changed:
            kept = any(conn is other for other in self._resting)
            self._resting = [other for other in self._resting if other is not conn]
        if kept and conn.closed:
            self._gone()
        return kept and not conn.closed

    @contextmanager
    def using(self, name: str, database: str | None = None) -> Iterator[psycopg.Connection[Any]]:
        """A connection for a while."""
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
    """A connection that is needed again and again. Within a budget it rests in between, and may be another the next time."""

    def __init__(self, budget: Budget, name: str, database: str) -> None:
        self._budget = budget
        self._name = name
        self._database = database
        self._conn: psycopg.Connection[Any] | None = None
        self._given_up = False
        self.opened = 0  # times

    @property
    def rests(self) -> bool:
        """Whether it is given up between uses."""
        return self._budget.bounded

    @property
    def held(self) -> psycopg.Connection[Any] | None:
        """The connection, where it stays while it is not used."""
        return None if self._budget.bounded else self._conn

    @property
    def broken(self) -> bool:
        """Whether it was lost, not given up."""
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
        """Close it until it is used again."""
        self.close()
        self._given_up = True

    def close(self) -> None:
        if self._conn is not None and (not self._budget.bounded or self._budget.resume(self._conn)):
            self._budget.close(self._conn)
        self._conn = None
