"""Running an owner's code in the service's session.

The code runs inside a SECURITY DEFINER function of the owner, so it has the owner's rights and cannot change its role. But it
shares the session with statements of the service. What it could leave behind there (decision 019):

- settings, temporary objects, cursors WITH HOLD: gone with a transaction that is rolled back, as those are that only read;
  where rows are written, undone by `write_as_owner()` and `leave()`;
- prepared statements, which no rollback takes away: the service sends no named ones over such a connection;
- deferred triggers and constraints, which would run at COMMIT with the session's rights: `leave()` refuses them.

And it may not end: a function can trap the cancellation by statement_timeout and go on. `ended_after()` ends the session.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from pgtrickle.postgres.connection import another, is_pooled, reset_session
from pgtrickle.postgres.transactions import set_local

log = logging.getLogger("pgtrickle.engine")

READ_SECONDS = 660.0  # a minute more than the statement_timeout of a cut
WRITE_SECONDS = 1860.0  # and than that of an apply

WENT_ON = "its code went on after it was cancelled"
_SUSPEND = "UPDATE pgtrickle.pgt_stream_tables SET status = 'SUSPENDED', status_reason = %s WHERE pgt_id = ANY (%s)"

SEARCH_PATH = "SET LOCAL search_path TO pg_catalog, pg_temp"
# What a transaction may have set for itself before an owner's code ran, and needs again afterwards.
_LIMITS = ("search_path", "lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout", "work_mem")


def enter(conn: psycopg.Connection[Any]) -> None:
    """Before an owner's code runs: no named prepared statement is sent over this connection any more."""
    conn.prepare_threshold = None


def limits(conn: psycopg.Connection[Any]) -> dict[str, str]:
    """The limits of the transaction that is open; none where there is no transaction."""
    if conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        return {}
    row = conn.execute("SELECT " + ", ".join(f"current_setting('{name}')" for name in _LIMITS)).fetchone()
    assert row is not None
    return dict(zip(_LIMITS, row, strict=True))


@contextmanager
def ended_after(conn: psycopg.Connection[Any], seconds: float, ids: Sequence[int]) -> Iterator[None]:
    """End the session if an owner's code is still running then, and suspend the stream tables it ran for."""
    if is_pooled(conn):  # the server's process is another one in every transaction
        yield
        return
    timer = threading.Timer(seconds, _end, (conn, conn.info.backend_pid, list(ids)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# Timeouts of a session in which an owner's code runs. They are far away, unless that code has changed them.
_TIMEOUTS = (
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.IdleSessionTimeout,
    *([psycopg.errors.TransactionTimeout] if hasattr(psycopg.errors, "TransactionTimeout") else []),
)
_TIMEOUT_STATES = frozenset(error.sqlstate for error in _TIMEOUTS)


@contextmanager
def blamed_for_timeouts(conn: psycopg.Connection[Any], ids: Sequence[int]) -> Iterator[None]:
    """Suspend the stream tables whose code ended the session; else they would end every refresh that they are part of."""
    ended = False

    def listen(diagnostic: psycopg.errors.Diagnostic) -> None:
        # The server's last words are a notice to libpq if they arrive between two statements: no error follows here.
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
    """Reading for stream tables whose code may not end, or may end the session."""
    with blamed_for_timeouts(conn, ids), ended_after(conn, READ_SECONDS, ids):
        yield


def _is_timeout(error: psycopg.Error) -> bool:
    """The server's last words, as libpq quotes them when a connection is lost."""
    return any(
        word in str(error) for word in ("idle-in-transaction timeout", "transaction timeout", "idle-session timeout")
    )


def suspend(conn: psycopg.Connection[Any], ids: Sequence[int], reason: str) -> None:
    """Suspend stream tables over another connection: what runs on this one is over."""
    try:
        with another(conn) as other:
            other.execute(_SUSPEND, (reason, list(ids)))
    except psycopg.Error:
        log.exception("stream tables cannot be suspended", extra={"pgt_ids": list(ids)})


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
    """Have the owner's function run a statement, in the transaction that is open; afterwards its settings are these again.

    The arguments have exactly the types of the function's parameters: no other function of that name fits better.
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
    """The last word in a transaction in which an owner's code wrote: what it left is gone, and nothing of it runs at COMMIT.

    Where the transaction goes on, `settings` are what it had set before. `ddl`: a command of ours altered tables.
    """
    conn.execute("SELECT pgtrickle._check_commit(ddl => %s)", (ddl,))
    conn.execute("SELECT pg_catalog.pg_advisory_unlock_all()")
    conn.execute("CLOSE ALL; DEALLOCATE ALL; UNLISTEN *; DISCARD TEMP")
    set_local(conn, settings)
