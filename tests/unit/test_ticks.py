"""Which past ticks are kept."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

from pgtrickle.service.scheduling.ticks import LONGEST, SPACING, Tick, thinned


def test_few_ticks_are_kept_and_every_dropped_one_has_a_close_neighbour() -> None:
    seed = random.randrange(1_000_000)
    print("seed", seed)
    chance = random.Random(seed)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    kept: list[Tick] = []
    all_times = []
    for _ in range(5_000):
        at += timedelta(seconds=chance.uniform(4.5, 6))
        all_times.append(at)
        kept = thinned([Tick(at, ""), *kept])
        assert kept[0].at == at
    assert len(kept) < 100
    times = [tick.at for tick in kept]
    for time in all_times:
        if at - time < LONGEST and time >= times[-1]:
            nearest = max(other for other in times if other <= time)
            assert (time - nearest) * (SPACING - 1) <= at - time


def test_ticks_older_than_a_week_are_dropped() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    kept = thinned([Tick(now, ""), Tick(now - timedelta(days=1), ""), Tick(now - timedelta(days=9), "")])
    assert [tick.at for tick in kept] == [now, now - timedelta(days=1)]
