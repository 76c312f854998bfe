"""Timing: clocks, medians, the Spark reference, and what a Spark job consists of."""

from __future__ import annotations

import contextlib
import io
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pgtrickle.spark.session import spark_session

REFERENCE_ROWS = 1000
WARM_UP_JOBS = 40
DRIVER_MEMORY = "8g"


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def median(values: list[float]) -> float:
    return statistics.median(values)


def reference_rows() -> pa.Table:
    """As many rows as a small change has, in the shape of `src`."""
    numbers = range(REFERENCE_ROWS)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "region": [("north", "south", "east", "west", "central")[i % 5] for i in numbers],
            "category": ["ABCD"[i % 4] for i in numbers],
            "amount": pa.array([i * 7919 % 10000 for i in numbers], pa.int64()),
            "score": pa.array([i % 100 for i in numbers], pa.int64()),
        }
    )


def reference(rows: pa.Table) -> None:
    """What the targets are multiples of: one aggregation by Spark over Arrow rows, in the product's own session."""
    spark = spark_session()
    spark.createDataFrame(rows).createOrReplaceTempView("reference_rows")
    text = "SELECT region, sum(amount) AS total, count(*) AS cnt FROM reference_rows GROUP BY region"
    assert spark.sql(text).toArrow().num_rows == 5


def warm_up() -> None:
    """Enough jobs for the JVM to have compiled what a small job runs through."""
    # More than the default, so that collecting garbage does not blur what is measured.
    os.environ.setdefault("PYSPARK_SUBMIT_ARGS", f"--driver-memory {DRIVER_MEMORY} pyspark-shell")
    rows = reference_rows()
    for _ in range(WARM_UP_JOBS):
        reference(rows)


@dataclass
class SparkJob:
    """What Spark was given in one refresh."""

    statements: int = 0
    rows_in: int = 0
    operators: list[str] = field(default_factory=list)


@contextmanager
def watch_spark() -> Iterator[SparkJob]:
    """Collect rows and physical operators of the Spark SQL that runs in the block (which is not timed)."""
    spark, seen = spark_session(), SparkJob()
    run, create = spark.sql, spark.createDataFrame

    def watched_sql(*args: Any, **kwargs: Any) -> Any:
        frame = run(*args, **kwargs)
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            frame.explain()
        seen.statements += 1
        seen.operators += re.findall(r"^[\s:+\-*(\d)]*([A-Z]\w+)", text.getvalue(), re.MULTILINE)
        return frame

    def watched_create(data: Any, *args: Any, **kwargs: Any) -> Any:
        seen.rows_in += data.num_rows
        return create(data, *args, **kwargs)

    vars(spark).update(sql=watched_sql, createDataFrame=watched_create)
    try:
        yield seen
    finally:
        del vars(spark)["sql"], vars(spark)["createDataFrame"]
