"""Creating the archive of Spark's classes: a JVM runs small jobs and writes down the classes that it has loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pgtrickle.errors import PgtrickleError
from pgtrickle.spark.class_archive import QUIET, archive_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_WRITE_SECONDS = 600.0
_SMALL_JOB = """
    WITH r AS (SELECT /*+ COALESCE(1) */ CAST(s0 AS DECIMAL(38, 6)) AS n, s1 AS k, s2 AS f, w FROM pgt_prepare),
    j AS (SELECT a.k, a.n, a.w * b.w AS w FROM r AS a JOIN r AS b ON a.k <=> b.k LEFT JOIN r AS c ON c.n = b.n AND c.f)
    SELECT CAST(k AS STRING) AS k, CAST(sum(n * w) AS STRING) AS n, count(DISTINCT n) AS d, sum(w) AS w
    FROM j GROUP BY k HAVING sum(w) <> 0
    UNION ALL
    SELECT upper(k), CAST(n AS STRING), row_number() OVER (PARTITION BY k ORDER BY n), w FROM r
    WHERE EXISTS (SELECT 1 FROM j WHERE j.k = r.k) OR k IS NULL
"""


def make_archive() -> Path:
    """Create the archive, and return its path. Needs a process of its own, because it starts and ends the JVM."""
    from pgtrickle.spark.session import check_java, spark_session, stop_spark

    path = archive_path(check_java())
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    part = path.with_suffix(f".{os.getpid()}")
    try:
        session = spark_session((f"-XX:ArchiveClassesAtExit={part}", *QUIET))
        _run_small_jobs(session)
        gateway = session.sparkContext._gateway
        assert gateway is not None
        stop_spark()
        gateway.shutdown()
        gateway.proc.stdin.close()
        status = gateway.proc.wait(_WRITE_SECONDS)
        if not part.exists():
            raise PgtrickleError(
                f"Java did not write {part} and ended with status {status}",
                "Make sure that the disk has 200 MB left. Everything works without the file; Spark only starts more slowly.",
            )
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _run_small_jobs(session: SparkSession) -> None:
    """Run what refreshes do: rows from Arrow, joins, sums, windows, casts, rows to Arrow; small and large settings."""
    import pyarrow as pa

    from pgtrickle.spark.session import large_session

    rows = pa.table({"s0": ["1.5", "2.5"], "s1": ["a", None], "s2": [True, False], "w": [1, -1]})
    # Some classes that the first run loads are linked only by the next.
    for each in (*[session] * 3, large_session()):
        each.createDataFrame(rows).createOrReplaceTempView("pgt_prepare")
        each.sql(_SMALL_JOB).toArrow()
        each.catalog.dropTempView("pgt_prepare")
