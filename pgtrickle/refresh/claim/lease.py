"""The lease under which a process holds its claims: others take them over when it ends."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import psycopg

from pgtrickle._version import __version__
from pgtrickle.catalog.analysis import load_query
from pgtrickle.postgres.connection import another

SECONDS = 30.0


@dataclass
class Lease:
    """This process among those that refresh a database."""

    conn: psycopg.Connection[Any]
    service_id: uuid.UUID = field(default_factory=uuid.uuid4)
    kind: Literal["service", "refresh"] = "refresh"
    seconds: float = SECONDS
    _renewed: float = 0.0

    def ensure(self) -> None:
        """Take the lease, or prolong it where a third of it is over."""
        if time.monotonic() - self._renewed > self.seconds / 3:
            self._renew(self.conn)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renewed as long as the block lasts, from a connection of its own. A short block needs none."""
        over = threading.Event()
        keeper = threading.Thread(target=self._keep, args=(over,), name="pgtrickle-lease", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            over.set()
            keeper.join()

    def end(self) -> None:
        """Give the lease back, and with it every claim. Where the connection is of no use, it runs out by itself."""
        if not self._renewed or self.conn.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            return
        with suppress(psycopg.OperationalError, psycopg.errors.UndefinedTable):  # the catalog may have been removed
            self.conn.execute("DELETE FROM pgtrickle.pgt_services WHERE service_id = %s", (self.service_id,))

    def _keep(self, over: threading.Event) -> None:
        if over.wait(self.seconds / 3):
            return
        # Should this fail, the lease ends and whoever takes over is safe from us; the refresh itself finds out.
        try:
            with another(self.conn) as conn:
                self._renew(conn)
                while not over.wait(self.seconds / 3):
                    self._renew(conn)
        except psycopg.OperationalError:
            return

    def _renew(self, conn: psycopg.Connection[Any]) -> None:
        conn.execute(
            load_query("lease"),
            {
                "service": self.service_id,
                "kind": self.kind,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "version": __version__,
                "lease": timedelta(seconds=self.seconds),
            },
        )
        self._renewed = time.monotonic()


@dataclass
class BorrowedLease:
    """A lease that somebody else of this process renews."""

    service_id: uuid.UUID

    def ensure(self) -> None:
        """Nothing to do."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Nothing to do."""
