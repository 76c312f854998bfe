"""Run two commands concurrently, the first held at a chosen point until the second has ended or waits for a lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psycopg

import pgtrickle
from tests.support.database import TestDatabase

Command = Callable[[pgtrickle.Database], None]
SECONDS = 90.0  # after which a command is considered to hang


class HangsError(Exception):
    """A command that did not end."""


@dataclass
class Moment:
    """The point at which the first command is held: a step of a refresh, or just before its commit."""

    step: str | None
    reached: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def __call__(self, step: str) -> None:
        if step == self.step and not self.reached.is_set():
            self.hold()

    def hold(self) -> None:
        self.reached.set()
        if not self.over.wait(SECONDS):
            raise HangsError


def run_both(database: TestDatabase, first: Command, second: Command, step: str | None) -> list[Exception]:
    """Run both commands and return their errors.

    With a step, the first command is a refresh, which is held there. Otherwise it is held before it commits.
    """
    moment = Moment(step)
    errors: list[Exception] = []
    pids: list[int] = []
    done = threading.Event()

    def begin() -> None:
        try:
            with pgtrickle.connect(database.direct_dsn, on_step=moment) as db:
                if step is not None:
                    first(db)
                else:
                    with db.conn.transaction():
                        first(db)
                        moment.hold()
        except Exception as error:
            errors.append(error)
        finally:
            moment.reached.set()

    def follow() -> None:
        try:
            with pgtrickle.connect(database.direct_dsn) as db:
                pids.append(db.conn.info.backend_pid)
                second(db)
        except Exception as error:
            errors.append(error)
        finally:
            done.set()

    threads = [threading.Thread(target=begin, daemon=True), threading.Thread(target=follow, daemon=True)]
    threads[0].start()
    if not moment.reached.wait(SECONDS):
        raise HangsError("the first command")
    threads[1].start()
    _await_end_or_wait(database, pids, done)
    moment.over.set()
    for thread, name in zip(threads, ("first", "second"), strict=True):
        thread.join(SECONDS)
        if thread.is_alive():
            raise HangsError(f"the {name} command")
    return errors


def _await_end_or_wait(database: TestDatabase, pids: list[int], done: threading.Event) -> None:
    """Wait until the second command has ended or waits for a lock."""
    deadline = time.monotonic() + SECONDS
    with psycopg.connect(database.superuser_dsn, autocommit=True) as conn:
        while time.monotonic() < deadline:
            waits = conn.execute(
                "SELECT FROM pg_stat_activity WHERE pid = ANY (%s) AND wait_event_type = 'Lock'", (pids,)
            ).fetchone()
            if done.wait(0.01) or waits is not None:
                return
    raise HangsError("the second command neither ends nor waits for a lock")
