"""How old the newest change is that a stream table shows, sampled while a service works."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import psycopg

SAMPLE_SECONDS = 0.05


@dataclass
class Staleness:
    """Samples of (seconds since the beginning, staleness in seconds)."""

    samples: list[tuple[float, float]] = field(default_factory=list)

    def quantile(self, share: float, part: slice = slice(None)) -> float:
        values = sorted(staleness for _, staleness in self.samples[part])
        return values[min(len(values) - 1, int(share * len(values)))]

    @property
    def growth(self) -> float:
        """Median of the last quarter over that of the second."""
        quarter = len(self.samples) // 4
        return self.quantile(0.5, slice(3 * quarter, None)) / self.quantile(0.5, slice(quarter, 2 * quarter))

    def sample(self, dsn: str, newest: str, over: threading.Event) -> None:
        """Until it is over. The query gives the time of the newest change that shows."""
        started = time.monotonic()
        query = f"SELECT extract(epoch FROM clock_timestamp() - ({newest}))::float8"
        with psycopg.connect(dsn, autocommit=True) as reader:
            while not over.wait(SAMPLE_SECONDS):
                row = reader.execute(query.encode()).fetchone()
                if row is not None and row[0] is not None:
                    self.samples.append((time.monotonic() - started, row[0]))
