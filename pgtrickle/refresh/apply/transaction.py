"""The apply: one transaction that changes the rows, moves the frontier and writes the history, or does nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.types.array import ListBinaryDumper
from psycopg.types.json import Jsonb

from pgtrickle.catalog.analysis import load_query
from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.compile.apply import (
    Target,
    additive_statement,
    incoming,
    new_row_ids_statement,
    replace_statement,
    resync_statement,
    rows_statement,
)
from pgtrickle.compile.citus_apply import citus_key, citus_statements, stage_ddl
from pgtrickle.compile.sql_text import ident
from pgtrickle.errors import (
    DatabaseFailedError,
    FuseBlownError,
    KeyLostError,
    PgtrickleError,
    RefreshConflictError,
    SourceLockedError,
)
from pgtrickle.ivm.additive import AdditiveForm
from pgtrickle.ivm.program import Program
from pgtrickle.postgres import fence
from pgtrickle.postgres.transactions import NO_JIT, set_local
from pgtrickle.query.plan import Project
from pgtrickle.refresh.apply.load import Delta, Staged, load
from pgtrickle.refresh.failures import LONGEST_MESSAGE, Policy, answers_requests, is_retried, kind_of, pause_after
from pgtrickle.refresh.planning.jobs import full_query
from pgtrickle.refresh.results import RefreshResult
from pgtrickle.refresh.work import Work
from pgtrickle.sites.citus.cluster import PREPARED

if TYPE_CHECKING:
    from pgtrickle.refresh.work import OnStep

STATEMENT_TIMEOUT = "30min"
ROW_LOCK_TIMEOUT = "10s"
RECOVERY_LOOKS = 10  # a tenth of a second apart
LARGE_ROWS = 100_000  # from this size on, a stream table over distributed tables is distributed too


class Diverged(PgtrickleError):
    """The stored rows do not match the frontier, so the stream table has to be re-initialized."""


def apply_delta(
    conn: psycopg.Connection[Any],
    work: Work,
    delta: Delta | None,
    initiated_by: str,
    on_step: OnStep,
    policy: Policy,
) -> RefreshResult:
    """Apply a delta, or an empty one if it is None, and record the refresh."""
    started = time.monotonic()
    row = work.row
    settings = row.query_settings | {"extra_float_digits": "1", "search_path": "pg_catalog, pg_temp"}
    settings |= NO_JIT | {"statement_timeout": STATEMENT_TIMEOUT}
    # Rows and frontier are in one transaction: if the server crashes before it is on disk, both are lost, and the next
    # refresh applies the changes again. The purge of these changes comes later in the same WAL.
    # If other nodes commit too, the commit must be synchronous: what they have committed must not be lost here.
    settings |= {"synchronous_commit": "on" if _is_citus_table(row) else "off", "work_mem": f"{work.merge_mb}MB"}
    settings |= {"idle_in_transaction_session_timeout": policy.idle_in_apply}
    if row.st_placement != "local" and not row.on_nodes:
        require_recovered(conn, row)  # otherwise the cut has checked this
    work.apply_settings = settings
    outside = fence.limits(conn)  # settings of a group's transaction, if this is part of one
    with _node_errors(conn, row), conn.transaction():
        set_local(conn, settings)
        _take(conn, row, work.token)
        on_step("load")
        if row.st_placement == "auto":
            place_on_nodes(conn, work, delta)
        inserted, deleted = _write(conn, work, delta)
        if _is_citus_table(work.row):
            _commit_in_two_phases(conn, work)
        if isinstance(delta, Staged):
            delta.drop(conn)
        work.phases.apply = time.monotonic() - started
        result = _record(conn, work, inserted, deleted, initiated_by, policy)
        if not row.own:
            fence.leave(conn, outside, ddl=work.row.st_placement != row.st_placement)
        on_step("commit")
    on_step("committed")
    return result


def record_no_data(conn: psycopg.Connection[Any], work: Work, initiated_by: str, policy: Policy) -> RefreshResult:
    """Move the frontier and record a refresh that had nothing to apply."""
    with conn.transaction():
        _take(conn, work.row, work.token)
        return _record(conn, work, 0, 0, initiated_by, policy, action="NO_DATA")


def _take(conn: psycopg.Connection[Any], row: StreamTableRow, token: int) -> None:
    """Lock the catalog row, check the fencing token, and let this transaction pass the stream table's guard trigger."""
    former = conn.execute("SELECT pg_catalog.current_setting('lock_timeout')").fetchone()
    assert former is not None
    set_local(conn, {"lock_timeout": ROW_LOCK_TIMEOUT})  # the owner can hold a lock on the row
    taken = conn.execute(
        "UPDATE pgtrickle.pgt_stream_tables SET apply_xid = pg_current_xact_id()"
        " WHERE pgt_id = %s AND fencing_token = %s",
        (row.pgt_id, token),
    ).rowcount
    set_local(conn, {"lock_timeout": former[0]})
    if taken != 1:
        raise RefreshConflictError(
            f"another process took over the refresh of {row.label}", "Nothing was written. Refresh again if needed."
        )


