"""Poll remote databases for changes to sources of local stream tables, once for all schedulers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import psycopg

from pgtrickle.catalog.query_files import load_query
from pgtrickle.errors import PgtrickleError
from pgtrickle.sites.remote.connections import Connections

log = logging.getLogger("pgtrickle.watch")

LOOKS_AT_ONCE = 8
# Databases nobody has asked about recently are no longer polled.
FORGET_SECONDS = 60.0


@dataclass(frozen=True)
class Look:
    """The result of polling a database: sources with changes, the transactions that made them, and a lower bound of
    their commit times.
    """

    at: float = 0.0  # time.time() when the poll began
    active: tuple[tuple[str, int, float], ...] = ()
    problem: str | None = None

    def next(self, at: float, rows: Sequence[tuple[str, int, float | None]]) -> Look:
        """The next result, from a poll that began at time `at`.

        Each row is a source, a transaction, and an upper bound of the age of its changes in seconds.
        """
        known = {(name, xid): since for name, xid, since in self.active}
        new = ((name, xid, max(self.at, at - seconds if seconds is not None else 0.0)) for name, xid, seconds in rows)
        return Look(at, tuple((name, xid, known.get((name, xid), since)) for name, xid, since in new))


@dataclass
class _Watched:
    name: str
    interval: float
    asked: float
    last: Look = field(default_factory=Look)
    begun: float = 0.0
    running: Future[None] | None = None
    wake: dict[str, Callable[[], None]] = field(default_factory=dict)  # by scheduler


@dataclass
class RemoteWatch:
    """Polls remote databases for all schedulers of a service. One that does not answer does not delay the others."""

    connections: Connections = field(default_factory=Connections)

    def __post_init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._stopped = False
        self._pool: ThreadPoolExecutor | None = None

    def looks(
        self, who: str, databases: Mapping[str, str], interval: float, wake: Callable[[], None]
    ) -> dict[str, Look]:
        """The last poll of each of these databases (name to DSN), which are polled from now on."""
        if not databases:
            return {}
        now = time.monotonic()
        with self._changed:
            self._start()
            found = {}
            for name, dsn in databases.items():
                watched = self._watched.setdefault(dsn, _Watched(name, interval, now))
                watched.interval, watched.asked = min(watched.interval, interval), now
                watched.wake[who] = wake
                found[name] = watched.last
            self._changed.notify()
            return found

    def leave(self, who: str) -> None:
        """End polling for a scheduler; idle connections to databases that no other scheduler polls are closed."""
        with self._changed:
            for dsn, one in list(self._watched.items()):
                one.wake.pop(who, None)
                if not one.wake:
                    del self._watched[dsn]
                    self.connections.close_idle_to(dsn)

    def run(self, call: Callable[[], None]) -> None:
        """Run a call that uses a remote database in the background. A failure is only logged: callers try again."""

        def attempt() -> None:
            try:
                call()
            except (psycopg.Error, PgtrickleError) as error:
                log.info("not done: %s", error)

        with self._changed:
            if not self._stopped:
                self._start().submit(attempt)

    def _start(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(LOOKS_AT_ONCE, "pgtrickle-watch")
            threading.Thread(target=self._run, name="pgtrickle-watch", daemon=True).start()
        return self._pool

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopped:
                    return
                now = time.monotonic()
                for dsn in [dsn for dsn, one in self._watched.items() if now - one.asked > FORGET_SECONDS]:
                    del self._watched[dsn]
                for dsn, one in self._watched.items():
                    if now - one.begun >= one.interval and (one.running is None or one.running.done()):
                        assert self._pool is not None
                        one.begun = now
                        one.running = self._pool.submit(self._look, dsn, one)
                self.connections.close_idle()
                waits = [one.begun + one.interval - now for one in self._watched.values()]
                self._changed.wait(max(0.01, min(waits, default=FORGET_SECONDS)))

    def _look(self, dsn: str, watched: _Watched) -> None:
        at = time.time()
        try:
            with self.connections.open(watched.name, dsn) as conn:
                rows = conn.execute(load_query("look")).fetchall()
            look = watched.last.next(at, rows)
        except (psycopg.Error, PgtrickleError) as error:
            problem = error.message if isinstance(error, PgtrickleError) else str(error).strip()
            look = Look(watched.last.at, watched.last.active, problem)
        if look.problem is not None and look.problem != watched.last.problem:
            log.warning("not watched: %s", look.problem, extra={"database": watched.name})
        elif look.problem is None and watched.last.problem is not None:
            log.info("watched again", extra={"database": watched.name})
        news = set(look.active) - set(watched.last.active)
        back = look.problem is None and watched.last.problem is not None
        watched.last = look
        if news or back:
            for wake in list(watched.wake.values()):
                wake()
