"""The pool of worker threads, which all databases share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from pgtrickle.service.scheduling.fair_queue import FairQueue, Task


class Pool:
    """Worker threads. Each runs the task that the fair queue chooses next."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: list[Task] = []
        self._running: dict[int, Task] = {}
        self._queue = FairQueue()
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

    def know(self, database: str, owners: Iterable[int]) -> None:
        """Set the owners of stream tables in a database; none if it is no longer served."""
        with self._changed:
            self._queue.know(database, owners)
            self._changed.notify_all()

    def submit(self, task: Task) -> None:
        with self._changed:
            self._waiting.append(task)
            self._start_threads()
            self._changed.notify_all()

    def drop(self, database: str) -> list[Task]:
        """Remove and return the waiting tasks of a database; running ones continue."""
        with self._changed:
            dropped = [task for task in self._waiting if task.database == database]
            self._waiting = [task for task in self._waiting if task.database != database]
            return dropped

    def stop(self, seconds: float) -> bool:
        """Start no more tasks and wait for the running ones; False if they did not end in time."""
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
                self._queue.begun(task)
            try:
                task.work(number)
            finally:
                with self._changed:
                    del self._running[number]
                    self._changed.notify_all()

    def _next(self, number: int) -> Task | None:
        if self._stopping or number >= self._size:
            return None
        return self._queue.choose(self._waiting, self._running.values(), self._size, time.monotonic())
