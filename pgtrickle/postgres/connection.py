"""Connections to PostgreSQL, opened in the same way with and without a pooler in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import psycopg

from pgtrickle.catalog.trust import Trust, require_private_path, require_trusted

_pooled: WeakSet[psycopg.Connection[Any]] = WeakSet()
_of_citus: WeakSet[psycopg.Connection[Any]] = WeakSet()
_trusting: WeakSet[psycopg.Connection[Any]] = WeakSet()  # their search path has only schemas that users cannot write to
_limited: WeakKeyDictionary[psycopg.Connection[Any], str] = WeakKeyDictionary()  # value: the SET commands to repeat
_trusts: WeakKeyDictionary[psycopg.Connection[Any], Trust] = WeakKeyDictionary()  # value: whose catalogs they may use

TRUSTED_PATH = "SET search_path TO pg_catalog, pg_temp"

KEEP_DDL_HERE = "SET citus.enable_ddl_propagation TO off"  # what pgtrickle creates on a node stays on that node


def connect(conninfo: str, **parameters: Any) -> psycopg.Connection[Any]:
    """Open a connection in autocommit mode. Behind a pooler it keeps nothing on the server that outlives a transaction.

    There is a pooler if the process that answers is not the one that was announced when the connection was opened.
    """
    conn = psycopg.connect(conninfo, autocommit=True, **parameters)
    row = conn.execute(
        "SELECT pg_catalog.pg_backend_pid(), EXISTS (SELECT FROM pg_catalog.pg_extension"
        " WHERE extname OPERATOR(pg_catalog.=) 'citus')",
        prepare=False,
    ).fetchone()
    assert row is not None
    if row[0] != conn.info.backend_pid:
        be_pooled(conn)
    elif row[1]:
        conn.execute(KEEP_DDL_HERE)
        _of_citus.add(conn)
    return conn


def connect_with_rights(conninfo: str, trust: Trust | None, **parameters: Any) -> psycopg.Connection[Any]:
    """Open a connection for a privileged login, which others must not be able to make run their code.

    Names without a schema mean PostgreSQL's own objects, and the database's catalog, if it has one, must belong to a
    trusted role. Without `trust` the catalog is not checked, because the caller does not use it.
    """
    conn = connect(conninfo, **parameters)
    try:
        trust_only_catalog(conn)
        if trust is not None:
            if require_trusted(conn, trust) and is_pooled(conn):
                require_private_path(conn)
            _trusts[conn] = trust
    except BaseException:
        conn.close()
        raise
    return conn


def be_pooled(conn: psycopg.Connection[Any]) -> None:
    """Mark the connection as pooled: from now on, keep nothing on the server that outlives a transaction."""
    conn.prepare_threshold = None
    _pooled.add(conn)


@contextmanager
def pooled_for_now(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """If the block marks the connection as pooled, unmark it afterwards, because other code uses it too."""
    before = is_pooled(conn)
    try:
        yield
    finally:
        if not before:
            _pooled.discard(conn)


def is_pooled(conn: psycopg.Connection[Any]) -> bool:
    """Whether the connection must not use session state, which a transaction-mode pooler does not keep."""
    return conn in _pooled


def reset_session(conn: psycopg.Connection[Any]) -> None:
    """Undo all settings made in the session, by commands whose meaning no setting can change."""
    commands = ["RESET ALL"]
    commands += [KEEP_DDL_HERE] * (conn in _of_citus) + [TRUSTED_PATH] * (conn in _trusting)
    commands += [_limited[conn]] if conn in _limited else []
    conn.execute("; ".join(commands))


def trust_only_catalog(conn: psycopg.Connection[Any]) -> None:
    """Make names without a schema mean PostgreSQL's own objects. Behind a pooler, every transaction sets this."""
    if not is_pooled(conn):
        conn.execute(TRUSTED_PATH)
        _trusting.add(conn)


def limit_waits(conn: psycopg.Connection[Any], lock_timeout: str, statement_timeout: str) -> None:
    """Set timeouts for the connection; a transaction may set others. Behind a pooler only transactions set them."""
    if not is_pooled(conn):
        _limited[conn] = f"SET lock_timeout TO '{lock_timeout}'; SET statement_timeout TO '{statement_timeout}'"
        conn.execute(_limited[conn].encode())


@contextmanager
def trusting_only_catalog(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """Like `trust_only_catalog()`, but for the block only: for connections whose search path belongs to their user."""
    if is_pooled(conn) or conn in _trusting:
        yield
        return
    row = conn.execute("SELECT pg_catalog.current_setting('search_path')").fetchone()
    assert row is not None
    trust_only_catalog(conn)
    try:
        yield
    finally:
        _trusting.discard(conn)
        status = conn.info.transaction_status
        if status in {psycopg.pq.TransactionStatus.IDLE, psycopg.pq.TransactionStatus.INTRANS}:
            conn.execute("SELECT pg_catalog.set_config('search_path', %s, false)", row)


@contextmanager
def idle(conn: psycopg.Connection[Any]) -> Iterator[psycopg.Connection[Any]]:
    """The connection if it is idle; a new one like it if an interruption left it in the middle of a statement."""
    if conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        yield conn
        return
    conn.cancel_safe(timeout=5)
    other = another(conn)
    conn.close()
    with other:
        yield other


def another(conn: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """Open another connection to the same database as the same role."""
    password = conn.info.password or None
    if conn in _trusts:
        return connect_with_rights(conn.info.dsn, _trusts[conn], password=password)
    return connect(conn.info.dsn, password=password)
