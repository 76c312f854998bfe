"""Whose turn it is to get a worker: pure, so that its bounds can be tested without threads."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from pgtrickle.service.scheduling.units import Unit

# Under this share of busy workers a database may use more than its quota.
CROWDED = 0.8
BURST = 1.5


@dataclass(frozen=True)
class Share:
    """How many workers a database may use."""

    cap: int  # at most, whatever else happens
    quota: int = 0  # guaranteed while others want workers too; 0 for no quota

    def allows(self, running: int, busy: int, size: int) -> bool:
        """Whether a database with so many running may start one more."""
        if running >= self.cap or busy >= size:
            return False
        if self.quota == 0:
            return True
        crowded = busy >= CROWDED * size
        return running < (self.quota if crowded else math.ceil(self.quota * BURST))


@dataclass(frozen=True)
class ServerLimit:
    """How many workers may be connected to a server; one more would only wait for a connection."""

    server: str
    workers: int


@dataclass
class Task:
    """A unit that waits for a worker or is being done."""

    database: str
    unit: Unit
    share: Share
    work: Callable[[int], None]  # called with the number of the worker
    limit: ServerLimit | None = None
    enqueued: float = field(default_factory=time.monotonic)

    @property
    def urgent_at(self) -> float:
        """From then on nothing that arrives later goes first, whatever its band and tier."""
        return self.enqueued + self.unit.patience

    @property
    def lane(self) -> tuple[str, int | None, bool]:
        """What is served in rotation: database, owner, and requests beside scheduled refreshes."""
        return self.database, self.unit.owner, self.unit.asked


class FairQueue:
    """Chooses the next task.

    Tasks whose patience is over are served in rotation: first among databases, then among the owners of a database, then
    among an owner's requests and scheduled refreshes, and within these in the order in which their patience ended. While
    there are none, more urgent bands and tiers go first. So nobody waits for more than one round of the others, however
    much these ask for.
    """

    def __init__(self) -> None:
        self._count = 0
        self._last: dict[tuple[object, ...], int] = {}  # number of the last start of a database, an owner, a lane
        self._owners: dict[str, frozenset[int]] = {}

    def know(self, database: str, owners: Iterable[int]) -> None:
        """Who has stream tables in a database: one of them never gets all workers while there are others."""
        self._owners[database] = frozenset(owners)
        if not self._owners[database]:
            del self._owners[database]
            self._last = {key: count for key, count in self._last.items() if key[0] != database}

    def choose(self, waiting: Iterable[Task], running: Collection[Task], size: int, now: float) -> Task | None:
        """The task that a free worker of so many should begin."""
        databases = Counter(task.database for task in running)
        servers = Counter(task.limit.server for task in running if task.limit is not None)
        holders = {task.lane[:2] for task in running}
        full = self._holder_of_all(holders) if 0 < size - 1 <= len(running) else None
        free = [
            task
            for task in waiting
            if task.share.allows(databases[task.database], len(running), size)
            and (task.limit is None or servers[task.limit.server] < task.limit.workers)
            and (task.unit.owner is None or task.lane[:2] != full)
        ]
        if urgent := [task for task in free if task.urgent_at <= now]:
            return min(urgent, key=lambda task: (*self._turn(task), task.urgent_at))
        return min(free, key=lambda task: (task.unit.priority, *self._turn(task), task.enqueued), default=None)

    def begun(self, task: Task) -> None:
        """Its database, owner and lane come last now."""
        self._count += 1
        for key in _keys(task):
            self._last[key] = self._count

    def _turn(self, task: Task) -> tuple[int, ...]:
        return tuple(self._last.get(key, 0) for key in _keys(task))

    def _holder_of_all(self, holders: Collection[tuple[str, int | None]]) -> tuple[str, int | None] | None:
        """The owner of all that runs, if others have stream tables too."""
        if len(holders) != 1:
            return None
        (holder,) = holders
        known = {(database, owner) for database, owners in self._owners.items() for owner in owners}
        return holder if known - {holder} else None


def _keys(task: Task) -> tuple[tuple[object, ...], ...]:
    return task.lane[:1], task.lane[:2], task.lane
