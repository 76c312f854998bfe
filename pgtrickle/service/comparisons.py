"""Comparisons of stream tables with their queries: in rotation, and on request."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from pgtrickle.catalog.query_files import load_query
from pgtrickle.service.obstacles import is_explained
from pgtrickle.service.pool import Pool
from pgtrickle.service.scheduling.fair_queue import Task
from pgtrickle.service.scheduling.rotation import Rotation
from pgtrickle.service.scheduling.units import Unit
from pgtrickle.service.settings import Settings
from pgtrickle.service.tended import Tended

log = logging.getLogger("pgtrickle.scheduler")

PAUSE_SECONDS = 1.0  # between two requested comparisons of a stream table
MOST_DOUBLED = 6  # how often that pause is doubled, once for each error in a row


@dataclass
class Comparisons:
    """Submits the comparisons of one database to the workers."""

    tended: Tended
    pool: Pool
    rotation: Rotation
    forget: Callable[[Sequence[Unit]], None]  # called when units are done
    # When each stream table was last submitted, even if it could not be compared.
    _submitted: dict[int, float] = field(default_factory=dict)
    _errors: Counter[int] = field(default_factory=Counter)  # in a row, by stream table

    def submit_next(self, conn: psycopg.Connection[Any], settings: Settings) -> None:
        """Submit a comparison with its query for the stream table whose turn it is."""
        every = settings.verify_seconds
        if every is None or not self.rotation.is_free:
            return
        with self.tended.lock:
            others = set(self.tended.busy)
        others |= {pgt_id for pgt_id, at in self._submitted.items() if time.monotonic() - at < every}
        row = conn.execute(load_query("unverified"), {"every": every, "others": list(others)}).fetchone()
        if row is None or not self.rotation.take():
            return
        self._submit(Unit("VERIFY", (row[0],), 0, asked=False, owner=row[1]), settings)

    def submit_requested(self, conn: psycopg.Connection[Any], settings: Settings) -> None:
        """Submit the comparisons that were requested in SQL, with a pause between two of the same stream table."""
        with self.tended.lock:
            others = set(self.tended.busy)
        now = time.monotonic()
        others |= {pgt_id for pgt_id, at in self._submitted.items() if now - at < self._pause(pgt_id)}
        for pgt_id, owner in conn.execute(load_query("verify_requests"), {"others": list(others)}).fetchall():
            self._submit(Unit("VERIFY", (pgt_id,), 0, asked=True, owner=owner), settings)

    def _pause(self, pgt_id: int) -> float:
        """Seconds between two requested comparisons of a stream table: more after errors, such as lost connections."""
        return PAUSE_SECONDS * 2.0 ** min(self._errors[pgt_id], MOST_DOUBLED)

    def _submit(self, unit: Unit, settings: Settings) -> None:
        self._submitted[unit.ids[0]] = time.monotonic()
        with self.tended.lock:
            self.tended.busy.update(unit.ids)
        self.pool.submit(Task(self.tended.name, unit, settings.share, self._verify(unit, settings), self.tended.limit))

    def _verify(self, unit: Unit, settings: Settings) -> Callable[[int], None]:
        def work(number: int) -> None:
            about: dict[str, Any] = {"database": self.tended.workers.database, "pgt_id": unit.ids[0]}
            if not unit.asked:
                self.rotation.begin()
            try:
                found = self.tended.workers.verify(unit, settings, number)
                self._errors.pop(unit.ids[0], None)
                self.tended.counters.verifications += found.equal is not None
                if found.equal is False:
                    self.tended.counters.differences += 1
                    about |= {"stream_table": found.name, "missing": found.missing, "unexpected": found.unexpected}
                    log.error("a stream table differs from its query: `pgtrickle verify` shows how", extra=about)
            except Exception as error:
                self._errors[unit.ids[0]] += 1
                log.warning(
                    "a stream table could not be compared with its query",
                    extra=about | {"error": str(error).strip()},
                    exc_info=not is_explained(error, self.tended.workers.budget, self.tended.workers.database),
                )
            finally:
                self.forget([unit])

        return work
