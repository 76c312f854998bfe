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

# For small jobs: one partition, no adaptive planning, no code generation. Each of these would cost more than the work.
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
    # A broadcast is a job of its own; rows in a single partition can be joined without one.
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.join.preferSortMergeJoin": "false",
    "spark.log.level": "ERROR",
    "spark.driver.maxResultSize": "0",
    # A task that runs out of memory fails, and no more: embedded executors share the JVM with everything else.
    "spark.executor.killOnFatalError.depth": "0",
    # One text holds many small aggregations, which run in one task; each takes at least a page.
    "spark.buffer.pageSize": "1m",
}
_lock = threading.Lock()
# For large jobs: more partitions, and adaptive planning.
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
    """The session. The first call starts it, which takes some seconds.

    The JVM gets these options, or by default those for using the class archive.
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
            # Executors on other machines must reach the driver; embedded ones only need the loopback address.
            for name, value in (_SETTINGS | (_local(directory) if is_embedded() else {})).items():
                builder = builder.config(name, value)
            try:
                with jvm_environment(directory, jvm_options, embedded=is_embedded()):
                    _session = _started(builder)
            except BaseException:
                kill_jvms()  # a JVM whose start was interrupted would never end
                raise
        return _session


def _local(directory: Path) -> dict[str, str]:
    return {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.authenticate": "true",  # other users of this machine can reach the ports; Spark generates a secret
        "spark.local.dir": str(directory),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
    }


def _started(builder: SparkSession.Builder) -> SparkSession:
    """Start the session, and keep the handler for Ctrl-C: Spark's own calls the JVM, even in the middle of a call."""
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
    """How many tasks of a large refresh may run at once, so that a slot stays free for other refreshes.

    None for a cluster, which has many slots.
    """
    match = re.fullmatch(r"local\[(\d+|\*)(?:,.*)?\]", _master())
    if not is_embedded():
        return None
    slots = 1 if match is None else _cores() if match[1] == "*" else int(match[1])
    return max(1, slots - 1)


def _master() -> str:
    # One slot more than there are processors: see large_tasks().
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
    """At exit, kill a JVM that another thread is starting: it would create the private directory again."""
    if os.getpid() == starter and _session is None:
        kill_jvms()


def check_java() -> str:
    """The output of `java -version`. Raises JavaMissingError if there is no Java that Spark can use."""
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
