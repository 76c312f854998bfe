"""What a failed refresh means: try again soon, or count it against the stream table."""

from __future__ import annotations

import random
from dataclasses import dataclass

import psycopg

from pgtrickle.errors import DatabaseFailedError, RefreshConflictError, SourceChangedError, SourceLockedError

# Connections, resources, what an operator does, conflicts and locks: the same refresh may succeed a moment later.
_TRANSIENT_CLASSES = ("08", "53", "57")
_TRANSIENT_STATES = ("40001", "40P01", "55P03", "25006", "58030")
_LONGEST_PAUSE = 60.0


@dataclass(frozen=True)
class Policy:
    """How failures are treated. A person who refreshes sees them; a service must not repeat them for ever."""

    most_errors: int | None = None  # after so many in a row the stream table is suspended
    backoff: bool = True  # whether refreshes that take longer than their schedule stretch it
    # A process that stands still in an apply would keep the stream table from those who take over.
    idle_in_apply: str = "0"


def is_transient(error: BaseException | None) -> bool:
    """Whether the same refresh may succeed later without anybody's help."""
    if isinstance(error, DatabaseFailedError | RefreshConflictError | SourceChangedError | SourceLockedError):
        return True
    if not isinstance(error, psycopg.Error):
        return False
    state = error.sqlstate or ""
    if not state:
        return isinstance(error, psycopg.OperationalError)
    return state[:2] in _TRANSIENT_CLASSES or state in _TRANSIENT_STATES


def pause_after(errors: int) -> float:
    """Seconds until the next attempt: longer after each error, and never the same for many at once."""
    return min(_LONGEST_PAUSE, 2.0 ** min(errors, 10)) * random.uniform(0.5, 1.0)
