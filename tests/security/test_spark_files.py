"""Rows that Spark keeps on disk are in a directory that other accounts cannot read and that is removed with Spark."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.killable import REPOSITORY, is_dead
from tests.support.service import until

# Runs a job that shuffles and keeps rows on disk whenever it gets a line, and says where files are.
_PROGRAM = """
import json
import os
import sys
os.umask(0o022)
from pyspark import StorageLevel
from pgtrickle.refresh.compute.large import _password_file
from pgtrickle.spark.session import spark_session, stop_spark

def work():
    session = spark_session()
    session.conf.set("spark.sql.shuffle.partitions", "4")
    frame = session.range(10000).selectExpr("id % 100 AS k", "uuid() AS v").repartition(4, "k").groupBy("k").count()
    assert frame.persist(StorageLevel.DISK_ONLY).count() == 100
    context = session.sparkContext
    return [
        context._temp_dir,
        context._jvm.org.apache.spark.SparkFiles.getRootDirectory(),
        context._jvm.java.lang.System.getProperty("java.io.tmpdir"),
        session.conf.get("spark.sql.warehouse.dir").removeprefix("file:"),
        str(_password_file("somebody", "secret")),
    ]

for line in sys.stdin:
    print(json.dumps(work() if line == "work\\n" else stop_spark()), flush=True)
"""


class Child:
    """A process with its own Spark session, driven by commands."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def work(self) -> list[Path]:
        """The directories that the session uses."""
        return [Path(place) for place in self._tell("work") or ()]

    def stop_spark(self) -> None:
        assert self._tell("stop") is None

    def _tell(self, what: str) -> list[str] | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, file=self._process.stdin, flush=True)
        answer: list[str] | None = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def child(environment: dict[str, str]) -> Iterator[Child]:
    """A child that ends normally at the end of the block."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", "SPARK_LOCAL_DIRS")}
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=inherited | {"PYTHONPATH": str(REPOSITORY)} | environment,
    ) as process:
        try:
            yield Child(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(120) == 0
        except BaseException:
            process.kill()
            raise


def check_private(places: list[Path], base: Path) -> Path:
    """Assert that all files are below one directory of the base that other accounts cannot read."""
    (private,) = base.iterdir()
    written = {path.name.partition("_")[0] for path in private.rglob("*")}
    assert {"shuffle", "rdd"} <= written, "the job has left rows here"
    assert all(place.is_relative_to(private) for place in places), places
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert private.stat().st_uid == os.geteuid()
    assert stat.S_IMODE(places[-1].stat().st_mode) == 0o600, "the file with the password"
    return private


def test_files_are_private_and_removed_with_the_session(tmp_path: Path) -> None:
    base = tmp_path / "temporary"
    base.mkdir(mode=0o755)
    with child({"TMPDIR": str(base)}) as process:
        private = check_private(process.work(), base)
        process.stop_spark()
        assert not private.exists()
        # The JVM is still the same one, and has been told this name.
        assert check_private(process.work(), base) == private
    assert list(base.iterdir()) == [], "nothing is left after the end of the process"


def test_a_disk_that_was_chosen_for_spark_has_the_private_directory(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o755)
    with child({"SPARK_LOCAL_DIRS": f"{disk},{tmp_path}"}) as process:
        check_private(process.work(), disk)
    assert list(disk.iterdir()) == []


def test_an_interrupted_start_leaves_neither_files_nor_a_jvm(tmp_path: Path) -> None:
    """An abandoned JVM would create the directory again, readable by all, and stay."""
    program = "from pgtrickle.spark.session import spark_session; spark_session()"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        family: list[psutil.Process] = []

        def is_starting() -> bool:
            family[:] = psutil.Process(process.pid).children(recursive=True)
            return any(one.name() == "java" for one in family if not is_dead(one))

        try:
            until(is_starting, "a JVM")
            process.send_signal(signal.SIGINT)
            assert process.wait(120) != 0
            until(lambda: all(map(is_dead, family)), "the end of the JVM")
        finally:
            for one in [process, *family]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
    assert list(tmp_path.iterdir()) == []
