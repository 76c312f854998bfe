"""Detect over a single connection which databases of a server are being written to.

With a connection budget, idle schedulers may have no connection of their own that could notice it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg

ACTIVITY_SECONDS = 0.5
LOST_SECONDS = 5.0  # after which the last look is too old to rely on

# Statistics are the only information that a server gives about all its databases over one connection.
_COUNTS = (
    "SELECT datname, tup_inserted + tup_updated + tup_deleted FROM pg_stat_database"
    " WHERE datname IS NOT NULL AND current_setting('track_counts')::boolean"
)


@dataclass
class ServerActivity:
    """Calls back when rows were written to a database. Shared by all threads."""

    _counts: dict[str, int] = field(default_factory=dict)
    _wakes: dict[str, Callable[[], None]] = field(default_factory=dict)
    _at: float = float("-inf")

    @property
    def beats(self) -> bool:
        """Whether the last poll is recent enough to rely on."""
        return time.monotonic() - self._at < LOST_SECONDS

    def heed(self, database: str, wake: Callable[[], None] | None) -> None:
        """Register a callback for writes to the database; None removes it."""
        if wake is None:
            self._wakes.pop(database, None)
        else:
            self._wakes[database] = wake

    def look(self, conn: psycopg.Connection[Any]) -> None:
        rows = conn.execute(_COUNTS).fetchall()
        if rows:
            self._at = time.monotonic()
        for database, count in rows:
            wake = self._wakes.get(database) if self._counts.get(database) != count else None
            self._counts[database] = count
            if wake is not None:
                wake()
