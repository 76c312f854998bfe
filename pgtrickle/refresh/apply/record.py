"""Recording refreshes: the frontier and the history after an apply, or the failure."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from pgtrickle.catalog.query_files import load_query
from pgtrickle.enums import Action
from pgtrickle.errors import FuseBlownError, KeyLostError
from pgtrickle.postgres.transactions import ROW_LOCK_TIMEOUT, set_local
from pgtrickle.refresh.failures import LONGEST_MESSAGE, Policy, answers_requests, is_retried, kind_of, pause_after
from pgtrickle.refresh.results import Phases, RefreshResult
from pgtrickle.refresh.stages import Claimed, Computed


@dataclass(frozen=True)
class Recorder:
    """Records the refreshes of one call."""

    initiated_by: str
    policy: Policy

    def record(
        self,
        conn: psycopg.Connection[Any],
        computed: Computed,
        phases: Phases,
        inserted: int,
        deleted: int,
        action: Action | None = None,
    ) -> RefreshResult:
        """Store the frontier, the status and the history record, in the transaction of the apply."""
        row, decided, frontier = computed.row, computed.decided, computed.frontier
        decision, rows_in = decided.decision, computed.fetched.rows_in
        action = action or decision.action
        reason = decision.reason or (decision.mode_reason if action is Action.FULL else None)
        parameters = {
            "id": row.pgt_id,
            "schema": row.pgt_schema,
            "name": row.pgt_name,
            "frontier": Jsonb(frontier.to_json()),
            "snapshot": str(frontier.snapshot),
            "polled": decision.polled,
            "by_cost": decision.by_cost,
            "changes": decided.changes,
            "cost": sum(phases.seconds().values()),
            "time": decided.at_cut.time,
            "mode": decision.mode,
            "mode_reason": decision.mode_reason,
            "action": action,
            "reason": reason,
            "rows_in": rows_in,
            "inserted": inserted,
            "changed": inserted + deleted > 0,
            "deleted": deleted,
            "phases": Jsonb(phases.seconds()),
            "by": self.initiated_by,
            "seconds": time.monotonic() - decided.claimed.started,
            "sources": [source.relid for source in decided.sources],
            "signatures": [source.signature for source in decided.sources],
        }
        if any(source.signature != source.known_signature for source in decided.sources):
            conn.execute(
                "UPDATE pgtrickle.pgt_dependencies d SET capture_signature = s.signature"
                " FROM unnest(%(sources)s::oid[], %(signatures)s::text[]) AS s(relid, signature)"
                " WHERE d.pgt_id = %(id)s AND d.source_relid = s.relid"
                " AND d.capture_signature IS DISTINCT FROM s.signature",
                parameters,
            )
        found = conn.execute(load_query("record"), parameters).fetchone()
        assert found is not None
        return RefreshResult(
            row.pgt_id, row.label, action, reason, rows_in, inserted, deleted, phases.seconds(), found[0]
        )

    def record_failure(self, conn: psycopg.Connection[Any], table: Claimed, error: BaseException | None) -> None:
        """Release the claim and record the failure. An interruption is recorded, but does not count as an error."""
        row = table.row
        failed = isinstance(error, Exception)
        kind = kind_of(error) if isinstance(error, Exception) else None
        most = self.policy.most_errors
        parameters = {
            "id": row.pgt_id,
            "schema": row.pgt_schema,
            "name": row.pgt_name,
            "token": table.token,
            "failed": failed,
            "kind": kind,
            "counts": kind is not None and not is_retried(kind),
            "answers": kind is not None and answers_requests(kind),
            "most": most if most is not None else 2**31 - 1,
            "told": str(error)[:LONGEST_MESSAGE] if failed else "interrupted",
            "sqlstate": error.sqlstate if isinstance(error, psycopg.Error) else None,
            "pause": pause_after(row.consecutive_errors + 1, kind) if kind is not None else 0.0,
            "seconds": time.monotonic() - table.started,
            "by": self.initiated_by,
            "blown": isinstance(error, FuseBlownError),
            "lost_key": error.message if isinstance(error, KeyLostError) else None,
        }
        with conn.transaction():
            set_local(conn, {"lock_timeout": ROW_LOCK_TIMEOUT})
            conn.execute(load_query("failed"), parameters)
