"""The apply: one transaction that changes the rows, moves the frontier and writes the history, or does nothing."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import psycopg

from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.enums import Action, Storage
from pgtrickle.errors import RefreshConflictError
from pgtrickle.postgres import fence
from pgtrickle.postgres.transactions import NO_JIT, ROW_LOCK_TIMEOUT, set_local
from pgtrickle.refresh.apply import citus_tables
from pgtrickle.refresh.apply.load import Staged
from pgtrickle.refresh.apply.record import Recorder
from pgtrickle.refresh.apply.writer import Writer
from pgtrickle.refresh.progress import OnStep
from pgtrickle.refresh.results import Phases, RefreshResult
from pgtrickle.refresh.stages import Computed

APPLY_STATEMENT_TIMEOUT = "30min"


def apply(
    conn: psycopg.Connection[Any], computed: Computed, phases: Phases, recorder: Recorder, on_step: OnStep
) -> RefreshResult:
    """Apply the delta and record the refresh. Without a delta, only the frontier moves."""
    if computed.delta is None and computed.decided.decision.action in {Action.NO_DATA, Action.DIFFERENTIAL}:
        with conn.transaction():
            _take(conn, computed)
            return recorder.record(conn, computed, phases, 0, 0, action=Action.NO_DATA)
    started = time.monotonic()
    row = computed.row
    settings = _settings(computed, recorder)
    if row.st_placement != Storage.LOCAL and not row.on_nodes:
        citus_tables.require_recovered(conn, row)  # otherwise the cut has checked this
    outside = fence.limits(conn)  # settings of a group's transaction, if this is part of one
    errors_of_nodes = citus_tables.errors_of_nodes(conn, row) if row.st_placement != Storage.LOCAL else nullcontext()
    with errors_of_nodes, conn.transaction():
        set_local(conn, settings)
        _take(conn, computed)
        on_step("load")
        placed = row
        if row.st_placement == Storage.AUTO:
            placed = citus_tables.place_on_nodes(conn, row, computed.delta, settings)
        inserted, deleted = Writer(conn, placed, computed, settings).write()
        if placed.is_citus_table:
            citus_tables.commit_in_two_phases(conn, row.pgt_id, _token(computed))
        if isinstance(computed.delta, Staged):
            computed.delta.drop(conn)
        phases.apply = time.monotonic() - started
        result = recorder.record(conn, computed, phases, inserted, deleted)
        if not row.own:
            fence.leave(conn, outside, ddl=placed is not row)
        on_step("commit")
    return result


def _settings(computed: Computed, recorder: Recorder) -> dict[str, str]:
    """The settings under which the stream table is written."""
    row = computed.row
    settings = row.query_settings | {"extra_float_digits": "1", "search_path": "pg_catalog, pg_temp"}
    settings |= NO_JIT | {"statement_timeout": APPLY_STATEMENT_TIMEOUT}
    # Rows and frontier are in one transaction: if the server crashes before it is on disk, both are lost, and the next
    # refresh applies the changes again. The purge of these changes comes later in the same WAL.
    # If other nodes commit too, the commit must be synchronous: what they have committed must not be lost here.
    settings |= {"synchronous_commit": "on" if row.is_citus_table else "off"}
    settings |= {"work_mem": f"{computed.decided.at_cut.merge_mb}MB"}
    return settings | {"idle_in_transaction_session_timeout": recorder.policy.idle_in_apply}


def _token(computed: Computed) -> int:
    return computed.decided.claimed.token


def _take(conn: psycopg.Connection[Any], computed: Computed) -> None:
    """Lock the catalog row, check the fencing token, and let this transaction pass the stream table's guard trigger."""
    row: StreamTableRow = computed.row
    former = conn.execute("SELECT pg_catalog.current_setting('lock_timeout')").fetchone()
    assert former is not None
    set_local(conn, {"lock_timeout": ROW_LOCK_TIMEOUT})  # the owner can hold a lock on the row
    taken = conn.execute(
        "UPDATE pgtrickle.pgt_stream_tables SET apply_xid = pg_current_xact_id()"
        " WHERE pgt_id = %s AND fencing_token = %s",
        (row.pgt_id, _token(computed)),
    ).rowcount
    set_local(conn, {"lock_timeout": former[0]})
    if taken != 1:
        raise RefreshConflictError(
            f"another process took over the refresh of {row.label}", "Nothing was written. Refresh again if needed."
        )
