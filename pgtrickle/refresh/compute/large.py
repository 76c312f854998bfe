"""Large refreshes: rows go between PostgreSQL and Spark's executors in parallel and bypass the driver.

A fragment over one table is read in parts by several tasks, each on its own connection in the snapshot that the cut
exported. The rows are kept on the executors' disks, so that the cut can end before Spark computes.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.conninfo import make_conninfo
from pyspark import StorageLevel
from pyspark.sql import DataFrame, functions

from pgtrickle.catalog.query_files import load_query
from pgtrickle.compile.postgres import CHANGES_SCHEMA
from pgtrickle.compile.sql_text import SHARDS
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.ivm.key_bounds import is_chain
from pgtrickle.postgres.formats import spark_types
from pgtrickle.postgres.transactions import export
from pgtrickle.query.plan import Fragment, Plan, Version, scans_of
from pgtrickle.refresh.apply.load import Staged
from pgtrickle.refresh.compute.spark_jobs import spark_errors
from pgtrickle.refresh.fetch.fetcher import Fetcher
from pgtrickle.refresh.fetch.medium import Request
from pgtrickle.refresh.fetch.reader import Reader
from pgtrickle.refresh.planning.jobs import ZERO, Job
from pgtrickle.sites.citus.shards import Shards
from pgtrickle.spark.executors import FORMAT, ReadSpec, WriteSpec, as_option
from pgtrickle.spark.private_files import private_directory
from pgtrickle.spark.session import is_embedded, large_session, large_tasks

# The same as for statements of an apply. A statement reads a part of a table, or runs a whole query that has no parts.
STATEMENT_SECONDS = 1800.0
GRACE_SECONDS = 60.0
_PART = 16 << 20
_MOST_PARTS = 256
_MOST_ROUNDS = 16
_BLOCK = 8192
_password_files: dict[tuple[str, str], Path] = {}
_password_lock = threading.Lock()
_reading = threading.Lock()  # one large refresh reads at a time, and leaves one of Spark's slots to other refreshes


@dataclass
class LargeRefresh:
    """One stream table's refresh on the executors."""

    conn: psycopg.Connection[Any]
    settings: Mapping[str, str]
    statements: list[str]
    _frames: dict[Fragment, DataFrame] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._medium = OnExecutors(self.settings, self.statements)

    def fetcher(
        self, readers: Mapping[str, Reader], windows: Mapping[str, Snapshot], joined: frozenset[str]
    ) -> Fetcher[DataFrame]:
        return Fetcher(readers, windows, self._medium, joined)

    def fetch(self, job: Job, fetcher: Fetcher[DataFrame]) -> tuple[int, bool]:
        """Read everything onto the executors; return the number of rows, and whether the stream table is empty."""
        with _reading:
            self._frames = job.fetch(fetcher)
            rows = {fragment: self._medium.count(frame) for fragment, frame in self._frames.items()}
        return sum(rows.values()), job.stored is not None and rows[job.stored] == 0

    def compute(self, job: Job, stage: str) -> Staged | None:
        """The delta in a table named `stage`; None if it is certainly empty."""
        with spark_errors():
            return self._compute(job, stage)

    def release(self) -> None:
        """Free the space on the executors' disks."""
        self._medium.release()

    def _compute(self, job: Job, stage: str) -> Staged | None:
        names: dict[Fragment, str | None] = {}
        for i, (fragment, frame) in enumerate(self._frames.items()):
            name = f"pgt_large_{threading.get_ident()}_{i}"  # a thread computes one large refresh at a time
            names[fragment] = None if frame.isEmpty() else f"SELECT * FROM {name}"
            frame.createOrReplaceTempView(name)
        output = job.output(names.__getitem__)
        if output is None:
            return None
        return self._stage(large_session().sql(output.select(job.columns)).where(_moves(job)), stage)

    def _stage(self, delta: DataFrame, stage: str) -> Staged:
        staged = Staged(stage)
        staged.create(self.conn, delta.columns)
        writing = WriteSpec(_worker_conninfo(self.conn), staged.path)
        strings = delta.selectExpr(*(f"CAST({name} AS STRING) AS {name}" for name in delta.columns))
        try:
            strings.write.format(FORMAT).mode("append").option("task", as_option(writing)).save()
        except BaseException:
            staged.drop(self.conn)
            raise
        return staged