def _write(conn: psycopg.Connection[Any], work: Work, delta: Delta | None) -> tuple[int, int]:
    row, compiled, decision = work.row, work.compiled, work.decision
    assert compiled is not None
    assert decision is not None
    program = compiled.program
    table = f"{ident(row.pgt_schema)}.{ident(row.pgt_name)}"
    key = tuple(row.key_columns) if row.key_columns is not None else None
    stage = f"pg_temp.pgt_z_{row.pgt_id}" if _is_citus_table(row) else None
    state = f"pgtrickle_views.{ident(f'state_{row.pgt_id}')}"
    loaded = load(conn, delta, None if row.own else row.owner)
    if program is not None and program.additive is not None:
        target = _target(conn, work, Target(table, program.output, key, _null_keys(program, key, delta), stage=stage))
        if decision.action == "DIFFERENTIAL":
            if not row.own:
                conn.execute("SELECT pgtrickle._grant_state(%s)", (row.pgt_id,))
            statement = additive_statement(target, program.additive, program.finish, state, loaded.relation)
            counts = _run(conn, work, statement, loaded.arrays)
        else:
            state_columns = [*program.additive.key_columns, *program.additive.state_columns]
            conn.execute(
                "SELECT pgtrickle._make_state(%s, %s, %s, %s, %s)",
                (
                    row.pgt_id,
                    [name for name, _ in state_columns],
                    [type_.name for _, type_ in state_columns],
                    [type_.collation or None for _, type_ in state_columns],
                    len(program.additive.keys),
                ),
            )
            if delta is not None or not program.additive.keys:  # without keys there is a group even for no rows
                _run(conn, work, _load_state(program.additive, state, loaded.relation), loaded.arrays)
            anything = replace(target, null_keys=True)
            counts = _run(conn, work, resync_statement(anything, program.additive, program.finish, state), [])
            counts.append(0)
        if program.additive.keys and counts[3]:
            _run(
                conn, work, f"WITH d AS (DELETE FROM {state} WHERE n = 0 RETURNING 1) SELECT ARRAY[count(*)] FROM d", []
            )
    elif decision.action != "DIFFERENTIAL" and row.placement == "spark" and program is not None and program.finish:
        if delta is None:  # the result is empty: all stored rows have to be deleted
            delta = pa.table({name: pa.array([], pa.string()) for name in ("w", *(c.id for c in program.core.columns))})
            loaded = load(conn, delta, None)
        target = _target(conn, work, Target(table, program.output, key, stage=stage))
        statement = replace_statement(target, program.core.columns, program.finish, loaded.relation)
        counts = _run(conn, work, statement, loaded.arrays)
    elif delta is None:
        return 0, 0
    elif decision.action == "DIFFERENTIAL":
        assert program is not None
        target = _target(conn, work, Target(table, program.output, key, _null_keys(program, key, delta), stage=stage))
        statement = rows_statement(target, program.core.columns, program.finish, loaded.relation)
        counts = _run(conn, work, statement, loaded.arrays)
    else:
        columns = full_query(compiled, row.placement)[1]
        target = _target(conn, work, Target(table, columns, key, empty=work.into_empty, stage=stage))
        counts = _run(conn, work, rows_statement(target, columns, (), loaded.relation), loaded.arrays)
    if target.stage is not None and not target.empty:
        counts = _move_from_stage(conn, work, target)
    if counts[2] != 0:
        raise Diverged(
            f"{row.label} does not hold the rows it should ({counts[2]} to delete were not found)",
            "It was changed by hand or restored; it is rebuilt from its query.",
        )
    return counts[0], counts[1]


