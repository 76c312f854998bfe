"""A served database and the state that outlives its scheduler."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from pgtrickle.service.scheduling.fair_queue import ServerLimit
from pgtrickle.service.settings import Settings
from pgtrickle.service.worker import Workers


@dataclass
class Counters:
    """The counters of a database that are exposed as metrics."""

    ticks: int = 0
    tick_seconds: float = 0.0
    refreshes: int = 0
    failures: int = 0
    refresh_seconds: float = 0.0
    rows: int = 0
    crashes: int = 0
    verifications: int = 0
    differences: int = 0


@dataclass
class Tended:
    """A served database and the state that outlives its scheduler: connections, running refreshes, counters."""

    name: str  # unique among all servers
    workers: Workers
    limit: ServerLimit | None = None  # if the server has a connection budget
    busy: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    counters: Counters = field(default_factory=Counters)
    settings: Settings | None = None
    # Jobs whose outcome the worker could not record, each with the error that ended the worker.
    lost: list[tuple[int, Exception]] = field(default_factory=list)
