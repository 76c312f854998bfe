"""The launcher: watches servers, and keeps a scheduler running for each of their databases that wants one."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from pgtrickle.catalog.install import installed_version, latest_version
from pgtrickle.engine.beside import Beside
from pgtrickle.service.broker import Broker
from pgtrickle.service.config import ServerConfig, ServiceConfig
from pgtrickle.service.connections import Budget
from pgtrickle.service.pool import Pool
from pgtrickle.service.pulse import PULSE_SECONDS, Pulse
from pgtrickle.service.scheduler import ReconnectError, Scheduler, Tended
from pgtrickle.service.settings import Settings, read_settings
from pgtrickle.service.watch import Watch
from pgtrickle.service.worker import Workers

log = logging.getLogger("pgtrickle.launcher")

_DATABASES = (
    "SELECT datname FROM pg_database WHERE datallowconn AND NOT datistemplate"
    " AND has_database_privilege(datname, 'CONNECT') ORDER BY oid"
)
LONGEST_BACKOFF = 60.0


@dataclass
class Watched:
    """A database that the launcher knows."""

    scheduler: Scheduler | None = None
    tended: Tended | None = None
    problem: str | None = None  # why it is not served
    crash: str | None = None  # how its scheduler ended, again and again
    told: str | None = None  # what its own health shows
    attempts: int = 0  # that failed, one after the other
    not_before: float = 0.0


@dataclass
class Launcher:
    """Watches one server."""

    server: ServerConfig
    config: ServiceConfig
    service_id: uuid.UUID
    pool: Pool
    watch: Watch
    beside: Beside
    broker: Broker
    on_settings: Callable[[], None] = lambda: None
    databases: dict[str, Watched] = field(default_factory=dict)
    problem: str | None = None  # why the server itself is not served
    in_recovery: bool = False
    rounds: int = 0

    def __post_init__(self) -> None:
        self.budget = Budget(self.server.dsn, self.server.max_connections)
        self.pulse = Pulse()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pgtrickle-launcher-{self.server.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self) -> None:
        """Start nothing new."""
        self._stop.set()
        for watched in list(self.databases.values()):
            if watched.scheduler is not None:
                watched.scheduler.draining = True

    def stop(self, seconds: float) -> None:
        self._stop.set()
        self._thread.join(seconds)
        schedulers = [watched.scheduler for watched in self.databases.values() if watched.scheduler is not None]
        for scheduler in schedulers:
            scheduler.stop()
        deadline = time.monotonic() + seconds
        for scheduler in schedulers:
            scheduler.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self.budget.using("launcher") as conn:
                    self._watch(conn)
            except psycopg.OperationalError as error:
                self._tell(f"the server cannot be reached: {_first_line(error)}")
                self._stop.wait(min(self.config.list_seconds, LONGEST_BACKOFF))
            except Exception as error:
                self._tell(f"the server cannot be watched: {_first_line(error)}")
                log.exception("launcher failed", extra={"server": self.server.name})
                self._stop.wait(self.config.list_seconds)

    def _watch(self, conn: psycopg.Connection[Any]) -> None:
        while not self._stop.is_set():
            row = conn.execute("SELECT pg_is_in_recovery()").fetchone()
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
            self._pause(conn, self.config.list_seconds)

    def _pause(self, conn: psycopg.Connection[Any], seconds: float) -> None:
        """Until the databases are listed again. Those that have no connection meanwhile are watched from here."""
        deadline = time.monotonic() + seconds
        while self.budget.bounded and not self._stop.wait(min(PULSE_SECONDS, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                return
            self.pulse.look(conn)
        self._stop.wait(deadline - time.monotonic())

    def _keep(self, names: set[str]) -> None:
        """A scheduler for each of these databases that wants one, and for no other."""
        for name in [name for name in self.databases if name not in names]:
            gone = self.databases.pop(name)
            if gone.scheduler is not None:
                log.info("scheduler stops: the database is gone", extra=self._about(name))
                gone.scheduler.stop()
        for name in sorted(names):
            watched = self.databases.setdefault(name, Watched())
            if self._stop.is_set():
                return
            if watched.scheduler is not None and watched.scheduler.alive and time.monotonic() > watched.not_before:
                if watched.problem is not None:
                    log.info("served again", extra=self._about(name))
                watched.attempts, watched.problem, watched.crash, watched.told = 0, None, None, None  # it has lasted
            if watched.scheduler is not None and not watched.scheduler.alive:
                self._ended(name, watched, watched.scheduler)
            if watched.scheduler is None and time.monotonic() >= watched.not_before:
                self._try(name, watched)

    def _ended(self, name: str, watched: Watched, scheduler: Scheduler) -> None:
        watched.scheduler = None
        if scheduler.failure is None or isinstance(scheduler.failure, ReconnectError):
            watched.not_before = 0.0  # it did not crash: the next one may begin at once
            return
        assert watched.tended is not None
        watched.tended.counters.crashes += 1
        error, former = scheduler.failure, watched.problem
        self._postpone(name, watched, f"its scheduler ended: {_first_line(error)}")
        watched.crash = watched.problem if watched.attempts > 1 else None  # one may be a restart of the server
        if watched.problem != former and not isinstance(error, psycopg.OperationalError):
            log.error("a scheduler crashed", extra=self._about(name), exc_info=error)

    def _try(self, name: str, watched: Watched) -> None:
        """Start a scheduler if the database has a catalog that this release knows, and is not switched off."""
        try:
            with self.budget.using("launcher", name) as conn:
                obstacle = _obstacle(conn)
                crowded = self._crowded()
                if obstacle is None:
                    _tell_health(conn, watched, crowded or watched.crash)
        except psycopg.Error as error:
            self._postpone(name, watched, f"it cannot be reached: {_first_line(error)}")
            return
        if obstacle is not None:
            if watched.problem != obstacle and obstacle != NOT_INSTALLED:
                log.warning("not served: %s", obstacle, extra=self._about(name))
            watched.problem = obstacle
            # Most databases of a server may have nothing to do with us: looked at more and more seldom.
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
                beside=self.beside,
                broker=self.broker,
            )
            watched.tended = Tended(f"{self.server.name}/{name}", workers)
        watched.scheduler = Scheduler(
            watched.tended, self.pool, self.config.lease_seconds, self.watch, self.on_settings, self.pulse
        )
        watched.scheduler.start()
        if watched.problem is None or watched.attempts == 0:
            log.info("scheduler started", extra=self._about(name))
        watched.not_before = time.monotonic() + LONGEST_BACKOFF  # until then it may be crashing again and again

    def _crowded(self) -> str | None:
        most = max((settings.most_databases for settings in self.settings), default=0)
        served = sum(other.scheduler is not None for other in self.databases.values())
        return f"pg_trickle.max_databases is {most}" if most and served >= most else None

    def _postpone(self, name: str, watched: Watched, problem: str) -> None:
        if watched.problem != problem:
            log.warning("not served: %s", problem, extra=self._about(name))
        watched.problem = problem
        watched.attempts += 1
        watched.not_before = time.monotonic() + min(2.0**watched.attempts, LONGEST_BACKOFF)

    @property
    def settings(self) -> list[Settings]:
        """Of all databases that are or were served."""
        tended = [watched.tended for watched in list(self.databases.values()) if watched.tended is not None]
        return [one.settings for one in tended if one.settings is not None]

    def _tell(self, problem: str | None) -> None:
        if problem != self.problem and problem is not None:
            log.warning("%s", problem, extra={"server": self.server.name})
        self.problem = problem

    def _about(self, name: str) -> dict[str, str]:
        return {"server": self.server.name, "database": name}


NOT_INSTALLED = "it has no pgtrickle catalog"


def _obstacle(conn: psycopg.Connection[Any]) -> str | None:
    """Why a database is not served; None if it is."""
    version = installed_version(conn)
    if version is None:
        return NOT_INSTALLED
    if version != latest_version():
        which = "older" if version < latest_version() else "newer"
        return f"its catalog has version {version}, {which} than this release's {latest_version()}: run `pgtrickle upgrade`"
    if conn.execute("SELECT has_table_privilege('pgtrickle.pgt_stream_tables', 'UPDATE')").fetchone() != (True,):
        return f"role {conn.info.user} is not the service's: `pgtrickle install --service-role {conn.info.user}`"
    if not read_settings(conn).enabled:
        return "pg_trickle.enabled is off"
    return None


def _tell_health(conn: psycopg.Connection[Any], watched: Watched, problem: str | None) -> None:
    """Let the database itself know why it is not served, once for each reason."""
    if problem is not None and problem != watched.told:
        conn.execute("SELECT pgtrickle._emit('not_served', NULL, %s)", (Jsonb({"reason": problem}),))
        watched.told = problem


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
