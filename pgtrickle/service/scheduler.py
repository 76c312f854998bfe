"""The scheduler of one database: checks at every tick what is due and submits it to the workers."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import cycle, islice
from typing import Any

import psycopg
from psycopg.rows import class_row, dict_row
from psycopg.types.json import Jsonb

from pgtrickle.catalog.databases import is_node
from pgtrickle.catalog.query_files import load_query
from pgtrickle.postgres.connection import be_pooled, limit_waits
from pgtrickle.refresh.claim.lease import Lease
from pgtrickle.service.activity import ServerActivity
from pgtrickle.service.comparisons import Comparisons
from pgtrickle.service.connection_budget import Seat
from pgtrickle.service.maintenance import Maintenance
from pgtrickle.service.notifications import Waker
from pgtrickle.service.obstacles import is_explained
from pgtrickle.service.pool import Pool
from pgtrickle.service.remote_watch import RemoteWatch
from pgtrickle.service.scheduling.cron import ScheduleError, next_time
from pgtrickle.service.scheduling.fair_queue import Task
from pgtrickle.service.scheduling.graph import DependencyGraph
from pgtrickle.service.scheduling.rotation import Rotation
from pgtrickle.service.scheduling.ticks import Tick, thinned
from pgtrickle.service.scheduling.units import SMALL_ROWS, Due, Unit, plan_units
from pgtrickle.service.settings import Settings, read_settings
from pgtrickle.service.steps import LOCK_TIMEOUT, STATEMENT_TIMEOUT, Steps
from pgtrickle.service.tended import Tended
from pgtrickle.sites.remote.connections import dsn_from

log = logging.getLogger("pgtrickle.scheduler")

BEAT_SECONDS = 5.0
PRUNE_SECONDS = 60.0
AUDITED = 50  # stream tables at a time
AUDIT_SECONDS = 5.0
ALERT_SECONDS = 10.0
LOOK_SECONDS = 1.0  # between two recorded polls of remote databases
PAUSED_SECONDS = 3.0  # between two checks whether a database is still paused
PAUSE_SECONDS = 0.1  # at least, between two ticks: any role can send notifications


@dataclass
class Scheduler:
    """Serves one database until it is stopped, the database is disabled, or an error occurs."""

    tended: Tended
    pool: Pool
    lease_seconds: float
    watch: RemoteWatch = field(default_factory=RemoteWatch)
    on_settings: Callable[[], None] = lambda: None
    activity: ServerActivity = field(default_factory=ServerActivity)
    rotation: Rotation = field(default_factory=Rotation)
    on_news: Callable[[], None] = lambda: None  # called when it has begun to serve the database, and when it has ended
    # Attached settings as read before the session was opened, which has these or later ones.
    attached: Mapping[str, str] | None = None
    draining: bool = False  # start no new refreshes
    ticked: bool = False  # at least once
    released: bool = False  # paused, with a connection only for occasional checks
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.workers = self.tended.workers
        self.database, self.service_id = self.workers.database, self.workers.service_id
        self.counters = self.tended.counters
        self._busy, self._lock = self.tended.busy, self.tended.lock
        self._seat = Seat(self.workers.budget, "scheduler", self.database)
        self._stop = threading.Event()
        self._waker: Waker | None = None  # while it runs
        self._intervals_outdated = False  # a locked row prevented an update of the intervals
        self._paused = False
        self._hungry = False  # something is due that cannot start before a running refresh ends
        self._graph = DependencyGraph()
        self._owners: dict[int, int] = {}
        self._known: dict[int, datetime] = {}
        self._others: dict[str, str] = {}  # DSNs of the remote databases that stream tables here read
        self._told_looks: dict[str, tuple[float, str | None]] = {}
        self._looked = 0.0
        self._hears = False  # whether the connection receives notifications
        self._has_company = False  # other services serve this database too
        self._steps = Steps(self.database)
        self._maintenance = Maintenance(self.tended, self.watch)
        self._told_settings: Mapping[str, str] = {}
        self._ticks: list[Tick] = []  # newest first
        self._beaten = self._pruned = self._watched = self._audited = 0.0
        self._audit_from = 0
        self._comparisons = Comparisons(self.tended, self.pool, self.rotation, self._forget)
        self._thread = threading.Thread(target=self._run, name=f"pgtrickle-scheduler-{self.database}", daemon=True)

    # -- life cycle ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the current tick. Units that wait for a worker are dropped, running ones continue."""
        self._stop.set()
        self._wake()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            with Waker() as self._waker:
                if self._seat.rests:
                    self.activity.heed(self.database, self._waker.wake)
                self._serve(self._waker)
        except BaseException as error:  # the launcher reports it and starts another scheduler
            self.failure = error
        finally:
            self.activity.heed(self.database, None)
            self._forget([task.unit for task in self.pool.drop(self.tended.name)])
            self.pool.know(self.tended.name, ())
            self._seat.close()
            self.workers.close_idle(0)
            self.on_news()

    def _serve(self, waker: Waker) -> None:
        with self._seat.use() as conn:
            # A session keeps the attached settings it started with: notice changes, including those before this query.
            attached = read_settings(conn).attached if self.attached is None else self.attached
            lease = Lease(conn, self.service_id, "service", self.lease_seconds)
            lease.ensure()
            self._begin(conn)
        listening = limited = 0  # numbers of the connections that listen and have timeouts set
        try:
            while not self._stop.is_set():
                begin = time.monotonic()
                due_in = math.inf
                with self._seat.use() as conn, self._steps.unless_held_up("the tick"):
                    if self._seat.opened != limited:
                        limit_waits(conn, LOCK_TIMEOUT, STATEMENT_TIMEOUT)
                        limited = self._seat.opened
                    settings = read_settings(conn)
                    if settings.attached != attached:
                        log.info("settings were changed with ALTER: reconnecting", extra={"database": self.database})
                        raise ReconnectError
                    if not settings.enabled:
                        return
                    self._paused = settings.paused
                    self.released = self.released and settings.paused
                    if settings.pooler == "transaction":
                        be_pooled(conn)
                    self._hears = settings.listens(conn)
                    listens = self._seat.opened if settings.wakes and self._hears and not self._seat.rests else 0
                    if listens != listening:
                        conn.execute("LISTEN pgtrickle_wake" if listens else "UNLISTEN *")
                        listening = listens
                    due_in = self.tick(conn, settings)
                self.counters.ticks += 1
                self.counters.tick_seconds += time.monotonic() - begin
                self._tell_ticked()
                if settings.paused and self._release(waker):
                    continue
                self._wait(waker, settings, min(begin + self._pause(settings), time.monotonic() + due_in))
                self._stop.wait(begin + PAUSE_SECONDS - time.monotonic())
        finally:
            if not self._busy and not self._seat.broken:
                with self._seat.use() as conn:
                    lease.conn = conn
                    lease.end()

    def _tell_ticked(self) -> None:
        if not self.ticked:
            self.ticked = True
            self.on_news()

    def _release(self, waker: Waker) -> bool:
        """Close all connections for a while if nothing runs: a paused database may be about to be copied or renamed."""
        with self._lock:
            if self._busy:
                return False
        self.watch.leave(self.tended.name)
        self.workers.close_idle(0)
        self._seat.give_up()
        if not self.released:
            self.released = True
            self.on_news()
        while not self._stop.is_set():
            waker.sleep(None, min(PAUSED_SECONDS, self.lease_seconds / 3))
            try:
                with self._seat.use():
                    return True
            except psycopg.OperationalError:
                # Perhaps the database is being copied or renamed, which makes new connections wait.
                self._seat.give_up()
        return True

    def _pace(self, settings: Settings) -> float:
        """Seconds between two ticks; longer if writes are detected without a connection of its own."""
        if self._seat.rests and self.activity.beats and not self._others:
            return max(settings.interval, self._beat_seconds)
        return settings.interval

    def _pause(self, settings: Settings) -> float:
        """Seconds from one tick to the next.

        Randomized if there are several services: if they ticked in step, the first would get all the work.
        """
        return self._pace(settings) * (random.uniform(0.5, 1.0) if self._has_company else 1.0)

    @property
    def _beat_seconds(self) -> float:
        """Seconds between two heartbeats. If each needs a new connection, as few as the lease allows."""
        return self.lease_seconds / 3 if self._seat.rests else min(BEAT_SECONDS, self.lease_seconds / 3)

    def _begin(self, conn: psycopg.Connection[Any]) -> None:
        """Clean up after the previous scheduler: fail its queued jobs, which were dropped when it ended."""
        conn.execute(
            "UPDATE pgtrickle.pgt_jobs SET status = 'FAILED', finished_at = clock_timestamp(),"
            " error = 'its scheduler ended' WHERE service_id = %s AND status = 'QUEUED'",
            (self.service_id,),
        )
        with self._steps.optional(conn, "resetting a copied database"):
            row = conn.execute("SELECT pgtrickle._reset_copied_database()").fetchone()
            if row is not None and row[0] is not None:
                log.warning("it is a copy of database %s", row[0], extra={"database": self.database})
        self._update_intervals(conn)

    def _update_intervals(self, conn: psycopg.Connection[Any]) -> None:
        self._intervals_outdated = True
        with self._steps.optional(conn, "schedules"):
            row = conn.execute("SELECT pgtrickle._update_intervals()").fetchone()
            self._intervals_outdated = row is not None and row[0]

    def _wait(self, waker: Waker, settings: Settings, deadline: float) -> None:
        """Wait until the deadline, a notification or the end. The lease is renewed meanwhile."""
        while not self._stop.is_set() and (left := deadline - time.monotonic()) > 0:
            if waker.sleep(self._seat.held, min(left, self._beat_seconds)):
                return
            if deadline - time.monotonic() > 0:
                with self._seat.use() as conn, self._steps.unless_held_up("the heartbeat"):
                    self._beat(conn, settings)

    # -- a tick --------------------------------------------------------------------------------------------------------

    def tick(self, conn: psycopg.Connection[Any], settings: Settings) -> float:
        """Submit what is due. Returns the number of seconds until something that already has changes becomes due."""
        due_in = math.inf
        self.tended.settings = settings
        self.on_settings()
        self._maintenance.log_wrong_settings(settings)
        self._beat(conn, settings)
        if not settings.paused and not self.draining:
            self._settle_cron(conn)
            if self._intervals_outdated:
                self._update_intervals(conn)
            found = self._due(conn, settings)
            due = [item for item in found if item.due_in == 0]
            due_in = min((item.due_in for item in found if item.due_in > 0), default=due_in)
            due += self._altered(conn, {item.pgt_id for item in due})
            if not self._known or any(self._known.get(item.pgt_id) != item.updated_at for item in due):
                self._load_dag(conn, settings)
            with self._lock:
                units = plan_units(due, self._graph, self._busy, tiered=settings.tiered)
                self._hungry = not {item.pgt_id for item in due} <= {id_ for unit in units for id_ in unit.ids}
            self._dispatch(conn, units, settings)
            self._comparisons.submit_requested(conn, settings)
        self._look_after(conn, settings)
        return due_in

    def _due(self, conn: psycopg.Connection[Any], settings: Settings) -> list[Due]:
        parameters: dict[str, Any] = {
            "service": self.service_id,
            "ahead": timedelta(seconds=self._pace(settings)),
            "small_rows": SMALL_ROWS,
        }
        parameters |= self._look_elsewhere(conn, settings)
        with conn.cursor(row_factory=class_row(Due)) as cursor:
            return cursor.execute(load_query("tick"), parameters).fetchall()

    def _look_elsewhere(self, conn: psycopg.Connection[Any], settings: Settings) -> dict[str, list[Any]]:
        """The pending changes last seen in the remote databases, as parameters of the tick query."""
        looks = self.watch.looks(self.tended.name, self._others, settings.interval, self._wake)
        active = [(name, *change) for name, look in looks.items() for change in look.active]
        seen: dict[str, list[Any]] = {
            "databases": [name for name, _, _, _ in active],
            "names": [source for _, source, _, _ in active],
            "xids": [xid for _, _, xid, _ in active],
        }
        polled = {name: (look.at, look.problem) for name, look in looks.items()}
        if polled and (polled != self._told_looks) and time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked, self._told_looks = time.monotonic(), polled
            parameters = {
                "databases": list(polled),
                "times": [at for at, _ in polled.values()],
                "problems": [problem for _, problem in polled.values()],
                "active": seen["databases"],
                "names": seen["names"],
                "xids": seen["xids"],
                "since": [since for _, _, _, since in active],
            }
            with self._steps.optional(conn, "polling other databases"):
                conn.execute(load_query("looked"), parameters)
        return seen

    def _altered(self, conn: psycopg.Connection[Any], known: set[int]) -> list[Due]:
        """Stream tables whose sources were altered without a change to their rows; checks a few per call."""
        ids = sorted(self._known)
        if not ids or time.monotonic() - self._audited < AUDIT_SECONDS:
            return []
        self._audited = time.monotonic()
        some = list(
            islice(cycle(ids), self._audit_from % len(ids), self._audit_from % len(ids) + min(AUDITED, len(ids)))
        )
        self._audit_from += AUDITED
        rows = conn.execute(load_query("audit"), {"ids": some}).fetchall()
        return [
            Due(row[0], False, self._known[row[0]], 0.0, True, "hot", owner=self._owners.get(row[0]), proven=False)
            for row in rows
            if row[0] not in known and row[0] not in self._busy
        ]

    def _load_dag(self, conn: psycopg.Connection[Any], settings: Settings) -> None:
        upstream: dict[int, list[int]] = {}
        tables: dict[int, list[str]] = {}
        asked: dict[int, str] = {}
        owners: dict[int, int] = {}
        self._known = {}
        self._update_intervals(conn)  # `calculated` schedules depend on those of their readers
        with conn.cursor(row_factory=dict_row) as cursor:
            for row in cursor.execute(load_query("dag")):
                self._known[row["pgt_id"]] = row["updated_at"]
                upstream.setdefault(row["pgt_id"], [])
                if row["owner"] is not None:  # its table still exists
                    owners[row["pgt_id"]] = row["owner"]
                if row["refresh_group"] is not None:
                    asked[row["pgt_id"]] = row["refresh_group"]
                if row["upstream"] is not None:
                    upstream[row["pgt_id"]].append(row["upstream"])
                elif row["source"] is not None:
                    tables.setdefault(row["pgt_id"], []).append(row["source"])
        self._graph = DependencyGraph.of(upstream, tables, asked, owners)
        self._owners = owners
        self.pool.know(self.tended.name, owners.values())
        self.workers.plans.keep(self._known)
        self._load_others(conn, settings)

    def _load_others(self, conn: psycopg.Connection[Any], settings: Settings) -> None:
        rows = conn.execute(
            "SELECT DISTINCT w.name, w.dsn FROM pgtrickle.pgt_databases w"
            " JOIN pgtrickle.pgt_foreign_tables f ON f.database = w.name"
            " JOIN pgtrickle.pgt_dependencies d ON d.source_relid = f.relid"
        ).fetchall()
        self._others = {name: dsn_from(conn, name, dsn) for name, dsn in rows}
        if settings.brokered and self.workers.broker is not None:
            for name, dsn in self._others.items():
                if not is_node(name):
                    self.workers.broker.serve(name, dsn, settings.interval)

    def _settle_cron(self, conn: psycopg.Connection[Any]) -> None:
        """Set the next due time of stream tables on a cron schedule, which every refresh resets."""
        rows = conn.execute(
            "SELECT pgt_id, schedule, session_settings ->> 'TimeZone' FROM pgtrickle.pgt_stream_tables"
            " WHERE every IS NULL AND next_due = 'infinity' AND (status <> 'SUSPENDED' OR status_reason IS NULL)"
            " FOR NO KEY UPDATE SKIP LOCKED"  # waiting for many locked rows one by one would take too long
        ).fetchall()
        for pgt_id, schedule, timezone in rows:
            with self._steps.optional(conn, "cron schedules"):
                try:
                    due = next_time(schedule, timezone or "UTC", datetime.now(UTC))
                except ScheduleError as error:
                    self._suspend(conn, pgt_id, str(error))
                else:
                    conn.execute(
                        "UPDATE pgtrickle.pgt_stream_tables SET next_due = %s WHERE pgt_id = %s", (due, pgt_id)
                    )

    def _suspend(self, conn: psycopg.Connection[Any], pgt_id: int, reason: str) -> None:
        """Suspend a stream table that cannot be scheduled. The others are not affected."""
        log.warning("suspended: %s", reason, extra={"database": self.database, "pgt_id": pgt_id})
        conn.execute(
            "UPDATE pgtrickle.pgt_stream_tables SET status = 'SUSPENDED', status_reason = %s, alerted = 'SUSPENDED'"
            " WHERE pgt_id = %s",
            (reason, pgt_id),
        )
        remedy = "SELECT pgtrickle.alter_stream_table(name, schedule => …, status => 'ACTIVE')"
        details = Jsonb({"reason": reason, "remedy": remedy})
        conn.execute("SELECT pgtrickle._emit_event('auto_suspended', %s, %s)", (pgt_id, details))

    def _dispatch(self, conn: psycopg.Connection[Any], units: Sequence[Unit], settings: Settings) -> None:
        for unit in units:
            row = conn.execute(
                "INSERT INTO pgtrickle.pgt_jobs (service_id, kind, pgt_ids) VALUES (%s, %s, %s) RETURNING job_id",
                (self.service_id, unit.kind, list(unit.ids)),
            ).fetchone()
            assert row is not None
            with self._lock:
                self._busy.update(unit.ids)
            self.pool.submit(
                Task(self.tended.name, unit, settings.share, self._work(row[0], unit, settings), self.tended.limit)
            )

    def _work(self, job: int, unit: Unit, settings: Settings) -> Callable[[int], None]:
        def work(number: int) -> None:
            try:
                begin = time.monotonic()
                outcome = self.workers.run(job, unit, settings, self._hears, number)
                self.counters.refreshes += len(outcome.results)
                self.counters.failures += len(outcome.failures)
                self.counters.refresh_seconds += time.monotonic() - begin
                self.counters.rows += sum(result.rows_inserted + result.rows_deleted for result in outcome.results)
            except Exception as error:
                # The engine has recorded what it could. What is due remains due.
                log.warning(
                    "a worker failed",
                    extra={"database": self.database, "error": str(error).strip()},
                    exc_info=not is_explained(error, self.workers.budget, self.database),
                )
                self.counters.failures += len(unit.ids)
                self.tended.lost.append((job, error))
            finally:
                self._forget([unit])

        return work

    def _forget(self, units: Sequence[Unit]) -> None:
        if any(unit.kind == "VERIFY" and not unit.asked for unit in units):
            self.rotation.end(self.tended.settings.verify_percent if self.tended.settings is not None else 1)
        with self._lock:
            for unit in units:
                self._busy.difference_update(unit.ids)
            awaited = self._hungry or (self._paused and not self._busy)
        if awaited:
            self._wake()

    def _wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()

    # -- maintenance ---------------------------------------------------------------------------------------------------

    def _beat(self, conn: psycopg.Connection[Any], settings: Settings) -> None:
        unchanged = settings.values == self._told_settings
        if unchanged and time.monotonic() - self._beaten < self._beat_seconds:
            return
        parameters = {
            "service": self.service_id,
            "lease": timedelta(seconds=self.lease_seconds),
            "pool_size": self.pool.size,
            "pool_active": self.pool.active,
            "plans_found": self.workers.plans.found,
            "plans_made": self.workers.plans.made,
            "settings": Jsonb(dict(settings.values)),
            "ticks": [tick.at for tick in self._ticks],
            "snapshots": [tick.snapshot for tick in self._ticks],
        }
        row = conn.execute(load_query("beat"), parameters).fetchone()
        if row is None:
            Lease(conn, self.service_id, "service", self.lease_seconds).ensure()
        else:
            *tick, self._has_company = row
            self._ticks = thinned([Tick(*tick), *self._ticks])
        self._beaten, self._told_settings = time.monotonic(), settings.values

    def _look_after(self, conn: psycopg.Connection[Any], settings: Settings) -> None:
        now = time.monotonic()
        self._maintenance.record_lost_jobs(conn)
        if now - self._watched >= ALERT_SECONDS:
            self._watched = now
            self.workers.close_idle()
            with self._steps.optional(conn, "alerts"):
                self._maintenance.send_alerts(conn, settings)
            self._update_intervals(conn)
            with self._steps.optional(conn, "stream tables that were dropped"):
                conn.execute("SELECT pgtrickle._forget_dropped()")
            with self._steps.optional(conn, "tables without readers"):
                conn.execute("SELECT pgtrickle._untrack_unused()")  # left by roles that may not lock the table
            if not settings.paused:
                self._load_others(conn, settings)
                self._maintenance.update_sets(conn)
                if not self.draining:
                    self._comparisons.submit_next(conn, settings)
        if now - self._pruned >= PRUNE_SECONDS:
            self._pruned = now
            with self._steps.optional(conn, "history"):
                conn.execute(load_query("prune"), {"days": settings.history_days})
            if not settings.paused:
                self._maintenance.update_consumers(conn)


class ReconnectError(Exception):
    """The attached settings that the session started with have changed."""
