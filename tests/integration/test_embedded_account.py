"""For root, PostgreSQL runs as an ordinary account, which is created only once even by concurrent processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from uuid import uuid4

import pytest

from pgtrickle.embedded.account import server_account

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can create accounts")

PROCESSES = 4


@pytest.fixture
def unused_names() -> Iterator[list[str]]:
    names = [f"pgtest{uuid4().hex[:8]}" for _ in range(5)]
    yield names
    for name in names:
        subprocess.run(["userdel", name], check=False, capture_output=True)


def ask(names: list[str], together: Barrier, answers: Queue[tuple[str, int]]) -> None:
    for name in names:
        together.wait(60)
        account = server_account(name)
        assert account is not None
        answers.put((name, account.uid))


def test_concurrent_processes_get_the_same_account(unused_names: list[str]) -> None:
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(PROCESSES)
    answers: Queue[tuple[str, int]] = context.Queue()
    processes = [context.Process(target=ask, args=(unused_names, together, answers)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    given = sorted(answers.get(timeout=60) for _ in range(PROCESSES * len(unused_names)))
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    rows = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
    assert given == sorted((row[0], int(row[2])) for row in rows if row[0] in unused_names for _ in range(PROCESSES))
