"""Progress shown to users while Spark starts and runs: a line or a progress bar, without the JVM's output."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pgtrickle.spark.session import spark_is_running

# Seconds before the message. A Spark phase without rows ends at once, without starting Spark.
PATIENCE = 0.3
STARTING = "starting Spark, which takes some seconds…"
STEPS = {"cut": "reading changes", "fetch": "computing", "spark": "computing on Spark", "load": "writing"}


@contextmanager
def quiet_jvm() -> Iterator[None]:
    """Keep the stderr output of a JVM that is started inside the block off the terminal, until the JVM ends.

    Python's own stderr is unchanged. If the JVM cannot be started, its output is shown.
    """
    if spark_is_running():
        yield
        return
    # Without a handler, logging would print py4j's errors, which are raised as exceptions anyway.
    logging.getLogger().addHandler(logging.NullHandler())
    sys.stderr.flush()
    former_stream, former = sys.stderr, os.dup(2)
    with tempfile.TemporaryFile() as log, os.fdopen(former, "w", buffering=1) as stream:
        os.dup2(log.fileno(), 2)
        sys.stderr = stream
        try:
            yield
        except Exception:
            if not spark_is_running():
                log.seek(0)
                stream.write(log.read().decode(errors="replace"))
            raise
        finally:
            stream.flush()
            os.dup2(former, 2)
            sys.stderr = former_stream


class RefreshProgress:
    """Shows the steps of a refresh: as a progress bar on a terminal, as a single line elsewhere."""

    def __init__(self, total: int) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._total = total
        self._task = self._bar.add_task("reading changes", total=total) if self._bar is not None else None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_waiting()
        if self._bar is not None:
            self._bar.stop()

    def step(self, name: str) -> None:
        """Show a step; to be used as the engine's `on_step`."""
        self._stop_waiting()
        if name == "spark" and not spark_is_running():
            self._timer = threading.Timer(PATIENCE, self._say, (STARTING,))
            self._timer.daemon = True
            self._timer.start()
        elif self._bar is not None and self._task is not None:
            if name == "committed":
                self._bar.advance(self._task)
            elif name in STEPS:
                self._bar.update(self._task, description=STEPS[name])

    def _say(self, text: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=text)
        else:
            click.echo(text, err=True)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
