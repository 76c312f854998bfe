"""The launcher: watches a server and keeps a scheduler running for each of its databases that is to be served."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from pgtrickle.catalog.trust import Trust
from pgtrickle.errors import UntrustedCatalogError
from pgtrickle.refresh.fetch.helper_process import HelperProcesses
from pgtrickle.service.activity import ACTIVITY_SECONDS, ServerActivity
from pgtrickle.service.broker.broker import Broker
from pgtrickle.service.config import ServerConfig, ServiceConfig
from pgtrickle.service.connection_budget import Budget
from pgtrickle.service.obstacles import DISABLED, NOT_INSTALLED, find_obstacle, is_explained
from pgtrickle.service.pool import Pool
from pgtrickle.service.remote_watch import RemoteWatch
from pgtrickle.service.scheduler import ReconnectError, Scheduler
from pgtrickle.service.scheduling.rotation import Rotation
from pgtrickle.service.settings import Settings, read_settings
from pgtrickle.service.tended import Tended
from pgtrickle.service.worker import Workers

log = logging.getLogger("pgtrickle.launcher")

_DATABASES = (
    "SELECT datname FROM pg_catalog.pg_database WHERE datallowconn AND NOT datistemplate"
    " AND pg_catalog.has_database_privilege(datname, 'CONNECT')"
)
LONGEST_BACKOFF = 60.0
FIRST_RETRY, LONGEST_RETRY = 0.5, 5.0  # seconds between attempts to reach a server
LEAST_PAUSE = 0.2  # seconds between two rounds


@dataclass
class Watched:
    """What the launcher knows about a database."""

    scheduler: Scheduler | None = None
    tended: Tended | None = None
    problem: str | None = None  # why it is not served
    crash: str | None = None  # how its scheduler crashes repeatedly
    told: str | None = None  # the last problem that was reported in the database itself
    attempts: int = 0  # consecutive failures
    not_before: float = 0.0

    @property
    def served(self) -> bool:
        """Whether a scheduler is running and has completed at least one tick."""
        return self.scheduler is not None and self.scheduler.alive and self.scheduler.ticked


@dataclass
class Launcher:
    """Watches one server."""

    server: ServerConfig
    config: ServiceConfig
    service_id: uuid.UUID
    pool: Pool
    watch: RemoteWatch
    helpers: HelperProcesses
    broker: Broker
    rotation: Rotation
    on_settings: Callable[[], None] = lambda: None
    databases: dict[str, Watched] = field(default_factory=dict)
    problem: str | None = None  # why the server itself is not served
    in_recovery: bool = False
    rounds: int = 0

    def __post_init__(self) -> None:
        self.trust = Trust(frozenset({*self.config.trusted_owners, *self.server.trusted_owners}))
        self.budget = Budget(self.server.dsn, self.server.max_connections, self.trust)
        self.activity = ServerActivity()
        self._stop = threading.Event()
        self._news = threading.Event()  # a scheduler has begun to serve its database, or has ended
        self._thread = threading.Thread(target=self._run, name=f"pgtrickle-launcher-{self.server.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self) -> None:
        """Start no new refreshes."""
        self._stop.set()
        self._news.set()
        for watched in list(self.databases.values()):
            if watched.scheduler is not None:
                watched.scheduler.draining = True

    def stop(self, seconds: float) -> None:
        self._stop.set()
        self._news.set()
        self._thread.join(seconds)
        schedulers = [watched.scheduler for watched in self.databases.values() if watched.scheduler is not None]
        for scheduler in schedulers:
            scheduler.stop()
        deadline = time.monotonic() + seconds
        for scheduler in schedulers:
            scheduler.join(max(0.0, deadline - time.monotonic()))

    @property
    def unserved(self) -> dict[str, str]:
        """Databases that should be served and are not, with the reason.

        Databases without a catalog count only if the configuration names them; disabled databases never count.
        """
        if self.in_recovery or self.problem is not None or self.rounds == 0:
            return {}
        named = set(self.server.databases or ())
        found = dict.fromkeys(named, "there is no such database, or the role of the DSN may not connect to it")
        for name, watched in list(self.databases.items()):
            reason = watched.problem or "its scheduler is starting"
            found.pop(name, None)
            if not watched.served and reason != DISABLED and (reason != NOT_INSTALLED or name in named):
                found[name] = reason
        return found

    def _run(self) -> None:
        retry = FIRST_RETRY
        while not self._stop.is_set():
            try:
                with self.budget.using("launcher") as conn:
                    retry = FIRST_RETRY
                    self._watch(conn)
                self._await_news(self.config.list_seconds)
            except psycopg.OperationalError as error:
                self._tell(f"the server cannot be reached: {_first_line(error)}")
                self._stop.wait(min(retry, self.config.list_seconds))
                retry = min(2 * retry, LONGEST_RETRY)
            except Exception as error:
                self._tell(f"the server cannot be watched: {_first_line(error)}")
                log.exception("launcher failed", extra={"server": self.server.name})
                self._stop.wait(self.config.list_seconds)

    def _watch(self, conn: psycopg.Connection[Any]) -> None:
        """Serve the server's databases until stopped, or until this connection's own database is to be released."""
        while not self._stop.is_set():
            row = conn.execute("SELECT pg_catalog.pg_is_in_recovery()").fetchone()
            recovering = row == (True,)
            if recovering != self.in_recovery:
                log.info(
                    "the server is a replica: waiting for its promotion" if recovering else "the server was promoted",
                    extra={"server": self.server.name},
                )
            self.in_recovery = recovering
            self._tell(None)
            if self.in_recovery:
                self._keep(set())
                self.rounds += 1
                self._pause(conn, self.config.replica_seconds)
                continue
            names = {row[0] for row in conn.execute(_DATABASES)}
            self._keep(names if self.server.databases is None else names & set(self.server.databases))
            self.rounds += 1
            if self._is_released(conn.info.dbname):
                return
            self._pause(conn, self.config.list_seconds)

    def _is_released(self, name: str) -> bool:
        """Whether a database must not have connections now: it is paused, and nothing runs there."""
        watched = self.databases.get(name)
        return watched is not None and watched.scheduler is not None and watched.scheduler.released

    def _pause(self, conn: psycopg.Connection[Any], seconds: float) -> None:
        """Wait until the databases are to be listed again; with a budget, meanwhile watch for writes to idle ones."""
        deadline = time.monotonic() + seconds
        while not self._stop.is_set() and (left := deadline - time.monotonic()) > 0:
            if self._await_news(min(left, ACTIVITY_SECONDS) if self.budget.bounded else left):
                return
            if self.budget.bounded:
                self.activity.look(conn)

    def _await_news(self, seconds: float) -> bool:
        """Wait; True if a round is due earlier: a scheduler has started or ended, or a retry is due."""
        retries = [
            watched.not_before
            for watched in self.databases.values()
            if watched.scheduler is None and watched.problem != NOT_INSTALLED
        ]
        retry = max(LEAST_PAUSE, min(retries, default=float("inf")) - time.monotonic())
        if not self._news.wait(min(seconds, retry)):
            return retry <= seconds
        self._news.clear()
        self._stop.wait(LEAST_PAUSE)
        return True

    def _keep(self, names: set[str]) -> None:
        """Run a scheduler for each of these databases that can be served, and for no others."""
        for name in [name for name in self.databases if name not in names]:
            gone = self.databases.pop(name)
            if gone.scheduler is not None:
                log.info("scheduler stops: the database no longer exists", extra=self._about(name))
                gone.scheduler.stop()
        for name in sorted(names):
            watched = self.databases.setdefault(name, Watched())
            if self._stop.is_set():
                return
            if watched.served and watched.problem is not None:
                log.info("served again", extra=self._about(name))
                watched.problem = None
            if watched.served and time.monotonic() > watched.not_before:
                watched.attempts, watched.crash, watched.told = 0, None, None  # it has run long enough
            if watched.scheduler is not None and not watched.scheduler.alive:
                self._ended(name, watched, watched.scheduler)
            if watched.scheduler is None and time.monotonic() >= watched.not_before:
                self._try(name, watched)

    def _ended(self, name: str, watched: Watched, scheduler: Scheduler) -> None:
        watched.scheduler = None
        if scheduler.failure is None or isinstance(scheduler.failure, ReconnectError):
            watched.not_before = 0.0  # it did not crash: the next one may start at once
            return
        assert watched.tended is not None
        error, former = scheduler.failure, watched.problem
        explained = is_explained(error, self.budget, name)
        if explained and not isinstance(error, psycopg.OperationalError):
            watched.not_before = 0.0  # the next attempt reports why it is not served
            return
        watched.tended.counters.crashes += 1
        self._postpone(name, watched, f"its scheduler ended: {_first_line(error)}")
        watched.crash = watched.problem if watched.attempts > 1 else None  # a single one may be a server restart
        if watched.problem != former and not explained:
            log.error("a scheduler crashed", extra=self._about(name), exc_info=error)

    def _try(self, name: str, watched: Watched) -> None:
        """Start a scheduler if the database has a catalog of this release and is not disabled."""
        attached: Mapping[str, str] | None = None
        try:
            with self.budget.using("launcher", name) as conn:
                obstacle = find_obstacle(conn, self.budget)
                crowded = self._crowded()
                if obstacle is None:
                    attached = read_settings(conn).attached
                    _tell_health(conn, watched, crowded or watched.crash)
        except UntrustedCatalogError as error:
            obstacle, crowded = f"{error.message}. {error.hint}", None
        except psycopg.Error as error:
            self._postpone(name, watched, f"it cannot be reached: {_first_line(error)}")
            return
        if obstacle is not None:
            if watched.problem != obstacle and obstacle == NOT_INSTALLED and watched.tended is not None:
                log.info("no longer served: its pgtrickle catalog was removed", extra=self._about(name))
            elif watched.problem != obstacle and obstacle != NOT_INSTALLED:
                log.warning("not served: %s", obstacle, extra=self._about(name))
            watched.problem = obstacle
            # Most databases of a server may have no catalog: check those less and less often.
            watched.attempts = min(watched.attempts + 1, 6)
            watched.not_before = time.monotonic() + self.config.list_seconds * (
                watched.attempts if obstacle == NOT_INSTALLED else 1
            )
            return
        if crowded is not None:
            self._postpone(name, watched, crowded)
            return
        if watched.tended is None:
            workers = Workers(
                self.budget,
                name,
                self.service_id,
                connections=self.watch.connections,
                helpers=self.helpers,
                broker=self.broker,
            )
            watched.tended = Tended(f"{self.server.name}/{name}", workers, self.budget.limit(self.server.name))
        watched.scheduler = Scheduler(
            watched.tended,
            self.pool,
            self.config.lease_seconds,
            self.watch,
            self.on_settings,
            self.activity,
            self.rotation,
            on_news=self._news.set,
            attached=attached,
        )
        watched.scheduler.start()
        if watched.problem is None or watched.attempts == 0:
            log.info("scheduler started", extra=self._about(name))
        watched.not_before = time.monotonic() + LONGEST_BACKOFF  # if it ends before, it may be crashing repeatedly

    def _crowded(self) -> str | None:
        served = [one.tended.settings for one in self.databases.values() if one.scheduler is not None and one.tended]
        limits = [settings.most_databases if settings is not None else 0 for settings in served]
        if not limits or not all(limits) or len(served) < max(limits):
            return None  # the owner of one database cannot limit the others: all served databases must set a limit
        return f"pg_trickle.max_databases is {max(limits)}"

    def _postpone(self, name: str, watched: Watched, problem: str) -> None:
        if watched.problem != problem:
            log.warning("not served: %s", problem, extra=self._about(name))
        watched.problem = problem
        watched.attempts += 1
        watched.not_before = time.monotonic() + min(2.0**watched.attempts, LONGEST_BACKOFF)

    @property
    def settings(self) -> list[Settings]:
        """The settings of all databases that are or were served."""
        tended = [watched.tended for watched in list(self.databases.values()) if watched.tended is not None]
        return [one.settings for one in tended if one.settings is not None]

    def _tell(self, problem: str | None) -> None:
        if problem != self.problem and problem is not None:
            log.warning("%s", problem, extra={"server": self.server.name})
        self.problem = problem

    def _about(self, name: str) -> dict[str, str]:
        return {"server": self.server.name, "database": name}


def _tell_health(conn: psycopg.Connection[Any], watched: Watched, problem: str | None) -> None:
    """Emit an event in the database that says why it is not served, once for each reason."""
    if problem is not None and problem != watched.told:
        conn.execute("SELECT pgtrickle._emit_event('not_served', NULL, %s)", (Jsonb({"reason": problem}),))
        watched.told = problem


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
