"""Spark's classes, loaded and checked once for this machine: the JVM maps them from a file instead of reading 200 jars.

Starting Spark and running the first small job takes 14 s of wall time and 23 s of processor time without the file, 8.5 s
and 14 s with it (two cores, Java 17). `pgtrickle prepare` makes the file; whoever starts Spark uses it if it fits.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from pgtrickle.errors import PgtrickleError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Where the file does not fit, say because a jar was replaced, the JVM goes on without it and says nothing.
_QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off")
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


def archive_options(java_version: str) -> tuple[str, ...]:
    """The JVM's options for using the file; none where there is no file that we can trust."""
    path = archive_path(java_version)
    return (f"-XX:SharedArchiveFile={path}", "-Xshare:auto", *_QUIET) if _is_ours(path) else ()


def archive_path(java_version: str) -> Path:
    """Another Java or another Spark needs another file."""
    import pyspark

    home = str(Path(pyspark.__file__).parent)
    key = hashlib.sha256(f"{java_version}\n{pyspark.__version__}\n{home}".encode()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "pgtrickle" / f"spark-{key}.jsa"


def _is_ours(path: Path) -> bool:
    """What is in it becomes code of this process: nobody else may have written it."""
    try:
        found = [path.lstat(), path.parent.lstat()]
    except OSError:
        return False
    return stat.S_ISREG(found[0].st_mode) and all(
        status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for status in found
    )


def make_archive() -> Path:
    """Make the file: a JVM runs small jobs and writes down, as it ends, what it had loaded. For a process of its own."""
    from pgtrickle.spark.session import check_java, spark_session, stop_spark

    path = archive_path(check_java())
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    part = path.with_suffix(f".{os.getpid()}")
    try:
        session = spark_session((f"-XX:ArchiveClassesAtExit={part}", *_QUIET))
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
                "See that the disk has 200 MB left. Everything works without the file; Spark only starts more slowly.",
            )
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _run_small_jobs(session: SparkSession) -> None:
    """What refreshes do: rows from Arrow, joins, sums, windows, casts, rows to Arrow; small and large settings."""
    import pyarrow as pa

    from pgtrickle.spark.session import large_settings

    rows = pa.table({"s0": ["1.5", "2.5"], "s1": ["a", None], "s2": [True, False], "w": [1, -1]})
    for _ in range(3):  # a class that the first run needs may only be linked by the next
        session.createDataFrame(rows).createOrReplaceTempView("pgt_prepare")
        session.sql(_SMALL_JOB).toArrow()
    with large_settings():
        session.sql(_SMALL_JOB).toArrow()
    session.catalog.dropTempView("pgt_prepare")
