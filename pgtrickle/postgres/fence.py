"""Run the code of a stream table's owner in the service's session.

The code runs inside a SECURITY DEFINER function of the owner, so it has the owner's rights and cannot change its role.
But it shares the session with statements of the service. It could leave the following behind there (decision 019):

- settings, temporary objects, cursors WITH HOLD: a transaction that only reads is rolled back, which removes them; if
  rows are written, `write_as_owner()` and `leave()` undo them;
- prepared statements, which no rollback removes: the service sends no named ones over such a connection;
- deferred triggers and constraints, which would run at COMMIT with the session's rights: `leave()` refuses them.

The code may also never end: a function can trap the cancellation by statement_timeout and continue. `ended_after()`
then ends the session.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.postgres.connection import another, is_pooled, reset_session
from pgtrickle.postgres.transactions import set_local

log = logging.getLogger("pgtrickle.fence")

READ_SECONDS = 660.0  # a minute more than the statement_timeout of a cut
WRITE_SECONDS = 1860.0  # a minute more than that of an apply

WENT_ON = "its code continued after it was canceled"
_SUSPEND = "UPDATE pgtrickle.pgt_stream_tables SET status = 'SUSPENDED', status_reason = %s WHERE pgt_id = ANY (%s)"

SEARCH_PATH = "SET LOCAL search_path TO pg_catalog, pg_temp"
# Settings that a transaction may have made before an owner's code runs, and that it needs again afterwards.
_LIMITS = (
    "search_path",
    "lock_timeout",
    "statement_timeout",
    "idle_in_transaction_session_timeout",
    "work_mem",
    "jit",
)


def enter(conn: psycopg.Connection[Any]) -> None:
    """Prepare for an owner's code: from now on, send no named prepared statements over this connection."""
    conn.prepare_threshold = None


def limits(conn: psycopg.Connection[Any]) -> dict[str, str]:
    """The limits set in the open transaction; empty if there is none."""
    if conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        return {}
    row = conn.execute("SELECT " + ", ".join(f"current_setting('{name}')" for name in _LIMITS)).fetchone()
    assert row is not None
    return dict(zip(_LIMITS, row, strict=True))


