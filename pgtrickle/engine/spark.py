"""Running the jobs of one refresh on Spark: one text, one job, whatever the number of stream tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from pgtrickle.engine.jobs import Job
from pgtrickle.engine.session import spark_session
from pgtrickle.errors import RefreshError
from pgtrickle.query.plan import Fragment

# Spark's planning grows faster than the text: beyond this, several texts are quicker than one.
FUSED = 32


def run_jobs(jobs: Sequence[tuple[Job, Mapping[Fragment, pa.Table]]]) -> list[pa.Table | None]:
    """The deltas of all jobs, in as few Spark jobs as are worth it."""
    return [delta for i in range(0, len(jobs), FUSED) for delta in _run_fused(jobs[i : i + FUSED])]


def _run_fused(jobs: Sequence[tuple[Job, Mapping[Fragment, pa.Table]]]) -> list[pa.Table | None]:
    """Each job's delta as a table of strings, weight first; None where it is empty. Starts nothing where all are."""
    names: dict[int, str] = {}
    used: dict[str, pa.Table] = {}
    texts: list[tuple[int, str]] = []
    width = max((len(job.columns) for job, _ in jobs), default=0)
    for i, (job, tables) in enumerate(jobs):
        mapping: dict[Fragment, str | None] = {}
        for fragment, table in tables.items():
            if table.num_rows == 0:
                mapping[fragment] = None
                continue
            name = names.setdefault(id(table), f"pgt_{len(names)}")
            used[name] = table
            mapping[fragment] = name
        text = job.spark_sql(mapping)
        if text is not None:
            texts.append((i, _uniform(i, text, job.columns, width)))
    results: list[pa.Table | None] = [None] * len(jobs)
    if not texts:
        return results
    spark = spark_session()
    needed = " UNION ALL ".join(text for _, text in texts)
    for name, table in used.items():
        if f" {name}" in needed:
            # Spark shuffles what it does not know to be one partition.
            spark.createDataFrame(table).coalesce(1).createOrReplaceTempView(name)
    try:
        answer = spark.sql(needed).toArrow()
    except (PySparkException, Py4JError) as error:
        causes = [line.strip() for line in str(error).splitlines() if line.strip().startswith("Caused by: ")]
        reason = causes[-1].removeprefix("Caused by: ") if causes else str(error).splitlines()[0]
        raise RefreshError(
            f"Spark could not compute the change: {reason}",
            "Nothing was written. If it ran out of memory, give it more with PGTRICKLE_SPARK_MEMORY (4g if not set).",
        ) from error
    for i, _ in texts:
        rows = answer.filter(pc.equal(answer.column("st"), i)) if len(texts) > 1 else answer
        if rows.num_rows:
            columns = jobs[i][0].columns
            picked = rows.select(["w", *(f"s{k}" for k in range(len(columns)))])
            results[i] = picked.rename_columns(["w", *columns])
    return results


def _uniform(i: int, text: str, columns: Sequence[str], width: int) -> str:
    """The job's rows in the shape that all jobs of one text share."""
    items = [f"{i} AS st", "CAST(w AS BIGINT) AS w"]
    items += [f"{name} AS s{k}" for k, name in enumerate(columns)]
    items += [f"CAST(NULL AS STRING) AS s{k}" for k in range(len(columns), width)]
    return f"SELECT {', '.join(items)} FROM ({text})"
