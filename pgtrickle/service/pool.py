"""The workers of the service, shared by all databases: who is next, and who must wait."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pgtrickle.service.units import Unit

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


@dataclass
class Task:
    """A unit that waits for a worker or is being done."""

    database: str
    unit: Unit
    share: Share
    work: Callable[[int], None]  # called with the number of the worker
    enqueued: float = field(default_factory=time.monotonic)


class Pool:
    """Workers as threads. Each takes the most urgent task whose database may have one more worker.

    Of equally urgent ones the database with the fewest workers comes first, then who waits longest: nobody starves.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: list[Task] = []
        self._running: dict[int, Task] = {}
        self._changed = threading.Condition()
        self._stopping = False
        self._threads: dict[int, threading.Thread] = {}

    @property
    def size(self) -> int:
        return self._size

    @property
    def active(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def resize(self, size: int) -> None:
        with self._changed:
            self._size = size
            self._changed.notify_all()

    def submit(self, task: Task) -> None:
        with self._changed:
            self._waiting.append(task)
            self._start_threads()
            self._changed.notify_all()

    def drop(self, database: str) -> list[Task]:
        """Take back what waits for a database; what runs goes on."""
        with self._changed:
            dropped = [task for task in self._waiting if task.database == database]
            self._waiting = [task for task in self._waiting if task.database != database]
            return dropped

    def stop(self, seconds: float) -> bool:
        """Start nothing more and wait for what runs; False if it did not end in time."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._stopping = True
            self._waiting.clear()
            self._changed.notify_all()
            while self._running:
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    return False
        return True

    def _start_threads(self) -> None:
        for number in range(self._size):
            if number not in self._threads:
                thread = threading.Thread(
                    target=self._work, args=(number,), name=f"pgtrickle-worker-{number}", daemon=True
                )
                self._threads[number] = thread
                thread.start()

    def _work(self, number: int) -> None:
        while True:
            with self._changed:
                task = self._next(number)
                while task is None:
                    if self._stopping or number >= self._size:
                        del self._threads[number]
                        return
                    self._changed.wait()
                    task = self._next(number)
                self._waiting.remove(task)
                self._running[number] = task
            try:
                task.work(number)
            finally:
                with self._changed:
                    del self._running[number]
                    self._changed.notify_all()

    def _next(self, number: int) -> Task | None:
        if self._stopping or number >= self._size:
            return None
        running: dict[str, int] = {}
        for task in self._running.values():
            running[task.database] = running.get(task.database, 0) + 1
        free = [t for t in self._waiting if t.share.allows(running.get(t.database, 0), len(self._running), self._size)]
        return min(free, key=lambda t: (t.unit.priority, running.get(t.database, 0), t.enqueued), default=None)
