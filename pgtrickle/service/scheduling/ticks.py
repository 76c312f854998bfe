"""The past snapshots that a scheduler keeps, from which the commit times of pending changes can be bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

# A tick is dropped if its neighbours are no further apart than its age divided by this number. So one of about the same
# time always remains, and all ticks of the last minute.
SPACING = 8
LONGEST = timedelta(days=7)


@dataclass(frozen=True)
class Tick:
    """A snapshot and a time before it was taken."""

    at: datetime
    snapshot: str


def thinned(ticks: Sequence[Tick]) -> list[Tick]:
    """The ticks without those that are no longer needed, newest first; about eighty for a week."""
    kept = list(ticks[:1])
    for number, tick in enumerate(ticks[1:], start=2):
        age = ticks[0].at - tick.at
        is_oldest = number == len(ticks)
        if age <= LONGEST and (is_oldest or (kept[-1].at - ticks[number].at) * SPACING > age):
            kept.append(tick)
    return kept
