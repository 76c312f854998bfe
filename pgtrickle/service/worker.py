"""The work of a worker on a unit: refresh it and report the outcome."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from pgtrickle.catalog.query_files import load_query
from pgtrickle.postgres.connection import be_pooled
from pgtrickle.refresh.claim.lease import BorrowedLease
from pgtrickle.refresh.engine import Engine
from pgtrickle.refresh.failures import LONGEST_MESSAGE, is_retried, kind_of
from pgtrickle.refresh.fetch.helper_process import HelperProcesses
from pgtrickle.refresh.planning.programs import Plans
from pgtrickle.refresh.results import Outcome
from pgtrickle.refresh.verify import Verification, answer_requests
from pgtrickle.service.broker.broker import Broker
from pgtrickle.service.connection_budget import Budget
from pgtrickle.service.scheduling.units import Unit
from pgtrickle.service.settings import Settings
from pgtrickle.sites.remote.connections import Connections

log = logging.getLogger("pgtrickle.worker")
IDLE_SECONDS = 60.0


@dataclass
class Workers:
    """The engines and connections that refresh the stream tables of one database; kept while there is work."""

    budget: Budget
    database: str
    service_id: uuid.UUID
    plans: Plans = field(default_factory=Plans)
    connections: Connections = field(default_factory=Connections)  # to remote databases
    helpers: HelperProcesses | None = None
    broker: Broker | None = None
    _idle: list[tuple[float, Engine]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, job: int, unit: Unit, settings: Settings, notifies: bool, number: int) -> Outcome:
        """Refresh the stream tables of a unit."""
        with self.budget.working(), self._engine(f"worker {number}") as engine:
            engine.policy = settings.policy
            engine.remote.brokers = self.broker if settings.brokered else None
            conn = engine.conn
            if settings.pooler == "transaction":
                be_pooled(conn)
            conn.execute(
                "UPDATE pgtrickle.pgt_jobs SET status = 'RUNNING', started_at = clock_timestamp(), worker = %s,"
                " worker_pid = pg_backend_pid() WHERE job_id = %s",
                (f"worker {number}", job),
            )
            wanted = _still_wanted(conn, unit)
            outcome = engine.attempt(list(wanted), "REQUEST" if unit.asked else "SCHEDULE", atomic=unit.kind == "GROUP")
            alerted = {pgt_id for pgt_id, failing in wanted.items() if failing}
            self._tell(conn, job, outcome, alerted, notifies)
            return outcome

    def verify(self, unit: Unit, settings: Settings, number: int) -> Verification:
        """Compare a stream table with its query."""
        with self.budget.working(), self._engine(f"worker {number}") as engine:
            engine.policy = settings.policy
            engine.remote.brokers = None
            if settings.pooler == "transaction":
                be_pooled(engine.conn)
            return answer_requests(engine, unit.ids[0])

    def close_idle(self, seconds: float = IDLE_SECONDS) -> None:
        """Close connections that have been idle for this long."""
        now = time.monotonic()
        with self._lock:
            old = [engine for since, engine in self._idle if now - since >= seconds]
            self._idle = [(since, engine) for since, engine in self._idle if now - since < seconds]
        for engine in old:
            if self.budget.resume(engine.conn):
                self.budget.close(engine.conn)

    @contextmanager
    def _engine(self, name: str) -> Iterator[Engine]:
        engine = self._rested()
        if engine is None:
            conn = self.budget.open(name, self.database)
            lease = BorrowedLease(self.service_id)
            engine = Engine(conn, lease=lease, plans=self.plans, connections=self.connections, helpers=self.helpers)
        try:
            yield engine
        except BaseException:
            self.budget.close(engine.conn)  # its state is unknown
            raise
        self.budget.rest(engine.conn)
        with self._lock:
            self._idle.append((time.monotonic(), engine))

    def _rested(self) -> Engine | None:
        """An idle engine whose connection is still open; None if there is none."""
        while True:
            with self._lock:
                engine = self._idle.pop()[1] if self._idle else None
            if engine is None or self.budget.resume(engine.conn):
                return engine

    def _tell(
        self, conn: psycopg.Connection[Any], job: int, outcome: Outcome, alerted: set[int], notifies: bool
    ) -> None:
        error = next(iter(outcome.failures.values()), None)
        conn.execute(
            "UPDATE pgtrickle.pgt_jobs SET status = %s, finished_at = clock_timestamp(), error = %s WHERE job_id = %s",
            (
                "FAILED" if error is not None else "SUCCEEDED",
                str(error)[:LONGEST_MESSAGE] if error is not None else None,
                job,
            ),
        )
        for pgt_id, failure in outcome.failures.items():
            log.warning(
                "refresh failed",
                extra={"database": self.database, "pgt_id": pgt_id, "error": str(failure)[:LONGEST_MESSAGE]},
            )
            _tell_failure(conn, pgt_id, failure)
        for pgt_id in alerted & {result.pgt_id for result in outcome.results}:
            conn.execute("SELECT pgtrickle._emit_event('refresh_recovered', %s, NULL)", (pgt_id,))
        refreshed = [result.refresh_id for result in outcome.results if result.refresh_id]
        if notifies and refreshed:
            conn.execute(
                "SELECT pg_notify('pg_trickle_refresh', left(pgtrickle._refresh_payload(h)::text, 7900))"
                " FROM pgtrickle.pgt_visible_history h JOIN pgtrickle.pgt_stream_tables s USING (pgt_id)"
                " WHERE h.refresh_id = ANY (%s) AND NOT s.pooler_compatibility_mode",
                (refreshed,),
            )


def _still_wanted(conn: psycopg.Connection[Any], unit: Unit) -> dict[int, bool]:
    """The stream tables of the unit that are still to be refreshed, mapped to whether their last event was a failure.

    Stream tables that were suspended, frozen or dropped while the unit waited are left out, unless a request for them
    is pending.
    """
    rows = conn.execute(
        "SELECT pgt_id, alerted IS NOT NULL AND status <> 'SUSPENDED' FROM pgtrickle.pgt_stream_tables s"
        " WHERE pgt_id = ANY (%s)"
        " AND (status IN ('ACTIVE', 'INITIALIZING') AND tier IS DISTINCT FROM 'frozen'"
        " OR EXISTS (SELECT FROM pgtrickle.pgt_requests r WHERE r.pgt_id = s.pgt_id AND r.status = 'PENDING'"
        " AND r.kind = 'REFRESH'))",
        (list(unit.ids),),
    ).fetchall()
    return dict(rows)


def _tell_failure(conn: psycopg.Connection[Any], pgt_id: int, failure: Exception) -> None:
    """Emit an event for a failure, unless the last event of this stream table reported the same."""
    kind = kind_of(failure)
    row = conn.execute(load_query("alerted"), {"id": pgt_id, "kind": kind}).fetchone()
    if row is None or not row[0]:
        return
    _, now, reason, remedy = row
    if now == "fuse":
        event, details = "fuse_blown", {"reason": str(failure)[:LONGEST_MESSAGE]}
    elif now == "SUSPENDED":
        event, details = "auto_suspended", {"reason": reason or "", "kind": kind, "remedy": remedy}
    else:
        event = "refresh_failed"
        details = {
            "error": str(failure)[:LONGEST_MESSAGE],
            "kind": kind,
            "transient": str(is_retried(kind)).lower(),
            "remedy": remedy,
        }
    if isinstance(failure, psycopg.Error) and failure.sqlstate is not None:
        details["sqlstate"] = failure.sqlstate
    conn.execute("SELECT pgtrickle._emit_event(%s, %s, %s)", (event, pgt_id, Jsonb(details)))
