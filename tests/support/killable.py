"""A refresh in a separate process that stops at a named step, so that it can be killed there or left waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

REPOSITORY = Path(__file__).parents[2]
# Starting Spark alone takes half a minute if many processes share two cores.
_TIMEOUT = 180.0

# Not a step of the refresh but a moment within a step: Spark is running its job.
RUNNING_JOB = "running job"

_PROGRAM = """
import sys
import pgtrickle
from tests.support.killable import RUNNING_JOB, freeze_running_job
dsn, step, names = sys.argv[1], sys.argv[2], sys.argv[3:]
steps = []
def stop(name):
    steps.append(name)
    if name == step:
        print("reached", name, flush=True)
        sys.stdin.readline()
    if name == "spark" and step == RUNNING_JOB:
        freeze_running_job(steps)
with pgtrickle.connect(dsn, on_step=stop) as db:
    for result in db.refresh(names):
        print("done", result.name, result.action, flush=True)
"""


def freeze_running_job(steps: list[str]) -> None:
    """In the child: freeze the JVM as soon as Spark is running a task, and report it; then answer queries."""
    threading.Thread(target=_freeze, args=(steps,), daemon=True).start()


def _freeze(steps: list[str]) -> None:
    from pgtrickle.spark.session import spark_session

    tracker = spark_session().sparkContext.statusTracker()

    def active_tasks() -> int:
        jobs = [job for id_ in tracker.getActiveJobsIds() if (job := tracker.getJobInfo(id_)) is not None]
        stages = [stage for job in jobs for id_ in job.stageIds if (stage := tracker.getStageInfo(id_)) is not None]
        return sum(stage.numActiveTasks for stage in stages)

    while not (tasks := active_tasks()):
        continue  # no sleep: each query is a round trip to the JVM
    (jvm,) = (child for child in psutil.Process().children() if child.name() == "java")
    jvm.suspend()
    os.waitid(os.P_PID, jvm.pid, os.WSTOPPED | os.WNOWAIT)  # until the last of its threads has stopped
    print(f"reached {RUNNING_JOB}", flush=True)
    for _ in sys.stdin:
        print(tasks, jvm.pid, steps[-1], flush=True)


@dataclass(frozen=True)
class FrozenJob:
    """The child's report on the Spark job in which it is frozen."""

    active_tasks: int  # when the JVM was frozen
    jvm: int
    step: str  # the last step that the refresh reached


class StoppedRefresh:
    """A child process whose refresh waits at a step until it is released or killed."""

    def __init__(self, dsn: str, step: str, names: list[str]) -> None:
        self.step = step
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, dsn, step, *names],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # its JVM is in the same process group and dies with it
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def await_step(self) -> None:
        """Wait until the child has reached its step; raise an AssertionError with its output if it ended before."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.strip() != f"reached {self.step}":
            output, errors = self._process.communicate(timeout=_TIMEOUT)
            raise AssertionError(f"the child ended before step {self.step}:\n{line}{output}\n{errors}")

    def frozen_job(self) -> FrozenJob:
        """Query a child that is frozen in a running job."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        tasks, jvm, step = self._process.stdout.readline().split()
        return FrozenJob(int(tasks), int(jvm), step)

    def let_go(self) -> tuple[int, str, str]:
        """Let the child finish; return its exit code, output and errors."""
        output, errors = self._process.communicate("\n", timeout=_TIMEOUT)
        return self._process.returncode, output, errors

    def kill(self) -> None:
        """Kill the child and its JVM with SIGKILL, so that they cannot clean up."""
        if self._process.poll() is None:
            family = psutil.Process(self._process.pid).children(recursive=True)
            os.killpg(self._process.pid, signal.SIGKILL)
            _await_death(family)
        self._process.wait(_TIMEOUT)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None and not stream.closed:
                stream.close()


def is_dead(process: psutil.Process) -> bool:
    """Whether the process is gone or a zombie that its new parent has not reaped yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _await_death(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while not all(map(is_dead, processes)):
        assert time.monotonic() < deadline, f"killed, but still there: {processes}"
        time.sleep(0.01)


@contextmanager
def stopped_at(dsn: str, step: str, *names: str) -> Iterator[StoppedRefresh]:
    """A refresh of the named stream tables in another process, which has reached the step and waits there."""
    with StoppedRefresh(dsn, step, list(names)) as child:
        child.await_step()
        yield child
