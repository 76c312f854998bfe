"""The refresh pipeline: claim → plan → cut → decide → fetch → compute → apply.

All state that must survive is in the catalog. A process that dies between two steps leaves the stream table unchanged;
the next refresh starts from the frontier that is stored with the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg

from pgtrickle.catalog.problems import dropped
from pgtrickle.catalog.stream_table import StreamTableRow, load_rows
from pgtrickle.errors import PgtrickleError, StreamTableNotFoundError
from pgtrickle.postgres.connection import pooled_for_now, trusting_only_catalog
from pgtrickle.refresh.apply.record import Recorder
from pgtrickle.refresh.atomic_group import BeforeCommit, refresh_atomically
from pgtrickle.refresh.claim.claims import Claims
from pgtrickle.refresh.claim.lease import BorrowedLease, Lease
from pgtrickle.refresh.failures import Policy
from pgtrickle.refresh.fetch.helper_process import HelperProcesses
from pgtrickle.refresh.pipeline import Pipeline
from pgtrickle.refresh.planning.planner import Planner
from pgtrickle.refresh.planning.programs import Plans, Programs
from pgtrickle.refresh.progress import OnStep
from pgtrickle.refresh.reading import SnapshotReader
from pgtrickle.refresh.recapture import mark_reinit
from pgtrickle.refresh.results import Outcome, RefreshResult
from pgtrickle.refresh.stages import Claimed
from pgtrickle.sites.citus.cluster import Cluster
from pgtrickle.sites.failures import Failures
from pgtrickle.sites.outside import OutsideSites
from pgtrickle.sites.remote.connections import Connections
from pgtrickle.sites.remote.databases import RemoteDatabases
from pgtrickle.sites.sets import Sets


@dataclass
class Engine:
    """Refreshes the stream tables of one database over one connection."""

    conn: psycopg.Connection[Any]
    on_step: OnStep = lambda name: None
    lease: Lease | BorrowedLease | None = None
    policy: Policy = field(default_factory=Policy)
    plans: Plans = field(default_factory=Plans)  # of this database; several engines may share them
    connections: Connections = field(default_factory=Connections)  # to remote databases; all engines may share them
    helpers: HelperProcesses | None = None  # processes that read many changes; all engines may share them
    statements: list[str] = field(default_factory=list)  # that the last refresh sent to the sources

    def __post_init__(self) -> None:
        self.claims = Claims(self.conn, self.lease or Lease(self.conn))
        self.programs = Programs(self.conn, self.plans)
        self.remote = RemoteDatabases(self.conn, self.connections)
        self.sets = Sets(self.remote)
        self.cluster = Cluster(self.remote)
        self.outside = OutsideSites(self.remote, self.cluster)
        planner = Planner(self.conn, self.programs)
        self.reading = SnapshotReader(self.conn, planner, self.statements, helpers=self.helpers)

    def refresh(
        self, ids: Sequence[int], initiated_by: str = "MANUAL", *, may_be_dropped: bool = False
    ) -> list[RefreshResult]:
        """Refresh the given stream tables, sources before their readers.

        Refreshes as many of them as possible, then raises the errors of the others.
        """
        names = self._names(ids)
        outcome = self.attempt(ids, initiated_by)
        outcome.raise_problems(len(ids))
        results = {result.pgt_id: result for result in outcome.results}
        for id_ in ids:
            if id_ not in results and not may_be_dropped:
                raise dropped(names.get(id_, f"stream table {id_}"))
        return [results[id_] for id_ in ids if id_ in results]

    def attempt(
        self,
        ids: Sequence[int],
        initiated_by: str,
        *,
        atomic: bool = False,
        before_commit: BeforeCommit | None = None,
        on_step: OnStep | None = None,
    ) -> Outcome:
        """Refresh the stream tables that no other process has claimed.

        If one fails, the others are refreshed all the same, including those that read it. With `atomic`, all are
        refreshed in one transaction if that is possible this time, so that readers see all of them before the refresh
        or all after it. Only then is `before_commit` called, in that transaction and its snapshot.
        """
        self.statements.clear()
        recorder = Recorder(initiated_by, self.policy)
        pipeline = Pipeline(self.conn, self.claims, self.reading, self.outside, recorder, on_step or self.on_step)
        with self.claims.lease.kept(), trusting_only_catalog(self.conn), pooled_for_now(self.conn):
            levels = self._levels(ids)
            if atomic and (len(ids) > 1 or before_commit is not None):
                result = refresh_atomically(pipeline, levels, before_commit)
                if result is not None:
                    self._name_failures(result)
                    return replace(result, atomic=True)
            outcome = Outcome()
            for level in levels:
                try:
                    pipeline.refresh_level(level, outcome)
                except (psycopg.Error, PgtrickleError) as error:
                    if self.conn.broken or self.conn.closed:
                        raise
                    done = {result.pgt_id for result in outcome.results}
                    outcome.failures |= {id_: error for id_ in level if id_ not in done}
            self._name_failures(outcome)
            return outcome

    def _name_failures(self, outcome: Outcome) -> None:
        """Add the names of stream tables that failed, and replace the errors of those that were dropped meanwhile."""
        if not outcome.failures:
            return
        found = self._names(list(outcome.failures))
        outcome.names |= found
        for id_ in outcome.failures.keys() - found.keys():
            outcome.failures[id_] = dropped(outcome.names.get(id_, f"stream table {id_}"))

    def _names(self, ids: Sequence[int]) -> dict[int, str]:
        """The names of stream tables, quoted as in SQL, by id."""
        query = "SELECT pgt_id, format('%%I.%%I', pgt_schema, pgt_name) FROM pgtrickle.pgt_stream_tables"
        return dict(self.conn.execute(f"{query} WHERE pgt_id = ANY (%s)", (list(ids),)).fetchall())

    def subscribe(self, pgt_id: int) -> None:
        """Start capture of the changes that a stream table reads in remote databases."""
        table = Claimed(self.row(pgt_id), 0)
        failed = Failures()
        self.remote.subscribe(table, {source.relid for source in self.remote.sources([table.row])}, failed)
        error = failed.of(table)
        if error is not None:
            raise error

    def rows(self, ids: Sequence[int] | None = None) -> list[StreamTableRow]:
        """The catalog rows of the given stream tables, or of all."""
        with trusting_only_catalog(self.conn):
            return load_rows(self.conn, ids)

    def row(self, pgt_id: int, name: str | None = None) -> StreamTableRow:
        """The catalog row of one stream table; `name` is for the error if it was dropped meanwhile."""
        rows = self.rows([pgt_id])
        if not rows:
            raise StreamTableNotFoundError(f"{name or f'stream table {pgt_id}'} was dropped by another transaction")
        return rows[0]

    def mark_reinit(self, pgt_id: int, reason: str) -> None:
        """Let the next refresh re-initialize a stream table."""
        mark_reinit(self.conn, pgt_id, reason)

    def claim(self, ids: Sequence[int], *, all_or_none: bool) -> tuple[list[Claimed], list[str]]:
        """The stream tables that could be claimed, and the names of the others."""
        with trusting_only_catalog(self.conn):
            return self.claims.claim(ids, all_or_none=all_or_none)

    def _levels(self, ids: Sequence[int]) -> list[list[int]]:
        """The stream tables by level: those of one level do not read each other, and sources come before readers."""
        edges = self.conn.execute(
            "SELECT d.pgt_id, u.pgt_id FROM pgtrickle.pgt_dependencies d"
            " JOIN pgtrickle.pgt_stream_tables u ON u.pgt_relid = coalesce(d.through, d.source_relid)"
            " WHERE d.pgt_id = ANY (%s)",
            (list(ids),),
        ).fetchall()
        depth = dict.fromkeys(ids, 0)
        for _ in ids:
            for reader, source in edges:
                if source in depth:
                    depth[reader] = max(depth[reader], depth[source] + 1)
        return [[id_ for id_ in ids if depth[id_] == level] for level in range(max(depth.values(), default=-1) + 1)]