@contextmanager
def ended_after(conn: psycopg.Connection[Any], seconds: float, ids: Sequence[int]) -> Iterator[None]:
    """If an owner's code still runs after these seconds, suspend the stream tables it runs for and end the session."""
    if is_pooled(conn):  # every transaction may have another server process
        yield
        return
    timer = threading.Timer(seconds, _end, (conn, conn.info.backend_pid, list(ids)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def terminated_after(conn: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """If the session is still at work after these seconds, end it: for sessions that `ended_after()` does not know of."""
    timer = threading.Timer(seconds, _terminate, (conn, conn.info.backend_pid))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# Timeouts of a session in which an owner's code runs. They are too long to occur, unless that code has changed them.
_TIMEOUTS = (
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.IdleSessionTimeout,
    *([psycopg.errors.TransactionTimeout] if hasattr(psycopg.errors, "TransactionTimeout") else []),
)
_TIMEOUT_STATES = frozenset(error.sqlstate for error in _TIMEOUTS)


@contextmanager
def blamed_for_timeouts(conn: psycopg.Connection[Any], ids: Sequence[int]) -> Iterator[None]:
    """Suspend stream tables whose code ended the session; otherwise they would end every refresh that includes them."""
    ended = False

    def listen(diagnostic: psycopg.errors.Diagnostic) -> None:
        # Between two statements, libpq treats the server's last message as a notice: no error follows here.
        nonlocal ended
        ended = ended or diagnostic.sqlstate in _TIMEOUT_STATES

    conn.add_notice_handler(listen)
    try:
        yield
    except psycopg.Error as error:
        ended = ended or isinstance(error, _TIMEOUTS) or (conn.broken and _is_timeout(error))
        raise
    finally:
        conn.remove_notice_handler(listen)
        if ended:
            suspend(conn, ids, "its code ended the session that it ran in")


@contextmanager
def read_as_owner(conn: psycopg.Connection[Any], ids: Sequence[int]) -> Iterator[None]:
    """Guard reads for stream tables whose code may not end, or may end the session."""
    with blamed_for_timeouts(conn, ids), ended_after(conn, READ_SECONDS, ids):
        yield


def _is_timeout(error: psycopg.Error) -> bool:
    """Whether the server's last message, which libpq quotes when a connection is lost, is about a timeout."""
    return any(
        word in str(error) for word in ("idle-in-transaction timeout", "transaction timeout", "idle-session timeout")
    )


def suspend(conn: psycopg.Connection[Any], ids: Sequence[int], reason: str) -> None:
    """Suspend stream tables, over another connection because this one's transaction has failed."""
    try:
        with another(conn) as other:
            other.execute(_SUSPEND, (reason, list(ids)))
    except psycopg.Error:
        log.exception("stream tables cannot be suspended", extra={"pgt_ids": list(ids)})


def _terminate(conn: psycopg.Connection[Any], backend: int) -> None:
    try:
        with another(conn) as other:
            other.execute("SELECT pg_catalog.pg_terminate_backend(%s)", (backend,))
    except psycopg.Error:
        log.exception("code of an owner cannot be ended")


def _end(conn: psycopg.Connection[Any], backend: int, ids: Sequence[int]) -> None:
    try:
        with another(conn) as other:
            other.execute(_SUSPEND, (WENT_ON, list(ids)))
            other.execute("SELECT pg_catalog.pg_terminate_backend(%s)", (backend,))
    except psycopg.Error:
        log.exception("code of an owner cannot be ended", extra={"pgt_ids": list(ids)})


def write_as_owner(
    conn: psycopg.Connection[Any],
    pgt_id: int,
    statement: str,
    args: list[str] | None,
    settings: Mapping[str, str],
) -> list[int] | None:
    """Run a statement through the owner's function in the open transaction, and restore the given settings afterwards.

    The arguments have exactly the types of the function's parameters, so no other function of that name fits better.
    """
    enter(conn)
    function = sql.Identifier("pgtrickle_views", f"write_{pgt_id}")
    call = sql.SQL("SELECT {}(%s::pg_catalog.text, %b::pg_catalog.text[])").format(function)
    with blamed_for_timeouts(conn, [pgt_id]), ended_after(conn, WRITE_SECONDS, [pgt_id]):
        row = conn.execute(call, (statement, args)).fetchone()
    assert row is not None
    reset_session(conn)
    conn.execute(SEARCH_PATH)
    set_local(conn, settings)
    return [int(value) for value in row[0]] if row[0] is not None else None


def leave(conn: psycopg.Connection[Any], settings: Mapping[str, str], *, ddl: bool = False) -> None:
    """Remove what an owner's code left behind in a transaction in which it wrote, so that none of it runs at COMMIT.

    This is the last call before COMMIT. If an outer transaction continues, `settings` are what it had set before. `ddl`
    says that a command of pgtrickle's own altered tables.
    """
    conn.execute("SELECT pgtrickle._check_commit(ddl => %s)", (ddl,))
    conn.execute("SELECT pg_catalog.pg_advisory_unlock_all()")
    conn.execute("CLOSE ALL; DEALLOCATE ALL; UNLISTEN *; DISCARD TEMP")
    set_local(conn, settings)


def run_as_owner(
    conn: psycopg.Connection[Any], row: StreamTableRow, statement: str, settings: Mapping[str, str] | None = None
) -> None:
    """Run a command that returns nothing, with the rights of the stream table's owner."""
    if row.own:
        conn.execute(statement.encode())
        return
    with conn.transaction():
        write_as_owner(conn, row.pgt_id, statement, None, settings or {})
        leave(conn, settings or {}, ddl=True)
