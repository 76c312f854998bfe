"""Which databases of a server are being written to, seen over one connection: others have none while they rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg

ACTIVITY_SECONDS = 0.5
LOST_SECONDS = 5.0  # after which nobody relies on it any more

# Statistics are the only thing that a server tells of all its databases at once.
_COUNTS = (
    "SELECT datname, tup_inserted + tup_updated + tup_deleted FROM pg_stat_database"
    " WHERE datname IS NOT NULL AND current_setting('track_counts')::boolean"
)


@dataclass
class ServerActivity:
    """Wakes who looks after a database when rows were written there. For all threads."""

    _counts: dict[str, int] = field(default_factory=dict)
    _wakes: dict[str, Callable[[], None]] = field(default_factory=dict)
    _at: float = float("-inf")

    @property
    def beats(self) -> bool:
        """Whether it can be relied on now."""
        return time.monotonic() - self._at < LOST_SECONDS

    def heed(self, database: str, wake: Callable[[], None] | None) -> None:
        """Call this when the database was written to; None to end that."""
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
