"""The Spark sessions of this process, one for small and one for large refreshes; Spark starts when one is first needed."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from pgtrickle.errors import JavaMissingError
from pgtrickle.spark.class_archive import archive_options
from pgtrickle.spark.private_files import jvm_environment, kill_jvms, private_directory, remove_private_directory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER_VARIABLE = "PGTRICKLE_SPARK_MASTER"
MEMORY_VARIABLE = "PGTRICKLE_SPARK_MEMORY"

# Small jobs: one partition, no adaptive planning, no code generation of any kind. Each would cost more than the work.
_SETTINGS = {
    "spark.app.name": "pgtrickle",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "1",
    "spark.default.parallelism": "1",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.caseSensitive": "true",
    # A broadcast is a job of its own; what is in one partition is joined where it is.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.join.preferSortMergeJoin": "false",
    "spark.log.level": "ERROR",
    "spark.driver.maxResultSize": "0",
    # One fused text holds many small aggregations in one task; each takes at least a page.
    "spark.buffer.pageSize": "1m",
}
_lock = threading.Lock()
# Large ones: more partitions, planned while they run.
_LARGE_SETTINGS = {
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
    "spark.sql.shuffle.partitions": "32",
    "spark.sql.autoBroadcastJoinThreshold": "10MB",
    "spark.sql.join.preferSortMergeJoin": "true",
}
_session: SparkSession | None = None
_large_session: SparkSession | None = None


def spark_is_running() -> bool:
    return _session is not None


def spark_session(jvm_options: tuple[str, ...] | None = None) -> SparkSession:
    """The session; the first call starts it, which takes some seconds.

    The JVM gets the options, or those for a quick start.
    """
    global _session
    with _lock:
        if _session is None:
            version = check_java()
            if jvm_options is None:
                jvm_options = archive_options(version)
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
            from pyspark.sql import SparkSession

            builder = SparkSession.builder.master(_master())
            builder = builder.config("spark.driver.memory", os.environ.get(MEMORY_VARIABLE, "4g"))
            directory = private_directory()
            atexit.register(_end_start, os.getpid())  # runs before the directory is removed
            # Executors on other machines must reach the driver; embedded ones need no address but this machine's own.
            for name, value in (_SETTINGS | (_local(directory) if is_embedded() else {})).items():
                builder = builder.config(name, value)
            try:
                with jvm_environment(directory, jvm_options, embedded=is_embedded()):
                    _session = _started(builder)
            except BaseException:
                kill_jvms()  # interrupted while it starts, one would stay for ever
                raise
        return _session


def _local(directory: Path) -> dict[str, str]:
    return {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.authenticate": "true",  # other accounts of this machine can reach its ports; Spark makes up a secret
        "spark.local.dir": str(directory),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
    }


def _started(builder: SparkSession.Builder) -> SparkSession:
    """The session; Ctrl-C stays what it was. Spark's own handler talks to the JVM, in the middle of whatever was said to it."""
    if threading.current_thread() is not threading.main_thread():
        return builder.getOrCreate()
    former = signal.getsignal(signal.SIGINT)
    try:
        return builder.getOrCreate()
    finally:
        signal.signal(signal.SIGINT, former)


def large_session() -> SparkSession:
    """The session of large refreshes: settings and temporary views of its own, over the same context."""
    global _large_session
    small = spark_session()
    with _lock:
        if _large_session is None:
            from pgtrickle.spark.executors import PostgresSource

            session = small.newSession()
            for name, value in _LARGE_SETTINGS.items():
                session.conf.set(name, value)
            session.dataSource.register(PostgresSource)
            _large_session = session
        # Makes it the active session of this thread, the only one in which Spark looks up the format of a writer.
        _large_session.createDataFrame([], "nothing INT")
        return _large_session


def is_embedded() -> bool:
    """Whether executors run on this machine, as this user."""
    return _master().startswith("local")


def large_tasks() -> int | None:
    """How many tasks of a large refresh run at a time, so that others find a free slot; None on a cluster, which has many."""
    match = re.fullmatch(r"local\[(\d+|\*)(?:,.*)?\]", _master())
    if not is_embedded():
        return None
    slots = 1 if match is None else _cores() if match[1] == "*" else int(match[1])
    return max(1, slots - 1)


def _master() -> str:
    # One more than there are processors: see large_tasks().
    return os.environ.get(MASTER_VARIABLE) or f"local[{_cores() + 1}]"


def _cores() -> int:
    return os.cpu_count() or 1


def stop_spark() -> None:
    """End the session, if there is one, and remove its files."""
    global _session, _large_session
    with _lock:
        if _session is not None:
            _session.stop()
            _session = _large_session = None
        remove_private_directory()


def _end_start(starter: int) -> None:
    """When the process ends: a JVM that another thread is starting would make the directory again."""
    if os.getpid() == starter and _session is None:
        kill_jvms()


def check_java() -> str:
    """What Java says of itself. Refuses, with the remedy, where Spark could not start."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    remedy = "Install a Java runtime 17 or newer (Debian: apt-get install openjdk-17-jre-headless) or set JAVA_HOME."
    if java is None or not Path(java).exists():
        raise JavaMissingError("Spark needs Java 17 or newer, and none was found", remedy)
    text = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    version = text.split('"')[1] if '"' in text else ""
    major = version.split(".")[0]
    if not major.isdigit() or int(major) < 17:
        raise JavaMissingError(f"Spark needs Java 17 or newer; {java} is {version or 'of unknown version'}", remedy)
    return text