def _is_citus_table(row: StreamTableRow) -> bool:
    """Whether the stream table is a reference or distributed table of Citus."""
    return row.st_placement in {"reference", "distributed"}


@contextmanager
def _node_errors(conn: psycopg.Connection[Any], row: StreamTableRow) -> Iterator[None]:
    """Turn errors of other nodes, while a table placed there is changed, into DatabaseFailedError, which is retried."""
    try:
        yield
    except (psycopg.errors.InternalError_, psycopg.OperationalError) as error:
        if row.st_placement == "local" or conn.broken or conn.closed:
            raise
        raise DatabaseFailedError(
            f"{row.label} could not be changed on all nodes: {error.diag.message_primary}",
            "Nothing was changed. A service tries again by itself; pgtrickle.citus_status tells of nodes.",
        ) from error


def require_recovered(conn: psycopg.Connection[Any], row: StreamTableRow) -> None:
    """Raise SourceLockedError while a crash has left transactions prepared, or a node cannot be reached.

    A crash may have left part of an earlier apply prepared but not committed. Its rows become visible when Citus
    commits it.
    """
    left: set[str] | None = None
    for _ in range(RECOVERY_LOOKS):
        rows = conn.execute("SELECT success, result FROM run_command_on_workers(%s)", (PREPARED,)).fetchall()
        if not all(success for success, _ in rows):
            break
        here = conn.execute(PREPARED).fetchone()
        assert here is not None
        found = {gid for gids in (here[0], *(result for _, result in rows)) for gid in gids.split()}
        left = found if left is None else left & found
        if not left:
            return
        time.sleep(0.1)  # transactions that are committing just now end soon
    raise SourceLockedError(
        f"a node cannot be reached, or transactions that a crash left are not recovered: {row.label} waits for them",
        "A service tries again by itself; Citus recovers them every citus.recover_2pc_interval.",
    )


def place_on_nodes(conn: psycopg.Connection[Any], work: Work, delta: Delta | None) -> None:
    """Have Citus place a stream table that is filled for the first time; small ones become reference tables."""
    rows = delta.num_rows if isinstance(delta, pa.Table) else LARGE_ROWS if delta is not None else 0
    placement = "reference" if rows < LARGE_ROWS else "distributed"
    statement = f"SELECT pgtrickle._place({work.row.pgt_id:d}, '{placement}', NULL)"
    run_as_owner(conn, work.row, statement, work.apply_settings)
    work.row = replace(work.row, st_placement=placement)


