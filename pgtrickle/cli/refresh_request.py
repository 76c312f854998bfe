"""Manual refreshes: requested from a running service if there is one, otherwise done in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.rows import dict_row

from pgtrickle.api.database import Database, RefreshResult
from pgtrickle.cli.common import WAIT_SECONDS
from pgtrickle.errors import NotInTimeError, PgtrickleError, PrivilegeError, RefreshError
from pgtrickle.refresh.results import Outcome
from pgtrickle.spark.progress import RefreshProgress, quiet_jvm

# A running service renews its lease every few seconds.
SERVICE_SEEN = (
    "SELECT EXISTS (SELECT FROM pgtrickle.pgt_services WHERE kind = 'service' AND lease_expires > clock_timestamp())"
)


def bring_up_to_date(
    database: Database,
    tables: Mapping[str, int],
    *,
    initiated_by: str = "MANUAL",
    local: bool = False,
    key: str | None = None,
    seconds: float = WAIT_SECONDS,
) -> Outcome:
    """Refresh stream tables, which are given as a mapping of names to ids.

    With a key, the refresh is always requested from a service, and only once for the same key.
    """
    if key is not None or (not local and (not _may_refresh(database.conn) or service_seen(database.conn))):
        return _ask_service(database.conn, tables, key, seconds)
    with quiet_jvm(), RefreshProgress(len(tables)) as progress:
        return database.engine.attempt(list(tables.values()), initiated_by, on_step=progress.step)


def service_seen(conn: psycopg.Connection[Any]) -> bool:
    """Whether a service is running; also False for roles that may not see this."""
    return _may_refresh(conn) and bool(_value(conn, SERVICE_SEEN))


def _may_refresh(conn: psycopg.Connection[Any]) -> bool:
    """Whether this role may refresh. Only the service role can write the catalog; owners request refreshes from it."""
    return bool(_value(conn, "SELECT has_table_privilege('pgtrickle.pgt_stream_tables', 'UPDATE')"))


def _ask_service(conn: psycopg.Connection[Any], tables: Mapping[str, int], key: str | None, seconds: float) -> Outcome:
    warnings: list[str] = []

    def notice(diagnostic: psycopg.errors.Diagnostic) -> None:
        warnings.append(diagnostic.message_primary or "")

    conn.add_notice_handler(notice)
    try:
        requests = {id_: int(_value(conn, "SELECT pgtrickle._request(%s, %s)", id_, key)) for id_ in tables.values()}
    except psycopg.errors.InsufficientPrivilege as error:
        raise PrivilegeError(error.diag.message_primary or str(error), error.diag.message_hint) from error
    finally:
        conn.remove_notice_handler(notice)
    if any("no pgtrickle service" in warning for warning in warnings):
        why = f"role {conn.info.user} may not refresh directly" if key is None else "a request id is for one"
        raise RefreshError(
            f"no service is running, and {why}",
            "The request is filed: `pgtrickle run --once` with the service's login serves it.",
        )
    deadline = time.monotonic() + seconds
    outcome = Outcome(names={id_: name for name, id_ in tables.items()})
    for name, id_ in tables.items():
        try:
            _await(conn, name, requests[id_], deadline)
            outcome.results.append(_last_result(conn, id_))
        except RefreshError as error:
            outcome.failures[id_] = error
    return outcome


def _await(conn: psycopg.Connection[Any], name: str, request: int, deadline: float) -> None:
    pause = 0.02
    while True:
        state = conn.execute("SELECT status, error FROM pgtrickle._request_state(%s)", (request,)).fetchone()
        if state is None:
            raise RefreshError(f"{name} was dropped before its refresh")
        if state[0] == "DONE":
            return
        if state[0] == "FAILED":
            raise RefreshError(f"the service could not refresh {name}: {state[1]}", f"See `pgtrickle history {name}`.")
        if time.monotonic() > deadline or (_may_refresh(conn) and not service_seen(conn)):
            raise NotInTimeError(
                f"request {request} to refresh {name} was not served: the service is gone or busy",
                "The request is still filed. See `pgtrickle doctor`, or refresh here with --local.",
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)


def _last_result(conn: psycopg.Connection[Any], id_: int) -> RefreshResult:
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(
            "SELECT pgt_id, format('%%s.%%s', pgt_schema, pgt_name) AS name, action, reason, rows_in, rows_inserted,"
            " rows_deleted, phases, refresh_id FROM pgtrickle.pgt_refresh_history"
            " WHERE pgt_id = %s AND status = 'COMPLETED' ORDER BY refresh_id DESC LIMIT 1",
            (id_,),
        ).fetchone()
    if row is None:
        raise PgtrickleError("the refresh left no history", "See `pgtrickle history`.")
    return RefreshResult(**row)


def _value(conn: psycopg.Connection[Any], query: str, *parameters: object) -> Any:
    row = conn.execute(query.encode(), parameters or None).fetchone()
    assert row is not None
    return row[0]
