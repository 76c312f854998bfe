"""Reading large numbers of changes in helper processes of the service.

Python reads the rows of a COPY one at a time, and no other thread runs meanwhile: a million rows would block all other
refreshes of the service for seconds. A helper process reads in the snapshot that the cut exported, and returns an Arrow
table. It gets its orders on standard input and answers on standard output, both pickled.
"""

from __future__ import annotations

import pickle
import select
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO

import psycopg
import pyarrow as pa
from psycopg import sql
from pyarrow import ipc

from pgtrickle.postgres import copying, fence
from pgtrickle.postgres.copying import ResultTooLargeError, copy_out
from pgtrickle.postgres.transactions import READ_SETTINGS, set_local

MANY = 8 << 20  # bytes of a change buffer from which on a helper process is worthwhile
IDLE_SECONDS = 60.0  # after which an idle helper process ends
_MOST = 2
_LOST = b""  # in place of an answer, if the process is gone


@dataclass(frozen=True)
class Order:
    """An order to read the result of a statement in the snapshot that a cut exported."""

    conninfo: str
    password: str | None
    snapshot: str
    settings: Mapping[str, str]
    statement: str
    schema: pa.Schema
    most: int = copying.MOST_BYTES  # bytes that may be read
    seconds: float = field(default_factory=lambda: fence.READ_SECONDS)  # after which its session is ended


class HelperProcesses:
    """The helper processes. They are started on demand and end with the service, even if that is killed."""

    def __init__(self, many: int = MANY) -> None:
        self.many = many
        self._free = threading.Semaphore(_MOST)
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []

    def read(self, order: Order) -> pa.Table | None:
        """The rows of an order; None if no helper process could read them, so that the caller has to."""
        with self._free:
            rested = self._rested()
            answer = self._ask(rested, order) if rested is not None else _LOST
            if answer is _LOST:
                answer = self._ask(_start(), order)
        if isinstance(answer, psycopg.Error):
            raise answer
        return ipc.open_stream(answer).read_all() if isinstance(answer, bytes) and answer is not _LOST else None

    def close(self) -> None:
        while (process := self._rested()) is not None:
            _end(process)

    def _rested(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _ask(self, process: subprocess.Popen[bytes] | None, order: Order) -> bytes | psycopg.Error | None:
        if process is None:
            return _LOST
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(order, process.stdin)
            process.stdin.flush()
            answer: bytes | psycopg.Error | None = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            _end(process)
            return _LOST
        with self._lock:
            self._idle.append(process)
        return answer


def _start() -> subprocess.Popen[bytes] | None:
    # In a session of its own, so that Ctrl-C reaches only the service, which finishes the refreshes that it has begun.
    command = [sys.executable, "-m", "pgtrickle.refresh.fetch.helper_process"]
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    except OSError:
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _read(order: Order) -> bytes:
    """Read in the cut's snapshot. The lock timeout is short, because the service holds the cut's locks meanwhile.

    A session that waits for those locks must not be waited for here.
    """
    with psycopg.connect(order.conninfo, password=order.password) as conn, fence.terminated_after(conn, order.seconds):
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        conn.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(order.snapshot)))
        conn.execute("SET LOCAL search_path TO pg_catalog, pg_temp")
        set_local(conn, READ_SETTINGS | dict(order.settings))
        table = copy_out(conn, sql.SQL(order.statement), order.schema, order.most)
        conn.rollback()  # so that nothing that an owner's code has left runs at commit
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def _serve(orders: IO[bytes], answers: IO[bytes]) -> None:
    """Carry out orders until none has come for a while, or the service has ended."""
    while select.select([orders], [], [], IDLE_SECONDS)[0]:
        try:
            order = pickle.load(orders)
        except EOFError:
            return
        try:
            answer: bytes | psycopg.Error | None = _read(order)
        except psycopg.DataError as error:
            answer = error
        except (psycopg.Error, ResultTooLargeError):
            answer = None  # no connection, no lock, an expired snapshot or too many bytes: the service has to read it
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
