"""The scaling guide's profiling method: sample the load and the queue of the worker pool, and judge its size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import psycopg

from pgtrickle.catalog.install import latest_version, require_installed
from pgtrickle.errors import NotInstalledError

# As printed in the guide.
SAMPLE = """
SELECT now() AS ts,
(SELECT active_workers FROM pgtrickle.worker_pool_status()) AS active,
(SELECT max_workers FROM pgtrickle.worker_pool_status()) AS pool_size,
(SELECT COUNT(*) FROM pgtrickle.parallel_job_status(5)
WHERE status = 'QUEUED') AS queue_depth;
"""

CONSISTENTLY = 0.8  # what the guide calls "consistently", as a share of the samples
SATURATED = 0.9
IDLE = 0.5
LONG_QUEUE = 10
MOST_WORKERS = 64

Name = Literal["undersized", "oversized", "scheduler-bound", "fits"]


@dataclass(frozen=True)
class Sample:
    """The state of the worker pool at one moment."""

    ts: datetime
    active: int
    pool_size: int
    queue_depth: int

    @property
    def utilisation(self) -> float:
        return self.active / self.pool_size


@dataclass(frozen=True)
class Verdict:
    """The verdict on the pool by the guide's rules, with the figures behind it."""

    verdict: Name
    reason: str
    advice: str
    samples: int
    seconds: float
    pool_size: int
    mean_utilisation: float
    most_active: int
    mean_queue_depth: float
    most_queued: int
    saturated_share: float  # of the samples: utilisation above 90 % while jobs waited
    idle_share: float  # of the samples: utilisation below 50 %
    waiting_share: float  # of the samples: more than 10 jobs waited while workers were free


def require_pool_functions(conn: psycopg.Connection[Any]) -> None:
    """Refuse a catalog of an older release, which lacks the functions that show the worker pool."""
    if (version := require_installed(conn)) < latest_version():
        raise NotInstalledError(
            f"Database {conn.info.dbname} has catalog version {version}, and this command needs {latest_version()}",
            "Run `pgtrickle upgrade` as the catalog's owner.",
        )


def take_sample(conn: psycopg.Connection[Any]) -> Sample:
    """Take one sample. The connection must be in autocommit mode, because now() does not advance in a transaction."""
    row = conn.execute(SAMPLE.encode()).fetchone()
    assert row is not None
    return Sample(*row)


def take_samples(conn: psycopg.Connection[Any], seconds: float, interval: float) -> Iterator[Sample]:
    """Yield samples at a steady pace.

    A sample that took longer than the interval is followed by the next at once; missed ones are not made up for.
    """
    start = time.monotonic()
    due = start
    while True:
        yield take_sample(conn)
        now = time.monotonic()
        due = max(due + interval, now)
        if due - start > seconds - 1e-6:  # floating-point sums are not exact
            return
        time.sleep(due - now)


def judge(samples: Sequence[Sample]) -> Verdict:
    """The guide's verdict on the samples, of which there must be at least one."""

    def share(holds: Callable[[Sample], bool]) -> float:
        return sum(map(holds, samples)) / len(samples)

    saturated = share(lambda s: s.utilisation > SATURATED and s.queue_depth > 0)
    waiting = share(lambda s: s.queue_depth > LONG_QUEUE and s.active < s.pool_size)
    idle = share(lambda s: s.utilisation < IDLE)
    pool_size, most_active = max(s.pool_size for s in samples), max(s.active for s in samples)
    name: Name
    if saturated >= CONSISTENTLY:
        name = "undersized"
        reason = f"more than 90 % of the workers were busy while jobs waited, in {saturated:.0%} of the samples"
        advice = _advise_more(pool_size)
    elif waiting >= CONSISTENTLY:
        # Check this before the next rule: idle workers next to a queue do not mean that there are too many.
        name = "scheduler-bound"
        reason = f"more than {LONG_QUEUE} jobs waited while workers were free, in {waiting:.0%} of the samples"
        advice = (
            "The scheduler's loop is the bottleneck: reduce scheduler_interval_ms. If one database has the whole queue, it"
            " may be its share of the pool instead: max_concurrent_refreshes, per_database_worker_quota."
        )
    elif idle >= CONSISTENTLY:
        name = "oversized"
        reason = f"less than half of the workers were busy, in {idle:.0%} of the samples"
        advice = _advise_fewer(most_active, share(lambda s: s.queue_depth > 0) >= CONSISTENTLY)
    else:
        name = "fits"
        reason = "the pool was neither saturated nor idle in 80 % of the samples, and no long queue formed"
        advice = "Leave max_dynamic_refresh_workers unchanged."
    return Verdict(
        verdict=name,
        reason=reason,
        advice=advice,
        samples=len(samples),
        seconds=(samples[-1].ts - samples[0].ts).total_seconds(),
        pool_size=pool_size,
        mean_utilisation=sum(s.utilisation for s in samples) / len(samples),
        most_active=most_active,
        mean_queue_depth=sum(s.queue_depth for s in samples) / len(samples),
        most_queued=max(s.queue_depth for s in samples),
        saturated_share=saturated,
        idle_share=idle,
        waiting_share=waiting,
    )


def _advise_more(pool_size: int) -> str:
    if pool_size >= MOST_WORKERS:
        return f"{MOST_WORKERS} workers are the most that a service has: start a second service, or stretch schedules."
    return (
        f"Raise max_dynamic_refresh_workers, for example to {min(2 * pool_size, MOST_WORKERS)};"
        " `pgtrickle tune` shows whether the server has the connections."
    )


def _advise_fewer(most_active: int, queued: bool) -> str:
    if most_active == 0:
        return "Nothing ran during this time: profile again under load before you make the pool smaller."
    if queued:
        return (
            "But jobs waited while workers were free: check first whether a database's share of the pool is too small"
            " (max_concurrent_refreshes, per_database_worker_quota)."
        )
    return (
        f"The largest number of busy workers was {most_active}; max_dynamic_refresh_workers can be lowered towards that."
        " An idle worker costs a connection here, not a worker process of the server."
    )


def plot(samples: Sequence[Sample], verdict: Verdict, path: Path) -> None:
    """Plot utilisation and queue depth over time into a file; ImportError if matplotlib is not installed."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a window system
    from matplotlib.ticker import MaxNLocator

    seconds = [(s.ts - samples[0].ts).total_seconds() for s in samples]
    figure = Figure(figsize=(10, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.step(seconds, [100 * s.utilisation for s in samples], where="post", color="#1f77b4")
    upper.axhline(100 * SATURATED, color="#b00020", linewidth=1, linestyle="--", label="90 %: saturated above")
    upper.axhline(100 * IDLE, color="#9a9a9a", linewidth=1, linestyle="--", label="50 %: oversized below")
    upper.set(ylabel="busy workers, % of the pool", ylim=(0, 105))
    upper.set_title(f"{verdict.verdict}: {verdict.reason}", fontsize=9)
    lower.step(seconds, [s.queue_depth for s in samples], where="post", color="#e8842c")
    lower.axhline(LONG_QUEUE, color="#b00020", linewidth=1, linestyle="--", label=f"{LONG_QUEUE}: long above")
    lower.set(ylabel="jobs waiting", xlabel=f"seconds since {samples[0].ts:%Y-%m-%d %H:%M:%S %Z}")
    lower.set_ylim(0, max(1.2 * LONG_QUEUE, 1.05 * verdict.most_queued))
    lower.yaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in (upper, lower):
        panel.grid(alpha=0.3)
        panel.legend(loc="upper right", fontsize=8)
    figure.savefig(path, dpi=130)