def _target(conn: psycopg.Connection[Any], work: Work, target: Target) -> Target:
    """Prepare the target of an apply.

    An ordinary table gets new row ids if it still has former ones. For a table that Citus placed, the target gets the
    key for such tables, and a temporary table that holds the delta's rows.
    """
    if target.stage is None:
        if target.has_row_id and work.row.has_former_row_ids:
            _run(conn, work, new_row_ids_statement(target), [])
            conn.execute(
                "UPDATE pgtrickle.pgt_stream_tables SET has_former_row_ids = false WHERE pgt_id = %s",
                (work.row.pgt_id,),
            )
        return target
    placed = replace(
        target,
        key=citus_key(target.columns, target.key, work.row.output_distribution_column),
        former_row_ids=work.row.has_former_row_ids,
    )
    conn.execute(stage_ddl(target.stage, placed).encode())
    if not work.row.own and work.row.owner is not None:
        stage, owner = sql.SQL(target.stage), sql.Identifier(work.row.owner)
        conn.execute(sql.SQL("GRANT SELECT, INSERT ON {} TO {}").format(stage, owner))
    return placed


def _move_from_stage(conn: psycopg.Connection[Any], work: Work, target: Target) -> list[int]:
    counts = [0, 0, 0]
    for statement in citus_statements(target, work.row.output_distribution_column):
        counts = [sum(pair) for pair in zip(counts, _run(conn, work, statement, []), strict=True)]
    return counts


def _commit_in_two_phases(conn: psycopg.Connection[Any], work: Work) -> None:
    """Write to a table that Citus manages, so that all nodes prepare before any of them commits."""
    conn.execute(
        "INSERT INTO pgtrickle_changes.pgt_applies AS a (pgt_id, fencing_token) VALUES (%s, %s)"
        " ON CONFLICT (pgt_id) DO UPDATE SET fencing_token = excluded.fencing_token",
        (work.row.pgt_id, work.token),
    )


def _null_keys(program: Program, key: tuple[str, ...] | None, delta: Delta | None) -> bool:
    """Whether some key in the delta is NULL. The finish steps do not change keys."""
    if not isinstance(delta, pa.Table):
        return delta is not None
    if program.additive is not None:
        return any(delta.column(f"k{i}").null_count > 0 for i in range(len(program.additive.keys)))
    if key is None:
        return False
    ids = {column.id for column in program.output if column.name in key}
    for step in reversed(program.finish):
        if isinstance(step, Project):
            ids = {value.name for column, value in step.items if column.id in ids}
    return any(delta.column(name).null_count > 0 for name in ids)


def _load_state(additive: AdditiveForm, state: str, relation: str | None) -> str:
    columns = [*additive.key_columns, *additive.state_columns]
    names = ", ".join(name for name, _ in columns)
    keys = ", ".join(name for name, _ in columns[: len(additive.keys)])
    totals = ", ".join(
        [name for name, _ in columns[: len(additive.keys)]]
        + [f"coalesce(sum({name}), 0)::{type_.name}" for name, type_ in additive.state_columns]
    )
    group = f" GROUP BY {keys}" if keys else ""
    return (
        f"WITH i AS (INSERT INTO {state} ({names}, known) SELECT {totals}, true"
        f" FROM ({incoming(columns, relation)}) AS d{group} RETURNING 1) SELECT ARRAY[count(*)] FROM i"
    )


def _run(conn: psycopg.Connection[Any], work: Work, statement: str, arrays: list[str]) -> list[int]:
    """Run a statement with the rights of the stream table's owner, and return the counts that it returns."""
    # In binary format: for text, psycopg would quote the quoted arrays again, which takes longer than the statement.
    row = work.row
    if row.own:
        with psycopg.RawCursor(conn) as cursor:
            cursor.adapters.register_dumper(list, ListBinaryDumper)
            answer = cursor.execute(statement.encode(), [arrays] if "$1" in statement else None).fetchone()
        assert answer is not None
        return [int(value) for value in answer[0]]
    counts = fence.write_as_owner(conn, row.pgt_id, statement, arrays, work.apply_settings)
    assert counts is not None
    return counts


def run_as_owner(
    conn: psycopg.Connection[Any], row: StreamTableRow, statement: str, settings: Mapping[str, str] | None = None
) -> None:
    """Run a command that returns nothing, with the rights of the stream table's owner."""
    if row.own:
        conn.execute(statement.encode())
    else:
        command_as_owner(conn, row.pgt_id, statement, settings or {})


