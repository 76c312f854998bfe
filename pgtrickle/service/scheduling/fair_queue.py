"""Choose the task that gets the next worker. Pure, so that its guarantees can be tested without threads."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from pgtrickle.service.scheduling.units import Unit

# While fewer than this share of the workers are busy, a database may use more than its quota.
CROWDED = 0.8
BURST = 1.5


@dataclass(frozen=True)
class Share:
    """How many workers a database may use."""

    cap: int  # never more than this
    quota: int = 0  # the limit while most workers are busy; 0 for no quota

    def allows(self, running: int, busy: int, size: int) -> bool:
        """Whether a database with this many running tasks may start one more."""
        if running >= self.cap or busy >= size:
            return False
        if self.quota == 0:
            return True
        crowded = busy >= CROWDED * size
        return running < (self.quota if crowded else math.ceil(self.quota * BURST))


@dataclass(frozen=True)
class ServerLimit:
    """How many workers may work on a server; any further one would only wait for a connection."""

    server: str
    workers: int


@dataclass
class Task:
    """A unit that waits for a worker or is running."""

    database: str
    unit: Unit
    share: Share
    work: Callable[[int], None]  # called with the number of the worker
    limit: ServerLimit | None = None
    enqueued: float = field(default_factory=time.monotonic)

    @property
    def urgent_at(self) -> float:
        """The time from which no later task goes first, whatever its band and tier."""
        return self.enqueued + self.unit.patience

    @property
    def lane(self) -> tuple[str, int | None, bool]:
        """The key of the rotation: database, owner, and whether it is a request or a scheduled refresh."""
        return self.database, self.unit.owner, self.unit.asked


class FairQueue:
    """Chooses the next task.

    Tasks whose patience is over are served in rotation: first among databases, then among the owners of a database, then
    among an owner's requests and scheduled refreshes, and within these in the order in which their patience ended. While
    there are none, more urgent bands and tiers go first. So no owner waits for more than one round of the others,
    however many tasks these submit.
    """

    def __init__(self) -> None:
        self._count = 0
        self._last: dict[tuple[object, ...], int] = {}  # number of the last start of a database, an owner, a lane
        self._owners: dict[str, frozenset[int]] = {}

    def know(self, database: str, owners: Iterable[int]) -> None:
        """Set the owners of stream tables in a database. No owner gets all workers while there are others."""
        self._owners[database] = frozenset(owners)
        if not self._owners[database]:
            del self._owners[database]
            self._last = {key: count for key, count in self._last.items() if key[0] != database}

    def choose(self, waiting: Iterable[Task], running: Collection[Task], size: int, now: float) -> Task | None:
        """The task that a free worker should start now; None if there is none. `size` is the number of workers."""
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
        """Record the start of a task: its database, owner and lane come last in the rotation now."""
        self._count += 1
        for key in _keys(task):
            self._last[key] = self._count

    def _turn(self, task: Task) -> tuple[int, ...]:
        return tuple(self._last.get(key, 0) for key in _keys(task))

    def _holder_of_all(self, holders: Collection[tuple[str, int | None]]) -> tuple[str, int | None] | None:
        """The owner of all running tasks, if other owners have stream tables too."""
        if len(holders) != 1:
            return None
        (holder,) = holders
        known = {(database, owner) for database, owners in self._owners.items() for owner in owners}
        return holder if known - {holder} else None


def _keys(task: Task) -> tuple[tuple[object, ...], ...]:
    return task.lane[:1], task.lane[:2], task.lane
