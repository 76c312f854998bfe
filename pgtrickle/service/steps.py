"""Steps of a tick that can be skipped while a lock or a timeout prevents them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg

log = logging.getLogger("pgtrickle.scheduler")

LOCK_TIMEOUT, STATEMENT_TIMEOUT = "5s", "10min"
STEP_LOCK_TIMEOUT = "500ms"  # in steps that a tick can skip
_HELD_UP = (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled)


@dataclass
class Steps:
    """Runs the steps of one scheduler, and remembers which of them are prevented."""

    database: str
    _held_up: set[str] = field(default_factory=set)

    @contextmanager
    def optional(self, conn: psycopg.Connection[Any], what: str) -> Iterator[None]:
        """Run a step that a tick can skip. If a lock is in the way, it is done in a later tick."""
        with self.unless_held_up(what), conn.transaction():
            conn.execute(f"SET LOCAL lock_timeout TO '{STEP_LOCK_TIMEOUT}'")
            conn.execute(f"SET LOCAL statement_timeout TO '{STATEMENT_TIMEOUT}'")
            yield

    @contextmanager
    def unless_held_up(self, what: str) -> Iterator[None]:
        """Continue after an error from a lock or a timeout, and log it once."""
        try:
            yield
        except _HELD_UP as error:
            if what not in self._held_up:
                log.warning("retried later: %s", what, extra={"database": self.database, "error": str(error)})
            self._held_up.add(what)
        else:
            self._held_up.discard(what)
