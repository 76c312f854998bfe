"""From what is due to what a worker does: stream tables that are refreshed in one go."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pgtrickle.service.scheduling.graph import DependencyGraph

Kind = Literal["IMMEDIATE", "GROUP", "FUSED", "SINGLETON", "VERIFY"]
BANDS: dict[Kind, int] = {"IMMEDIATE": 0, "GROUP": 1, "FUSED": 2, "SINGLETON": 2, "VERIFY": 3}
TIERS = {"hot": 0, "warm": 1, "cold": 2, "frozen": 3}

# Who takes longer has a worker of its own: the others of a unit would wait for it.
SLOW_SECONDS = 2.0
# Up to so many rows behind it a stream table that starts over is no slower than others.
SMALL_ROWS = 50_000
# One Spark job for many is cheap, but their rows are read and written one after the other.
MOST_FUSED = 128


@dataclass(frozen=True)
class Due:
    """A stream table that is to be refreshed now."""

    pgt_id: int
    asked: bool  # somebody waits for it
    updated_at: datetime  # when its definition changed last
    seconds: float  # of its own in its last refresh, without those it was refreshed with
    fills_long: bool  # it starts over, and that is not a matter of moments
    tier: str
    due_in: float = 0.0  # seconds; later ones are told so that they are not looked for too late
    databases: tuple[str, ...] = ()  # others that it reads
    owner: int | None = None
    every: float = math.inf  # seconds between two refreshes by its schedule
    proven: bool = True  # its last refresh succeeded, so it is known how long one takes

    @property
    def slow(self) -> bool:
        return self.fills_long or self.seconds > SLOW_SECONDS


@dataclass(frozen=True)
class Unit:
    """Stream tables of one database that one worker refreshes in one go; or VERIFY: one, which it compares with its query."""

    kind: Kind
    ids: tuple[int, ...]
    tier: int
    asked: bool  # somebody waits for one of them
    owner: int | None = None  # of all of them; None where they have several
    every: float = math.inf  # the shortest of their schedules, in seconds

    @property
    def priority(self) -> tuple[int, int]:
        return 0 if self.asked else BANDS[self.kind], self.tier

    @property
    def patience(self) -> float:
        """Seconds for which more urgent units go first, even if they arrive later."""
        return 0.0 if self.asked else min(self.every, float(sum(self.priority)))


def plan_units(due: Sequence[Due], graph: DependencyGraph, busy: Collection[int], *, tiered: bool) -> list[Unit]:
    """Units for what is due and not already in work."""
    units: list[Unit] = []
    left = {item.pgt_id: item for item in due if item.pgt_id not in busy}
    for id_ in list(left):
        members = graph.groups.get(id_)
        if id_ in left and members is not None:
            here = {member: left.pop(member) for member in members if member in left}
            if not members & set(busy):
                units.append(_unit("GROUP", sorted(members), here.values(), tiered))
    together: dict[tuple[object, ...], list[Due]] = {}
    for item in left.values():
        together.setdefault(_company(item), []).append(item)
    for items in together.values():
        units += _split("IMMEDIATE", "IMMEDIATE", [item for item in items if item.asked], tiered)
        units += _split("FUSED", "SINGLETON", [item for item in items if not item.asked], tiered)
    return sorted(units, key=lambda unit: unit.priority)


def _company(item: Due) -> tuple[object, ...]:
    """Who may be refreshed in one go.

    A database that does not answer delays those that read it, and nobody else. Likewise an owner's requests and what was
    never refreshed without an error, which may take any time, delay this owner's stream tables only.
    """
    return item.asked, tuple(item.databases), item.owner if item.asked or not item.proven else None, item.proven


def _split(fused: Kind, alone: Kind, items: Sequence[Due], tiered: bool) -> list[Unit]:
    quick = [item for item in items if not item.slow]
    chunks = [quick[i : i + MOST_FUSED] for i in range(0, len(quick), MOST_FUSED)]
    units = [_unit(fused if len(chunk) > 1 else alone, [i.pgt_id for i in chunk], chunk, tiered) for chunk in chunks]
    return units + [_unit(alone, [item.pgt_id], [item], tiered) for item in items if item.slow]


def _unit(kind: Kind, ids: Sequence[int], items: Collection[Due], tiered: bool) -> Unit:
    tier = min(TIERS[item.tier] for item in items) if tiered else 0
    owners = {item.owner for item in items}
    owner = owners.pop() if len(owners) == 1 else None
    return Unit(kind, tuple(ids), tier, any(item.asked for item in items), owner, min(item.every for item in items))
