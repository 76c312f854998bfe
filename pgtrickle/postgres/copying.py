"""The output of COPY as a file. psycopg's own object waits for every single row, which takes twice as long."""

from __future__ import annotations

import io
import weakref
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.abc import PQGen
from psycopg.errors import error_from_result
from psycopg.generators import fetch_many
from psycopg.pq import ExecStatus
from psycopg.waiting import Wait
from pyarrow import csv

from pgtrickle.errors import RefreshError
from pgtrickle.postgres.formats import PARSE, conversion

# The most bytes that the driver holds of what it reads over one connection. Larger reads go to Spark's executors.
MOST_BYTES = 512 << 20
LONGEST_ROW = 1 << 28  # bytes of one block of CSV
SMALL_BYTES = 4 << 20  # a read of fewer bytes is done by the driver, however many it holds

_held: weakref.WeakKeyDictionary[psycopg.Connection[Any], list[weakref.ref[pa.Table]]] = weakref.WeakKeyDictionary()


def room(conn: psycopg.Connection[Any], most: int) -> int:
    """How many bytes the driver may still read over the connection if it holds at most `most`.

    What was read before counts as long as somebody holds it: the stream tables of a refresh are read one after the other.
    """
    tables = [table for reference in _held.get(conn, []) if (table := reference()) is not None]
    held: int = sum(table.nbytes for table in tables)
    return max(most - held, min(SMALL_BYTES, most))


def hold(conn: psycopg.Connection[Any], table: pa.Table) -> None:
    """Count the table among what the driver holds."""
    _held[conn] = [one for one in _held.get(conn, []) if one() is not None] + [weakref.ref(table)]


class ResultTooLargeError(RefreshError):
    """A query returns more than the driver can hold."""

    def __init__(self) -> None:
        super().__init__(
            f"the query gives more than {MOST_BYTES >> 20} MB at once, which only Spark's executors can read",
            "Executors need their own connections: connect to the server directly, not through a pooler.",
        )


class CopyOut(io.RawIOBase):
    """A file with the rows of the COPY that the connection is running."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn = conn
        self._rest = b""
        self._over = False

    def take(self, size: int | None = None) -> bytes:
        """Return whole rows of at least `size` bytes, or all rows; less only if there are no more."""
        return b"" if self._over else self._conn.wait(self._take(size))

    def _take(self, size: int | None) -> PQGen[bytes]:
        pgconn = self._conn.pgconn
        rows: list[memoryview] = []
        found = 0
        while size is None or found < size:
            length, row = pgconn.get_copy_data(1)
            if length > 0:
                rows.append(row)
                found += length
            elif length == 0:
                while not (yield Wait.R):
                    continue
                pgconn.consume_input()
            else:
                self._over = True
                for result in (yield from fetch_many(pgconn)):
                    if result.status != ExecStatus.COMMAND_OK:
                        raise error_from_result(result, self._conn.info.encoding)
                break
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


def copy_out(
    conn: psycopg.Connection[Any], statement: sql.Composable, schema: pa.Schema, most: int | None = None
) -> pa.Table:
    """Return the rows of a query as an Arrow table with the given schema.

    Raises ResultTooLargeError if they have `most` bytes or more, together with what is held of earlier reads.
    """
    if most is not None:
        most = room(conn, most)
    command = sql.SQL("COPY ({}) TO STDOUT (FORMAT csv)").format(statement)
    with conn.cursor() as cursor, cursor.copy(command):
        data = CopyOut(conn).take(most)
        if most is not None and len(data) >= most:
            raise ResultTooLargeError
    if not data:
        return schema.empty_table()
    read = csv.ReadOptions(column_names=schema.names, block_size=min(max(1 << 20, len(data)), LONGEST_ROW))
    try:
        table = csv.read_csv(
            io.BytesIO(data), read_options=read, parse_options=PARSE, convert_options=conversion(schema)
        )
    except pa.ArrowInvalid as error:
        if len(data) <= LONGEST_ROW:
            raise
        raise ResultTooLargeError from error  # probably a row that is longer than a block
    hold(conn, table)
    return table
