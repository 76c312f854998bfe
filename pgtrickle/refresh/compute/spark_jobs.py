"""Running the jobs of one refresh on Spark: many stream tables in one text, and a few texts concurrently."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from pgtrickle.compile.spark.compiler import SHARED
from pgtrickle.errors import RefreshError
from pgtrickle.refresh.compute.relations import Relations
from pgtrickle.refresh.compute.shared_text import Input, Sharers, share
from pgtrickle.refresh.planning.jobs import ZERO, Output
from pgtrickle.spark.session import spark_session

# Spark plans a text in one thread, and the time grows faster than the text. So several texts are planned concurrently,
# each with enough stream tables to make up for the fixed cost of a text.
FEWEST = 5
MOST = 32
MOST_OPERATORS = 1500  # of one text, unless one stream table has more
_CORES = os.cpu_count() or 1


def run_jobs(jobs: Sequence[Input]) -> list[pa.Table | None]:
    """The deltas of all jobs as tables of strings, weight first, or None if empty. If all are, Spark is not started."""
    sharers = share(jobs)
    texts = _texts(sharers)
    answers = map(_run_text, texts) if len(texts) < 2 else _threads().map(_run_text, texts)
    deltas: dict[int, pa.Table | None] = {}
    for some, answer in zip(texts, answers, strict=True):
        deltas |= _deltas(some, answer)
    return [deltas.get(number) for number in range(len(jobs))]


def _texts(sharers: Sequence[Sharers]) -> list[list[Sharers]]:
    """Distribute the jobs over texts."""
    size = min(max(-(-len(sharers) // _CORES), FEWEST), MOST)
    texts: list[list[Sharers]] = []
    operators = 0
    for some in sharers:
        own = some.first[1].job.plan.operators
        if not texts or len(texts[-1]) == size or operators + own > MOST_OPERATORS:
            texts.append([])
            operators = 0
        texts[-1].append(some)
        operators += own
    return texts


@cache
def _threads() -> ThreadPoolExecutor:
    """The threads that run texts. They are kept, because each has a connection to the JVM and a thread there."""
    return ThreadPoolExecutor(_CORES, "pgtrickle-spark")


def _run_text(sharers: Sequence[Sharers]) -> pa.Table:
    """The rows of all jobs of one text: number, weight and values."""
    # A thread runs one text at a time. Table names per thread keep a text that still runs after a failure in another
    # thread from reading these rows.
    relations = Relations(sharers, f"pgt_{threading.get_ident()}")
    width = max(len(some.first[1].job.columns) for some in sharers)
    selects = []
    for some in sharers:
        number, item = some.first
        shared = SHARED if some.share else ()
        rows = partial(relations.shared_rows, some) if shared else partial(relations.rows, item)
        output = item.job.output(rows, shared)
        assert output is not None
        selects.append(_uniform(number, output, width, shared))
    with spark_errors():
        spark = spark_session()
        relations.create(spark)
        return spark.sql(" UNION ALL ".join(selects)).toArrow()


def _deltas(sharers: Sequence[Sharers], answer: pa.Table) -> dict[int, pa.Table | None]:
    """The delta of each job in the result of a text."""
    jobs = {number: item.job for some in sharers for number, item in some.jobs.items()}
    deltas: dict[int, pa.Table | None] = {}
    for number, job in jobs.items():
        rows = answer.filter(pc.equal(answer.column(SHARED[0]), number)) if len(jobs) > 1 else answer
        picked = rows.select(["w", *(f"s{k}" for k in range(len(job.columns)))]).rename_columns(["w", *job.columns])
        changed = picked.filter(_changed(picked, job.sums))
        deltas[number] = changed if changed.num_rows else None
    return deltas


def _changed(rows: pa.Table, sums: Sequence[str]) -> pa.ChunkedArray:
    """For each row, whether some sum is not zero. The sum of no rows is NULL and counts as zero."""
    changed = pa.chunked_array([pa.repeat(False, rows.num_rows)])
    for name in sums:
        text = pc.fill_null(rows.column(name).cast(pa.string()), "0")
        changed = pc.or_(changed, pc.invert(pc.match_substring_regex(text, ZERO)))
    return changed


@contextmanager
def spark_errors() -> Iterator[None]:
    """Turn Spark's errors into RefreshError."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        causes = [line.strip() for line in str(error).splitlines() if line.strip().startswith("Caused by: ")]
        reason = causes[-1].removeprefix("Caused by: ") if causes else str(error).splitlines()[0]
        raise RefreshError(
            f"Spark could not compute the change: {reason}",
            "Nothing was written. If it ran out of memory, give it more with PGTRICKLE_SPARK_MEMORY (4g if not set);"
            " if executors could not reach the database, docs/reference/spark.md says what they need.",
        ) from error


def _uniform(number: int, output: Output, width: int, shared: tuple[str, ...]) -> str:
    """A query for a job's rows with the columns that all jobs of one text have in common."""
    padded = (*output.values, *["CAST(NULL AS STRING)"] * (width - len(output.values)))
    more = "" if shared else f"{number} AS {SHARED[0]}, "
    return replace(output, values=padded).select([f"s{k}" for k in range(width)], more, shared)
