"""Which moments a scheduler remembers, to bound the commit times of pending changes by what their snapshots saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

# A tick is forgotten where its neighbours are no further apart than this part of its age: so one of about its time remains,
# and all of the last minute.
SPACING = 8
LONGEST = timedelta(days=7)


@dataclass(frozen=True)
class Tick:
    """A snapshot, and a moment before it was taken."""

    at: datetime
    snapshot: str


def thinned(ticks: Sequence[Tick]) -> list[Tick]:
    """Ticks without those that can be missed; newest first, about eighty for a week."""
    kept = list(ticks[:1])
    for number, tick in enumerate(ticks[1:], start=2):
        age = ticks[0].at - tick.at
        is_oldest = number == len(ticks)
        if age <= LONGEST and (is_oldest or (kept[-1].at - ticks[number].at) * SPACING > age):
            kept.append(tick)
    return kept
