"""What a COPY sends, as a file. psycopg's own object waits for every row by itself, which takes a third longer."""

from __future__ import annotations

import io
from typing import Any

import psycopg
from psycopg.abc import PQGen
from psycopg.generators import copy_from


class CopyOut(io.RawIOBase):
    """The rows of the COPY that the connection is in."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn = conn
        self._rest = b""
        self._over = False

    def take(self, size: int | None = None) -> bytes:
        """Whole rows of at least so many bytes, or all; less only where there are no more."""
        return b"" if self._over else self._conn.wait(self._take(size))

    def _take(self, size: int | None) -> PQGen[bytes]:
        rows: list[memoryview] = []
        found = 0
        while size is None or found < size:
            row = yield from copy_from(self._conn.pgconn)
            if not isinstance(row, memoryview):
                self._over = True
                break
            rows.append(row)
            found += len(row)
        return b"".join(rows)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        whole = self._rest
        if len(whole) < len(buffer):
            whole += self.take(len(buffer) - len(whole))
        given = whole[: len(buffer)]
        self._rest = whole[len(given) :]
        buffer[: len(given)] = given
        return len(given)
