"""An upper bound of the time that a unit waits for a worker, whatever else arrives."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pgtrickle.service.scheduling.fair_queue import FairQueue, ServerLimit, Share, Task
from pgtrickle.service.scheduling.units import Kind, Unit

KINDS: list[Kind] = ["GROUP", "FUSED", "SINGLETON"]
STARTS = 120
PATIENCE = 5.0  # the most: band 2, tier 3


def task(
    database: str = "a",
    *,
    kind: Kind = "SINGLETON",
    tier: int = 0,
    asked: bool = False,
    owner: int | None = 1,
    every: float = 60.0,
    at: float = 0.0,
    limit: ServerLimit | None = None,
) -> Task:
    unit = Unit("IMMEDIATE" if asked else kind, (1,), tier, asked, owner, every)
    return Task(database, unit, Share(64), lambda _: None, limit, at)


@dataclass
class Simulation:
    """A pool whose clock is a variable."""

    size: int
    queue: FairQueue
    arrivals: list[tuple[Task, float]]  # with the seconds that each takes

    def run(self) -> Iterator[tuple[Task, float, list[Task]]]:
        """Each start: the task, its time, and the waiting tasks that could have started."""
        arrivals = sorted(self.arrivals, key=lambda arrival: arrival[0].enqueued)
        seconds = {id(one): lasts for one, lasts in arrivals}
        waiting: list[Task] = []
        running: list[tuple[float, int, Task]] = []
        now, number = 0.0, 0
        while arrivals or waiting:
            while arrivals and arrivals[0][0].enqueued <= now:
                waiting.append(arrivals.pop(0)[0])
            busy = [one for _, _, one in running]
            chosen = self.queue.choose(waiting, busy, self.size, now)
            if chosen is not None:
                waiting.remove(chosen)
                yield (
                    chosen,
                    now,
                    [one for one in waiting if self.queue.choose([one], busy, self.size, now) is not None],
                )
                self.queue.begun(chosen)
                number += 1
                heapq.heappush(running, (now + seconds[id(chosen)], number, chosen))
                continue
            next_arrival = arrivals[0][0].enqueued if arrivals else float("inf")
            ends_first = running and running[0][0] <= next_arrival
            now = heapq.heappop(running)[0] if ends_first else next_arrival


def random_arrivals(chance: random.Random, databases: int, owners: int) -> list[tuple[Task, float]]:
    """More work than the workers can do, mostly from one owner, who also requests refreshes continuously."""
    found = []
    for _ in range(STARTS):
        hog = chance.random() < 0.7
        one = task(
            "0" if hog else str(chance.randrange(databases)),
            kind=chance.choice(KINDS),
            tier=0 if hog else chance.randrange(4),
            asked=chance.random() < (0.8 if hog else 0.1),
            owner=0 if hog else chance.randrange(owners),
            every=chance.choice([0.5, 1.0, 60.0]),
            at=chance.uniform(0, 25),
        )
        found.append((one, chance.expovariate(1.0)))
    return found


@pytest.mark.parametrize("_", range(10))
def test_a_task_without_patience_waits_for_one_round_of_the_others(_: int) -> None:
    seed = random.randrange(1_000_000)
    print("seed", seed)
    chance = random.Random(seed)
    databases, owners, size = chance.randint(1, 4), chance.randint(1, 3), chance.randint(1, 4)
    queue = FairQueue()
    for database in range(databases):
        queue.know(str(database), range(owners))
    passed: dict[int, int] = defaultdict(int)  # starts of others after its patience was over
    ahead: dict[int, int] = {}
    started = 0
    for chosen, now, could in Simulation(size, queue, random_arrivals(chance, databases, owners)).run():
        started += 1
        for one in could:
            if one.urgent_at <= now:
                same = [other for other in (*could, chosen) if other.lane == one.lane and other is not one]
                ahead.setdefault(id(one), sum(other.urgent_at <= one.urgent_at for other in same))
                passed[id(one)] += 1
                assert one.unit.patience <= min(PATIENCE, one.unit.every)
                assert passed[id(one)] <= (ahead[id(one)] + 1) * databases * owners * 2
                assert chosen.urgent_at <= now, "it went first although it could have waited"
    assert started == STARTS


def test_a_cold_one_goes_before_hot_ones_that_come_after_its_patience() -> None:
    queue = FairQueue()
    cold = task(tier=2, at=0.0)
    hot = [task(tier=0, at=float(second)) for second in range(20)]
    assert queue.choose([cold, hot[1]], [], 1, 1.0) is hot[1]
    assert queue.choose([cold, *hot[5:]], [], 1, 20.0) is cold


def test_a_short_schedule_has_little_patience() -> None:
    assert task(tier=2, every=0.5).unit.patience == 0.5
    assert task(tier=2).unit.patience == 4.0
    assert task(tier=2, asked=True).unit.patience == 0.0


def test_requests_and_schedules_of_an_owner_take_turns() -> None:
    queue, waiting = FairQueue(), [task(at=0.0) for _ in range(3)]
    waiting += [task(asked=True, at=50.0 + second) for second in range(3)]
    order = []
    for second in range(6):
        chosen = queue.choose(waiting, [], 1, 60.0 + second)
        assert chosen is not None
        waiting.remove(chosen)
        queue.begun(chosen)
        order.append(chosen.unit.asked)
    assert order in ([True, False] * 3, [False, True] * 3)


def test_one_owner_does_not_get_all_workers_while_there_are_others() -> None:
    queue = FairQueue()
    running, more = [task(asked=True) for _ in range(3)], task(asked=True)
    queue.know("a", [1])
    assert queue.choose([more], running, 4, 0.0) is more
    queue.know("a", [1, 2])
    assert queue.choose([more], running, 4, 0.0) is None
    assert queue.choose([more], running[:2], 4, 0.0) is more
    assert queue.choose([more], [*running[:2], task(owner=2)], 4, 0.0) is more
    assert queue.choose([more], [], 1, 0.0) is more
    queue.know("a", [1])
    queue.know("b", [1])
    assert queue.choose([more], running, 4, 0.0) is None
    queue.know("b", [])
    assert queue.choose([more], running, 4, 0.0) is more


def test_a_server_without_connections_to_spare_takes_no_worker() -> None:
    queue, limit = FairQueue(), ServerLimit("small", 1)
    running = [task("small/a", limit=limit)]
    other = task("large/b", at=1.0)
    assert queue.choose([task("small/c", owner=3, limit=limit), other], running, 4, 60.0) is other
