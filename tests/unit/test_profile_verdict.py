"""The verdict follows the scaling guide's rules, and "consistently" is 80 % of the samples."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pgtrickle.observability.sampling import SAMPLE, Sample, judge, plot

START = datetime(2026, 1, 1, tzinfo=UTC)
Moment = tuple[int, int, int]  # active, pool size, queue depth


def samples(*runs: tuple[int, Moment]) -> list[Sample]:
    """That many samples of each kind, one second apart."""
    moments = [moment for number, moment in runs for _ in range(number)]
    return [Sample(START + timedelta(seconds=n), *moment) for n, moment in enumerate(moments)]


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        # More than 90 % busy and a queue.
        ([(10, (4, 4, 1))], "undersized"),
        ([(8, (4, 4, 3)), (2, (1, 4, 0))], "undersized"),
        ([(7, (4, 4, 3)), (3, (3, 4, 0))], "fits"),
        ([(10, (4, 4, 0))], "fits"),  # busy, and nobody waits
        ([(10, (9, 10, 5))], "fits"),  # 90 % is not more than 90 %
        ([(10, (16, 16, 50))], "undersized"),  # the workers are the bottleneck, not the scheduler
        # A long queue before free workers.
        ([(10, (2, 4, 11))], "scheduler-bound"),
        ([(10, (1, 4, 11))], "scheduler-bound"),  # and not oversized: work is waiting
        ([(8, (3, 4, 20)), (2, (4, 4, 20))], "scheduler-bound"),
        ([(7, (3, 4, 20)), (3, (4, 4, 20))], "fits"),
        ([(10, (3, 4, 10))], "fits"),  # 10 is not more than 10
        # Less than half busy.
        ([(10, (1, 4, 0))], "oversized"),
        ([(10, (0, 4, 0))], "oversized"),
        ([(8, (1, 4, 0)), (2, (4, 4, 2))], "oversized"),
        ([(7, (1, 4, 0)), (3, (4, 4, 2))], "fits"),
        ([(10, (2, 4, 0))], "fits"),  # half is not less than half
        ([(1, (3, 4, 0))], "fits"),
    ],
)
def test_verdict(runs: list[tuple[int, Moment]], verdict: str) -> None:
    assert judge(samples(*runs)).verdict == verdict


def test_figures_behind_the_verdict() -> None:
    found = judge(samples((8, (4, 4, 6)), (2, (1, 4, 0))))
    assert (found.samples, found.seconds, found.pool_size) == (10, 9.0, 4)
    assert found.mean_utilisation == pytest.approx(0.85)
    assert (found.most_active, found.most_queued) == (4, 6)
    assert found.mean_queue_depth == pytest.approx(4.8)
    assert (found.saturated_share, found.idle_share, found.waiting_share) == (0.8, 0.2, 0.0)


def test_advice_names_the_setting() -> None:
    assert "max_dynamic_refresh_workers, for example to 8" in judge(samples((3, (4, 4, 2)))).advice
    assert "for example to 64" in judge(samples((3, (40, 40, 2)))).advice
    assert "second service" in judge(samples((3, (64, 64, 2)))).advice
    assert "reduce scheduler_interval_ms" in judge(samples((3, (2, 4, 12)))).advice
    assert "number of busy workers was 2" in judge(samples((4, (1, 8, 0)), (1, (2, 8, 0)))).advice
    # Free workers beside a queue are no reason to have fewer.
    assert "max_concurrent_refreshes" in judge(samples((3, (1, 8, 5)))).advice
    # An idle time says nothing about the pool.
    assert "under load" in judge(samples((3, (0, 4, 0)))).advice


def test_the_statement_is_the_guides() -> None:
    assert " ".join(SAMPLE.split()) == (
        "SELECT now() AS ts, (SELECT active_workers FROM pgtrickle.worker_pool_status()) AS active,"
        " (SELECT max_workers FROM pgtrickle.worker_pool_status()) AS pool_size,"
        " (SELECT COUNT(*) FROM pgtrickle.parallel_job_status(5) WHERE status = 'QUEUED') AS queue_depth;"
    )


@pytest.mark.parametrize("taken", [samples((1, (1, 4, 0))), samples((5, (4, 4, 30)), (5, (0, 2, 0)))])
def test_picture(taken: list[Sample], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(taken, judge(taken), tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
