"""Limit the service's comparisons of stream tables with their queries: one at a time, within a share of its time."""

from __future__ import annotations

import threading
import time


class Rotation:
    """A time budget for comparisons, shared by the schedulers of a service.

    With a share of 1 %, a comparison that took one second is followed by 99 seconds without one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._begun: float | None = None
        self._not_before = 0.0

    @property
    def is_free(self) -> bool:
        return not self._taken and time.monotonic() >= self._not_before

    def take(self) -> bool:
        """Reserve the next comparison; False if it is not possible now. If True, the caller must call `end()`."""
        with self._lock:
            if not self.is_free:
                return False
            self._taken = True
            return True

    def begin(self) -> None:
        """Start the clock: a worker has begun the comparison."""
        self._begun = time.monotonic()

    def end(self, percent: int) -> None:
        now = time.monotonic()
        with self._lock:
            if self._begun is not None:
                self._not_before = now + (now - self._begun) * (100 / percent - 1)
            self._taken, self._begun = False, None
