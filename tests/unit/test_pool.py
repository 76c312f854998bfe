"""How the worker pool chooses tasks."""

from __future__ import annotations

import threading

import pytest

from pgtrickle.service.pool import Pool
from pgtrickle.service.scheduling.fair_queue import Share, Task
from pgtrickle.service.scheduling.units import Kind, Unit


@pytest.mark.parametrize(
    ("share", "running", "busy", "size", "allowed"),
    [
        (Share(4), 3, 3, 8, True),
        (Share(4), 4, 4, 8, False),  # its own cap
        (Share(64), 3, 8, 8, False),  # no worker is free
        (Share(64, 4), 3, 3, 10, True),
        (Share(64, 4), 5, 5, 10, True),  # a burst to one and a half times the quota
        (Share(64, 4), 6, 6, 10, False),
        (Share(64, 4), 3, 8, 10, True),  # crowded: the quota is still there
        (Share(64, 4), 4, 8, 10, False),  # crowded: no burst
        (Share(64, 3), 4, 4, 10, True),  # a burst is rounded up
        (Share(64, 3), 5, 5, 10, False),
    ],
)
def test_quota_and_burst(share: Share, running: int, busy: int, size: int, allowed: bool) -> None:
    assert share.allows(running, busy, size) is allowed


def unit(kind: Kind = "SINGLETON", tier: int = 0, *, asked: bool = False) -> Unit:
    return Unit(kind, (1,), tier, asked)


class Recorder:
    """Records the order in which tasks start; each waits until it is released."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def task(self, name: str, database: str, what: Unit, share: Share) -> Task:
        def work(number: int) -> None:
            self.started.append(name)
            self.entered.release()
            self.gate.acquire()

        return Task(database, what, share, work)


def test_urgent_ones_first_and_no_database_starves() -> None:
    recorder, pool = Recorder(), Pool(1)
    share = Share(4)
    pool.submit(recorder.task("first", "a", unit(), share))
    recorder.entered.acquire()
    for name, database, what in [
        ("a2", "a", unit()),
        ("a3", "a", unit()),
        ("cold", "b", unit(tier=2)),
        ("group", "b", unit("GROUP")),
        ("asked", "b", unit(asked=True)),
    ]:
        pool.submit(recorder.task(name, database, what, share))
    for _ in range(5):
        recorder.gate.release()
        recorder.entered.acquire()
    assert recorder.started == ["first", "asked", "group", "a2", "a3", "cold"]
    recorder.gate.release()
    assert pool.stop(10)


def test_a_flood_of_one_database_leaves_workers_for_the_other() -> None:
    recorder, pool = Recorder(), Pool(4)
    quota = Share(4, 2)
    for i in range(10):
        pool.submit(recorder.task(f"flood {i}", "a", unit(), quota))
    for _ in range(3):  # the burst
        recorder.entered.acquire()
    assert pool.active == 3
    pool.submit(recorder.task("other", "b", unit(), quota))
    recorder.entered.acquire()
    assert recorder.started[-1] == "other"
    for _ in range(40):
        recorder.gate.release()
    assert pool.stop(10)


def test_a_pool_grows_and_shrinks_and_stops_only_when_work_is_done() -> None:
    recorder, pool = Recorder(), Pool(1)
    for i in range(3):
        pool.submit(recorder.task(str(i), "a", unit(), Share(4)))
    recorder.entered.acquire()
    assert (pool.active, pool.queued) == (1, 2)
    pool.resize(2)
    pool.submit(recorder.task("3", "a", unit(), Share(4)))
    recorder.entered.acquire()
    assert (pool.active, pool.queued) == (2, 2)
    assert pool.stop(0.01) is False
    assert pool.queued == 0
    recorder.gate.release()
    recorder.gate.release()
    assert pool.stop(10)
