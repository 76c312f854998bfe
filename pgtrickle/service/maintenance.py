"""Maintenance by a scheduler: lost jobs, alerts, wrong settings, database sets, consumers in remote databases."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from pgtrickle.catalog.query_files import load_query
from pgtrickle.postgres.connection import limit_waits
from pgtrickle.refresh.failures import LONGEST_MESSAGE, RETRIED, Kind, kind_of
from pgtrickle.service.remote_watch import RemoteWatch
from pgtrickle.service.settings import Settings
from pgtrickle.service.steps import LOCK_TIMEOUT, STATEMENT_TIMEOUT
from pgtrickle.service.tended import Tended
from pgtrickle.sites.citus.cluster import Cluster
from pgtrickle.sites.remote.connections import dsn_from
from pgtrickle.sites.remote.databases import RemoteDatabases
from pgtrickle.sites.sets import Sets

log = logging.getLogger("pgtrickle.scheduler")


@dataclass
class Maintenance:
    """The maintenance of one database."""

    tended: Tended
    watch: RemoteWatch
    _alerted: set[str] = field(default_factory=set)
    _logged_wrong: dict[str, str] = field(default_factory=dict)
    _updating_sets: bool = False

    def record_lost_jobs(self, conn: psycopg.Connection[Any]) -> None:
        """Record jobs whose outcome the worker could not record."""
        if not self.tended.lost:
            return
        lost, self.tended.lost = self.tended.lost, []
        parameters = {
            "jobs": [job for job, _ in lost],
            "errors": [str(error)[:LONGEST_MESSAGE] for _, error in lost],
            "kinds": [kind_of(error) for _, error in lost],
            "longest": RETRIED[Kind.CONNECTION],
        }
        conn.execute(load_query("lost"), parameters)

    def update_sets(self, conn: psycopg.Connection[Any]) -> None:
        """Update the members of database sets and the nodes of the Citus cluster in the background."""
        row = conn.execute("SELECT EXISTS (SELECT FROM pgtrickle.pgt_database_sets)").fetchone()
        if row is not None and row[0] and not self._updating_sets:
            self._updating_sets = True
            self.watch.run(self._update_members)

    def _update_members(self) -> None:
        try:
            with self.tended.workers.budget.using("sets", self.tended.workers.database) as conn:
                limit_waits(conn, LOCK_TIMEOUT, STATEMENT_TIMEOUT)
                remote = RemoteDatabases(conn, self.watch.connections)
                Sets(remote).update_members()
                Cluster(remote).update_nodes()
        finally:
            self._updating_sets = False

    def update_consumers(self, conn: psycopg.Connection[Any]) -> None:
        """Tell remote databases which stream tables still read them; drops in SQL cannot notify them."""
        remote = RemoteDatabases(conn, self.watch.connections)
        for database, dsn in conn.execute("SELECT name, dsn FROM pgtrickle.pgt_databases").fetchall():
            known = dsn_from(conn, database, dsn)
            self.watch.run(partial(remote.connections.keep_only, database, known, remote.kept_by(database)))

    def send_alerts(self, conn: psycopg.Connection[Any], settings: Settings) -> None:
        """Emit an event once when a condition begins that an operator should know about."""
        found = conn.execute(load_query("alerts"), {"rows": settings.buffer_alert}).fetchall()
        for key, event, pgt_id, details in found:
            if key not in self._alerted:
                conn.execute("SELECT pgtrickle._emit_event(%s, %s, %s)", (event, pgt_id, Jsonb(details)))
        self._alerted = {key for key, *_ in found}

    def log_wrong_settings(self, settings: Settings) -> None:
        """Log settings with values that are not allowed, once for each value."""
        for name, meaning in settings.wrong.items():
            if self._logged_wrong.get(name) != meaning:
                log.warning("setting %s cannot be %s", name, meaning, extra={"database": self.tended.workers.database})
        self._logged_wrong = dict(settings.wrong)