def command_as_owner(conn: psycopg.Connection[Any], pgt_id: int, statement: str, settings: Mapping[str, str]) -> None:
    with conn.transaction():
        fence.write_as_owner(conn, pgt_id, statement, None, settings)
        fence.leave(conn, settings, ddl=True)


def _record(
    conn: psycopg.Connection[Any],
    work: Work,
    inserted: int,
    deleted: int,
    initiated_by: str,
    policy: Policy,
    action: str | None = None,
) -> RefreshResult:
    """Store the frontier, the status and the history record, in the transaction of the apply."""
    decision, frontier = work.decision, work.frontier
    assert decision is not None
    assert frontier is not None
    action = action or decision.action
    reason = decision.reason or (decision.mode_reason if action == "FULL" else None)
    parameters = {
        "id": work.row.pgt_id,
        "schema": work.row.pgt_schema,
        "name": work.row.pgt_name,
        "frontier": Jsonb(frontier.to_json()),
        "snapshot": str(frontier.snapshot),
        "polled": decision.polled,
        "by_cost": decision.by_cost,
        "changes": work.changes,
        "cost": sum(work.phases.seconds().values()),
        "time": work.cut_time,
        "mode": decision.mode,
        "mode_reason": decision.mode_reason,
        "action": action,
        "reason": reason,
        "rows_in": work.rows_in,
        "inserted": inserted,
        "changed": inserted + deleted > 0,
        "deleted": deleted,
        "phases": Jsonb(work.phases.seconds()),
        "by": initiated_by,
        "seconds": time.monotonic() - work.started,
        "sources": [source.relid for source in work.sources],
        "signatures": [source.signature for source in work.sources],
    }
    if any(source.signature != source.known_signature for source in work.sources):
        conn.execute(
            "UPDATE pgtrickle.pgt_dependencies d SET capture_signature = s.signature"
            " FROM unnest(%(sources)s::oid[], %(signatures)s::text[]) AS s(relid, signature)"
            " WHERE d.pgt_id = %(id)s AND d.source_relid = s.relid"
            " AND d.capture_signature IS DISTINCT FROM s.signature",
            parameters,
        )
    row = conn.execute(load_query("record"), parameters).fetchone()
    assert row is not None
    return RefreshResult(
        work.row.pgt_id,
        work.row.label,
        action,
        reason,
        work.rows_in,
        inserted,
        deleted,
        work.phases.seconds(),
        row[0],
    )


def record_failure(
    conn: psycopg.Connection[Any], work: Work, cause: BaseException | None, initiated_by: str, policy: Policy
) -> None:
    """Release the claim and record the failure. An interruption is recorded, but does not count as an error."""
    row, error = work.row, work.error or cause
    failed = isinstance(error, Exception)
    kind = kind_of(error) if isinstance(error, Exception) else None
    parameters = {
        "id": row.pgt_id,
        "schema": row.pgt_schema,
        "name": row.pgt_name,
        "token": work.token,
        "failed": failed,
        "kind": kind,
        "counts": kind is not None and not is_retried(kind),
        "answers": kind is not None and answers_requests(kind),
        "most": policy.most_errors if policy.most_errors is not None else 2**31 - 1,
        "told": str(error)[:LONGEST_MESSAGE] if failed else "interrupted",
        "sqlstate": error.sqlstate if isinstance(error, psycopg.Error) else None,
        "pause": pause_after(row.consecutive_errors + 1, kind) if kind is not None else 0.0,
        "seconds": time.monotonic() - work.started,
        "by": initiated_by,
        "blown": isinstance(error, FuseBlownError),
        "lost_key": error.message if isinstance(error, KeyLostError) else None,
    }
    with conn.transaction():
        set_local(conn, {"lock_timeout": ROW_LOCK_TIMEOUT})
        conn.execute(load_query("failed"), parameters)