@dataclass
class OnExecutors:
    """A medium that keeps rows on Spark's executors."""

    settings: Mapping[str, str]
    statements: list[str]
    _exported: dict[str, str] = field(default_factory=dict)  # the snapshot of each database's cut
    _kept: list[DataFrame] = field(default_factory=list)

    def empty(self, schema: pa.Schema) -> DataFrame:
        return large_session().createDataFrame(schema.empty_table())

    def read(self, request: Request) -> DataFrame:
        conn = request.reader.conn
        shown = [statement.as_string(conn) for statement in self._statements(request)]
        self.statements += shown
        types = spark_types(request.schema)
        schema = ", ".join(f"{name} {type_}" for name, type_ in types)
        reading = ReadSpec(
            _worker_conninfo(conn),
            self._snapshot(request.reader),
            dict(self.settings),
            (),
            types,
            STATEMENT_SECONDS,
            STATEMENT_SECONDS + GRACE_SECONDS,
        )
        frames = []
        for tasks in _rounds(shown, large_tasks()):
            option = as_option(replace(reading, tasks=tasks))
            frames.append(self._keep(large_session().read.format(FORMAT).schema(schema).option("task", option).load()))
        return reduce(DataFrame.unionAll, frames)

    def consolidated(self, rows: DataFrame) -> DataFrame:
        names = [name for name in rows.columns if name != "w"]
        return self._keep(rows.groupBy(*names).agg(functions.sum("w").alias("w")).where("w <> 0"))

    def count(self, rows: DataFrame) -> int:
        with spark_errors():
            return rows.count()

    def values(self, columns: Sequence[tuple[DataFrame, str]]) -> pa.Array:
        frames = [rows.selectExpr(f"CAST({name} AS STRING) AS v") for rows, name in columns]
        together = frames[0]
        for frame in frames[1:]:
            together = together.unionAll(frame)
        with spark_errors():
            return together.distinct().toArrow().column("v").combine_chunks()

    def release(self) -> None:
        while self._kept:
            self._kept.pop().unpersist()

    def _keep(self, frame: DataFrame) -> DataFrame:
        """Read the rows now, while the cut lasts, and keep them on disk.

        If an executor is lost together with its rows, reading them again fails, because the snapshot has ended.
        """
        kept = frame.persist(StorageLevel.DISK_ONLY)
        self._kept.append(kept)
        self.count(kept)
        return kept

    def _snapshot(self, reader: Reader) -> str:
        if reader.database not in self._exported:
            self._exported[reader.database] = export(reader.conn)
        return self._exported[reader.database]

    def _statements(self, request: Request) -> list[sql.Composable]:
        """One statement for each part of the table's blocks if the fragment reads one table, else a single one."""
        shards = _shards_of(request)
        if shards is not None:
            return [
                request.statement(None, sql.SQL("SELECT * FROM {} WHERE {}").format(sql.SQL(shard), part))
                for shard in shards.names
                for part in _parts(_size_of(request.reader.conn, shard)) or [sql.SQL("true")]
            ] or [request.statement(None, None)]
        parts = _parts(_largest_file(request.reader.conn, request.plan))
        return [request.statement(part, None) for part in parts] or [request.statement(None, None)]


def _rounds(statements: Sequence[str], at_once: int | None) -> Iterator[list[Sequence[str]]]:
    """The statements as rounds of tasks, with as many tasks in a round as may run at once."""
    if at_once is None:
        yield [[statement] for statement in statements]
        return
    number = min(len(statements), at_once * _MOST_ROUNDS)
    tasks = [statements[i::number] for i in range(number)]
    for i in range(0, number, at_once):
        yield tasks[i : i + at_once]


def _parts(size: int) -> list[sql.Composable]:
    """Conditions for parts of a file's blocks; none if the file is small enough to be read in one part."""
    parts = min(size // _PART + 1, _MOST_PARTS)
    if parts == 1:
        return []
    step = size // _BLOCK // parts + 1
    bounds = [sql.SQL("{}::pg_catalog.tid").format(sql.Literal(f"({i * step},0)")) for i in range(parts)]
    conditions: list[sql.Composable] = [
        sql.SQL("ctid >= {} AND ctid < {}").format(low, high) for low, high in pairwise(bounds)
    ]
    # The last part has no end: the table may have grown since.
    conditions.append(sql.SQL("ctid >= {}").format(bounds[-1]))
    return conditions


def _shards_of(request: Request) -> Shards | None:
    """The shards of a fragment that reads the rows of a distributed table; None for other fragments."""
    scans = scans_of(request.plan)
    if not is_chain(request.plan) or not scans or not scans[0].relation.spread or scans[0].version is Version.DELTA:
        return None
    return request.reader.shards[f"{SHARDS}{scans[0].relation.oid}"]


def _size_of(conn: psycopg.Connection[Any], shard: str) -> int:
    """Bytes of the shard's file, or of its largest partition's file."""
    largest = "SELECT max(pg_relation_size(member)) FROM pgtrickle._partition_tree(to_regclass(%s)) AS member"
    row = conn.execute(largest, (shard,)).fetchone()
    assert row is not None
    return int(row[0] or 0)  # it may have been moved away, which is noticed when it is read


def _largest_file(conn: psycopg.Connection[Any], plan: Plan) -> int:
    """Bytes of the largest file of the table behind a fragment over one table; 0 for other fragments."""
    if not is_chain(plan):
        return 0
    scan = scans_of(plan)[0]
    names = (scan.relation.schema, scan.relation.name)
    if scan.version is Version.DELTA:
        assert scan.relation.buffer is not None
        names = (CHANGES_SCHEMA, scan.relation.buffer)
    row = conn.execute("SELECT %s::regclass::oid", (sql.Identifier(*names).as_string(conn),)).fetchone()
    assert row is not None
    row = conn.execute(load_query("sizes"), {"relations": [row[0]]}).fetchone()
    assert row is not None
    return int(row[1])


def _moves(job: Job) -> str:
    return " OR ".join(f"NOT coalesce(CAST({name} AS STRING), '0') RLIKE '{ZERO}'" for name in job.sums)


def _worker_conninfo(conn: psycopg.Connection[Any]) -> str:
    """The connection string for executors: the driver's, with a password file if they run on the same machine."""
    parameters = conn.info.get_parameters()
    if is_embedded() and conn.info.password:
        parameters["passfile"] = str(_password_file(conn.info.user, conn.info.password))
    return make_conninfo("", **parameters)


def _password_file(user: str, password: str) -> Path:
    """A password file in libpq's format that only this user can read. It is removed when Spark or the process ends."""
    with _password_lock:
        known = _password_files.get((user, password))
        if known is not None and known.exists():
            return known
        fields = ("*", "*", "*", user, password)
        line = ":".join(field if field == "*" else field.replace("\\", "\\\\").replace(":", "\\:") for field in fields)
        with tempfile.NamedTemporaryFile("w", prefix="password-", dir=private_directory(), delete=False) as file:
            file.write(line + "\n")
        path = _password_files[user, password] = Path(file.name)
        return path
