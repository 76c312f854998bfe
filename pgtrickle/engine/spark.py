"""Running the jobs of one refresh on Spark: one text, one job, whatever the number of stream tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pgtrickle.engine.fetch import Part
from pgtrickle.engine.jobs import Job
from pgtrickle.engine.session import spark_session
from pgtrickle.errors import RefreshError
from pgtrickle.query.plan import Fragment

# Spark's planning grows faster than the text: beyond this, several texts are quicker than one.
FUSED = 32


@dataclass(frozen=True)
class Input:
    """What one job reads. Fragments that were read together stand in one table."""

    job: Job
    tables: Mapping[Fragment, pa.Table]
    parts: Mapping[Fragment, Part]


def run_jobs(jobs: Sequence[Input]) -> list[pa.Table | None]:
    """The deltas of all jobs, in as few Spark jobs as are worth it."""
    return [delta for i in range(0, len(jobs), FUSED) for delta in _run_fused(jobs[i : i + FUSED])]


def _run_fused(jobs: Sequence[Input]) -> list[pa.Table | None]:
    """Each job's delta as a table of strings, weight first; None where it is empty. Starts nothing where all are."""
    relations = _Relations(together=len(jobs) > 1)
    texts: list[tuple[int, str]] = []
    width = max((len(item.job.columns) for item in jobs), default=0)
    for i, item in enumerate(jobs):
        text = item.job.spark_sql(partial(relations.name, item))
        if text is not None:
            texts.append((i, _uniform(i, text, item.job.columns, width)))
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
        if rows.num_rows:
            columns = jobs[i].job.columns
            picked = rows.select(["w", *(f"s{k}" for k in range(len(columns)))])
            results[i] = picked.rename_columns(["w", *columns])
    return results


@dataclass
class _Relations:
    """The tables that one text reads, each once: handing Spark a table costs the same whatever its rows."""

    together: bool  # whether several jobs may read of the same table
    _tables: dict[int, tuple[str, pa.Table]] = field(default_factory=dict)  # by identity

    def name(self, item: Input, fragment: Fragment) -> str | None:
        """What stands for a fragment in a FROM clause; None where it is empty."""
        table, part = item.tables[fragment], item.parts.get(fragment)
        if table.num_rows == 0:
            return None
        # Spark shuffles what it does not know to be one partition.
        hint = "/*+ COALESCE(1) */"
        if part is None or not self.together:
            return f"(SELECT {hint} * FROM {self._known(table)})"
        items = [f"{column} AS {name}" for name, column in part.slice.columns.items()]
        where = f" WHERE {part.slice.flag}" if part.slice.flag is not None else ""
        rows = f"SELECT {hint} {', '.join([*items, 'w'])} FROM {self._known(part.whole)}{where}"
        if fragment == item.job.plan and part.slice.columns:
            # Nothing above it adds up what cancels out in these columns alone.
            names = ", ".join(part.slice.columns)
            return f"(SELECT {names}, sum(w) AS w FROM ({rows}) GROUP BY {names} HAVING sum(w) <> 0)"
        return f"({rows})"

    def create(self, spark: SparkSession) -> None:
        for name, table in self._tables.values():
            spark.createDataFrame(table).createOrReplaceTempView(name)

    def _known(self, table: pa.Table) -> str:
        return self._tables.setdefault(id(table), (f"pgt_{len(self._tables)}", table))[0]


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
            "Nothing was written. If it ran out of memory, give it more with PGTRICKLE_SPARK_MEMORY (4g if not set).",
        ) from error


def _uniform(i: int, text: str, columns: Sequence[str], width: int) -> str:
    """The job's rows in the shape that all jobs of one text share."""
    items = [f"{i} AS st", "CAST(w AS BIGINT) AS w"]
    items += [f"{name} AS s{k}" for k, name in enumerate(columns)]
    items += [f"CAST(NULL AS STRING) AS s{k}" for k in range(len(columns), width)]
    return f"SELECT {', '.join(items)} FROM ({text})"
