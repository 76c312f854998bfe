"""The values that the Python API returns for stream tables."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class StreamTable:
    """The definition of a stream table and its current state."""

    id: int
    name: str
    query: str | None  # None if the role may not see it
    schedule: str
    refresh_mode: str
    effective_mode: str | None
    mode_reason: str | None
    status: str
    status_reason: str | None
    key: tuple[str, ...] | None
    fresh_as_of: datetime | None
    owner: str | None


@dataclass(frozen=True)
class StreamTableStatus:
    """The freshness of a stream table and the outcome of its last refresh."""

    name: str
    status: str
    status_reason: str | None
    refresh_mode: str
    effective_mode: str | None
    mode_reason: str | None
    reinit_reason: str | None
    staleness: float | None  # seconds since the oldest change not included yet was committed; 0 if there is none
    errors: int  # failed refreshes since the last successful one
    last_error: str | None
    last_status: str | None
    last_action: str | None
    rows_inserted: int | None
    rows_deleted: int | None
    seconds: float | None
