"""The share of time that the service's comparisons may take."""

from __future__ import annotations

import pytest

from pgtrickle.service.scheduling import rotation
from pgtrickle.service.scheduling.rotation import Rotation


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rotation, "time", clock)
    return clock


@pytest.mark.parametrize("percent", [1, 10, 100])
def test_comparisons_take_their_share_of_the_time(clock: Clock, percent: int) -> None:
    turns, spent, begin = Rotation(), 0.0, clock.now
    for seconds in (2.0, 0.5, 7.0, 1.0):
        while not turns.take():
            clock.now += 0.25
        turns.begin()
        clock.now += seconds
        spent += seconds
        assert not turns.take(), "one at a time"
        turns.end(percent)
    while not turns.is_free:
        clock.now += 0.25
    assert spent / (clock.now - begin) == pytest.approx(percent / 100, rel=0.05)


def test_a_comparison_without_a_worker_costs_nothing(clock: Clock) -> None:
    turns = Rotation()
    assert turns.take()
    clock.now += 60
    turns.end(1)
    assert turns.take()
