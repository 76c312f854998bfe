"""The lease under which a process holds its claims. When it expires, other processes may take them over."""

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
from pgtrickle.catalog.query_files import load_query
from pgtrickle.postgres.connection import another

SECONDS = 30.0


@dataclass
class Lease:
    """The lease of this process on one database."""

    conn: psycopg.Connection[Any]
    service_id: uuid.UUID = field(default_factory=uuid.uuid4)
    kind: Literal["service", "refresh"] = "refresh"
    seconds: float = SECONDS
    _renewed: float = 0.0

    def ensure(self) -> None:
        """Take the lease, or renew it if more than a third of it has passed."""
        if time.monotonic() - self._renewed > self.seconds / 3:
            self._renew(self.conn)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renew the lease while the block runs, over a separate connection. A short block opens none."""
        over = threading.Event()
        keeper = threading.Thread(target=self._keep, args=(over,), name="pgtrickle-lease", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            over.set()
            keeper.join()

    def end(self) -> None:
        """End the lease, and with it every claim. If the connection is not usable, the lease expires by itself."""
        if not self._renewed or self.conn.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            return
        with suppress(psycopg.OperationalError, psycopg.errors.UndefinedTable):  # the catalog may have been removed
            self.conn.execute("DELETE FROM pgtrickle.pgt_services WHERE service_id = %s", (self.service_id,))

    def _keep(self, over: threading.Event) -> None:
        if over.wait(self.seconds / 3):
            return
        # If this fails, the lease expires. The fencing token protects the process that takes over: the apply of this
        # one then fails.
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
    """A lease that another part of this process renews."""

    service_id: uuid.UUID

    def ensure(self) -> None:
        """Nothing to do."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Nothing to do."""
