"""When the service compares a stream table with its query: one at a time, within a share of its time."""

from __future__ import annotations

import threading
import time


class Rotation:
    """Shared by the schedulers of a service. After a comparison that took a second, with 1 %, 99 seconds pass without one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._begun: float | None = None
        self._not_before = 0.0

    @property
    def is_free(self) -> bool:
        return not self._taken and time.monotonic() >= self._not_before

    def take(self) -> bool:
        """Whether the caller may compare one now; if so it calls `end()`, whatever happens."""
        with self._lock:
            if not self.is_free:
                return False
            self._taken = True
            return True

    def begin(self) -> None:
        """It has got a worker: from now on it costs time."""
        self._begun = time.monotonic()

    def end(self, percent: int) -> None:
        now = time.monotonic()
        with self._lock:
            if self._begun is not None:
                self._not_before = now + (now - self._begun) * (100 / percent - 1)
            self._taken, self._begun = False, None
