"""Running the jobs of one refresh on Spark: many stream tables in one text, a few texts side by side."""

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

from pgtrickle.engine.jobs import ZERO, Output
from pgtrickle.engine.relations import Input, Relations
from pgtrickle.engine.session import spark_session
from pgtrickle.errors import RefreshError

# Spark plans a text in one thread, and its time grows faster than the text: several are planned side by side, each with
# as many stream tables as make up for what a text costs by itself.
FEWEST = 5
MOST = 32
_CORES = os.cpu_count() or 1


def run_jobs(jobs: Sequence[Input]) -> list[pa.Table | None]:
    """The deltas of all jobs, in as few Spark jobs as are worth it."""
    size = min(max(-(-len(jobs) // _CORES), FEWEST), MOST)
    texts = [jobs[i : i + size] for i in range(0, len(jobs), size)]
    if len(texts) < 2:
        return _run_fused(jobs)
    return [delta for deltas in _threads().map(_run_fused, texts) for delta in deltas]


@cache
def _threads() -> ThreadPoolExecutor:
    """Kept, for each thread has a connection to the JVM, and a thread there."""
    return ThreadPoolExecutor(_CORES, "pgtrickle-spark")


def _run_fused(jobs: Sequence[Input]) -> list[pa.Table | None]:
    """Each job's delta as a table of strings, weight first; None where it is empty. Starts nothing where all are."""
    # A thread runs one text at a time: names of its own keep it from the rows of one that failed elsewhere and still runs.
    relations = Relations(jobs, f"pgt_{threading.get_ident()}")
    texts: list[tuple[int, str]] = []
    width = max((len(item.job.columns) for item in jobs), default=0)
    for i, item in enumerate(jobs):
        output = item.job.output(partial(relations.rows, item))
        if output is not None:
            texts.append((i, _uniform(i, output, width)))
    results: list[pa.Table | None] = [None] * len(jobs)
    if not texts:
        return results
    spark = spark_session()
    relations.create(spark)
    needed = " UNION ALL ".join(text for _, text in texts)
    with spark_errors():
        answer = spark.sql(needed).toArrow()
    for i, _ in texts:
        rows = answer.filter(pc.equal(answer.column("st"), i)) if len(texts) > 1 else answer
        job = jobs[i].job
        picked = rows.select(["w", *(f"s{k}" for k in range(len(job.columns)))]).rename_columns(["w", *job.columns])
        changed = picked.filter(_changed(picked, job.sums))
        results[i] = changed if changed.num_rows else None
    return results


def _changed(rows: pa.Table, sums: Sequence[str]) -> pa.ChunkedArray:
    """Which rows have a sum that is not zero. A sum of nothing is NULL."""
    changed = pa.chunked_array([pa.repeat(False, rows.num_rows)])
    for name in sums:
        text = pc.fill_null(rows.column(name).cast(pa.string()), "0")
        changed = pc.or_(changed, pc.invert(pc.match_substring_regex(text, ZERO)))
    return changed


@contextmanager
def spark_errors() -> Iterator[None]:
    """Turns Spark's errors into ours."""
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


def _uniform(i: int, output: Output, width: int) -> str:
    """The job's rows in the shape that all jobs of one text share."""
    padded = (*output.values, *["CAST(NULL AS STRING)"] * (width - len(output.values)))
    return replace(output, values=padded).select([f"s{k}" for k in range(width)], f"{i} AS st, ")
