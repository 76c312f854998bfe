"""A Spark data source for PostgreSQL: Python workers read and write in parallel, and rows bypass the driver.

Workers need psycopg and this package installed. They get connection parameters, but never a password: libpq has to find
that on their machine (in a password file, a service file or the environment).
"""

from __future__ import annotations

import io
import json
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from pyarrow import csv
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from pgtrickle.postgres.copying import CopyOut
from pgtrickle.postgres.formats import PARSE, WRITE, arrow_type, conversion

FORMAT = "pgtrickle"
# The attempt whose rows list the attempts that count, in the column of the weight.
DONE = "done"
# The error message of a task whose session was terminated.
WENT_ON = "pgtrickle: code of an owner continued after it was canceled"
_BLOCK = 4 << 20


@dataclass(frozen=True)
class ReadSpec:
    """What the workers read: the statements of each task, all in the snapshot that the cut exported."""

    conninfo: str
    snapshot: str
    settings: dict[str, str]
    tasks: Sequence[Sequence[str]]
    columns: Sequence[tuple[str, str]]  # names and Spark types
    cancelled_after: float  # seconds after which a statement is canceled
    ended_after: float  # seconds after which its session is terminated: an owner's code can ignore the cancellation


@dataclass(frozen=True)
class WriteSpec:
    """Where the workers write: a table of text columns, `attempt` first and the weight `w` second."""

    conninfo: str
    table: Sequence[str]  # schema and name


class PostgresSource(DataSource):
    """The Spark data source for PostgreSQL. Its only option, `task`, is a ReadSpec or a WriteSpec as JSON."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Reader(ReadSpec(**json.loads(self.options["task"])))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _Writer(WriteSpec(**json.loads(self.options["task"])))


def as_option(task: ReadSpec | WriteSpec) -> str:
    return json.dumps(asdict(task))


@dataclass
class _Task(InputPartition):
    statements: Sequence[str]


class _Reader(DataSourceReader):
    def __init__(self, spec: ReadSpec) -> None:
        self.spec = spec

    def partitions(self) -> Sequence[InputPartition]:
        return [_Task(statements) for statements in self.spec.tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Task)
        for statement in partition.statements:
            yield from self._read(statement)

    def _read(self, statement: str) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([(name, arrow_type(type_)) for name, type_ in self.spec.columns])
        seconds = self.spec.cancelled_after
        with psycopg.connect(self.spec.conninfo) as conn, self._ended_in_time(conn):
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            conn.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(self.spec.snapshot))
            conn.execute("SET LOCAL search_path TO pg_catalog, pg_temp")
            for name, value in self.spec.settings.items():
                conn.execute("SELECT set_config(%s, %s, true)", (name, value))
            conn.execute(sql.SQL("SET LOCAL statement_timeout TO {}").format(sql.Literal(f"{seconds:.0f}s")))
            command = sql.SQL("COPY ({}) TO STDOUT (FORMAT csv)").format(sql.SQL(statement))
            with conn.cursor() as cursor, cursor.copy(command):
                yield from parse_csv(CopyOut(conn), schema)
            conn.rollback()  # so that nothing that an owner's code has left runs at commit

    @contextmanager
    def _ended_in_time(self, conn: psycopg.Connection[Any]) -> Iterator[None]:
        ended = threading.Event()

        def end() -> None:
            ended.set()
            with psycopg.connect(self.spec.conninfo) as other:
                other.execute("SELECT pg_catalog.pg_terminate_backend(%s)", (conn.info.backend_pid,))

        timer = threading.Timer(self.spec.ended_after, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except psycopg.Error as error:
            raise RuntimeError(WENT_ON) if ended.is_set() else error from error
        finally:
            timer.cancel()


def parse_csv(stream: io.RawIOBase, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a COPY, in batches."""
    read = csv.ReadOptions(column_names=schema.names, block_size=_BLOCK, use_threads=False)
    file = pa.PythonFile(stream, "r")
    try:
        reader = csv.open_csv(file, read_options=read, parse_options=PARSE, convert_options=conversion(schema))
    except pa.ArrowInvalid as error:
        if "Empty CSV" in str(error):
            return
        raise
    yield from reader


@dataclass
class _Written(WriterCommitMessage):
    attempt: str


class _Writer(DataSourceArrowWriter):
    """Writes rows with COPY, each attempt of a task under its own name.

    If Spark runs a task twice, the rows of one attempt do not count.
    """

    def __init__(self, spec: WriteSpec) -> None:
        self.spec = spec

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        attempt = uuid.uuid4().hex
        with self._copy(sql.SQL("")) as copy:
            for batch in iterator:
                named = pa.array([attempt] * batch.num_rows, pa.string())
                buffer = io.BytesIO()
                csv.write_csv(pa.table([named, *batch.columns], names=["", *batch.schema.names]), buffer, WRITE)
                copy.write(buffer.getvalue())
        return _Written(attempt)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        with self._copy(sql.SQL("(attempt, w)")) as copy:
            for message in messages:
                assert isinstance(message, _Written)
                copy.write(f"{DONE},{message.attempt}\n")

    @contextmanager
    def _copy(self, columns: sql.SQL) -> Iterator[psycopg.Copy]:
        table = sql.Identifier(*self.spec.table)
        command = sql.SQL("COPY {} {} FROM STDIN (FORMAT csv)").format(table, columns)
        with psycopg.connect(self.spec.conninfo) as conn, conn.cursor() as cursor, cursor.copy(command) as copy:
            yield copy
