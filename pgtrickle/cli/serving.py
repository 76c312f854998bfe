"""Serving the requests that SQL users file: a first, small service for one database."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import psycopg

from pgtrickle import __version__
from pgtrickle.api import Database, RefreshResult
from pgtrickle.errors import RefreshConflictError

BATCH = 500
BEAT_SECONDS = 5.0


@dataclass(frozen=True)
class Served:
    """What became of the requests that were waiting."""

    done: int = 0
    failed: int = 0
    postponed: int = 0  # another process is refreshing that stream table

    def __add__(self, other: Served) -> Served:
        return Served(self.done + other.done, self.failed + other.failed, self.postponed + other.postponed)


def serve_requests(database: Database) -> Served:
    """Refresh what was asked for and tell those who asked; one refresh serves all requests for a stream table."""
    requests = _take(database.conn)
    try:
        return _serve(database, requests)
    finally:
        # Otherwise the locks go with the connection, and the next service finds the requests.
        if not database.conn.closed and database.conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            database.conn.execute(
                "SELECT pg_advisory_unlock(hashtextextended('pgtrickle.request', r)) FROM unnest(%s::bigint[]) AS r",
                ([request for request, _ in requests],),
            )


def _take(conn: psycopg.Connection[Any]) -> list[tuple[int, int]]:
    """Requests (id, stream table) that wait, or that a service left when it died.

    A service holds an advisory lock on each request it works on: one that is RUNNING and not locked was left behind.
    """
    with conn.transaction():
        found = conn.execute(
            "SELECT request_id, pgt_id FROM pgtrickle.pgt_requests WHERE status IN ('PENDING', 'RUNNING')"
            " ORDER BY request_id LIMIT %s FOR UPDATE SKIP LOCKED",
            (BATCH,),
        ).fetchall()
        free = conn.execute(
            "SELECT r FROM unnest(%s::bigint[]) AS r WHERE pg_try_advisory_lock(hashtextextended('pgtrickle.request', r))",
            ([request for request, _ in found],),
        ).fetchall()
        taken = {request for (request,) in free}
        conn.execute(
            "UPDATE pgtrickle.pgt_requests SET status = 'RUNNING', started_at = clock_timestamp()"
            " WHERE request_id = ANY (%s)",
            (list(taken),),
        )
    return [(request, id_) for request, id_ in found if request in taken]


def _serve(database: Database, requests: Sequence[tuple[int, int]]) -> Served:
    ids = list(dict.fromkeys(id_ for _, id_ in requests))
    if not ids:
        return Served()
    try:
        results: list[RefreshResult] = database.engine.refresh(ids, "REQUEST")
    except Exception as error:
        if database.conn.closed:
            raise
        if len(ids) > 1:
            # One bad stream table must not fail the others: each on its own tells which it is.
            each = ([request for request in requests if request[1] == id_] for id_ in ids)
            return sum((_serve(database, some) for some in each), Served())
        return _give_up(database.conn, [request for request, _ in requests], error)
    refreshed = {result.pgt_id: result.refresh_id for result in results}
    with database.conn.cursor() as cursor:
        cursor.executemany(
            "UPDATE pgtrickle.pgt_requests SET status = 'DONE', finished_at = clock_timestamp(), refresh_id = %s,"
            " error = NULL WHERE request_id = %s",
            [(refreshed[id_], request) for request, id_ in requests],
        )
    return Served(done=len(requests))


def _give_up(conn: psycopg.Connection[Any], requests: list[int], error: Exception) -> Served:
    if isinstance(error, RefreshConflictError):
        conn.execute(
            "UPDATE pgtrickle.pgt_requests SET status = 'PENDING', started_at = NULL WHERE request_id = ANY (%s)",
            (requests,),
        )
        return Served(postponed=len(requests))
    conn.execute(
        "UPDATE pgtrickle.pgt_requests SET status = 'FAILED', finished_at = clock_timestamp(), error = %s"
        " WHERE request_id = ANY (%s)",
        (str(error).strip(), requests),
    )
    return Served(failed=len(requests))


class Presence:
    """This process in pgt_services, kept fresh from a connection of its own: a refresh may take longer than a minute."""

    def __init__(self, database: Database) -> None:
        info = database.conn.info
        self._conn = psycopg.connect(info.dsn, password=info.password, autocommit=True)
        self._id = database.engine.service_id
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pgtrickle-presence", daemon=True)

    def __enter__(self) -> Self:
        self._conn.execute(
            "INSERT INTO pgtrickle.pgt_services (service_id, host, pid, version) VALUES (%s, %s, %s, %s)",
            (self._id, socket.gethostname(), os.getpid(), __version__),
        )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if not self._conn.closed:
            self._conn.execute("DELETE FROM pgtrickle.pgt_services WHERE service_id = %s", (self._id,))
            self._conn.close()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self._conn.execute(
                    "UPDATE pgtrickle.pgt_services SET last_seen = clock_timestamp() WHERE service_id = %s", (self._id,)
                )
            except psycopg.OperationalError:
                return  # the server is gone, which the service's own connection finds out too
