"""Combine due stream tables into units, which one worker refreshes in one go."""

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

# Slower stream tables get a unit of their own, because the others in a unit would wait for them.
SLOW_SECONDS = 2.0
# With sources of up to this many rows, a re-initialization is not slower than other refreshes.
SMALL_ROWS = 50_000
# One Spark job for many stream tables is cheap, but their rows are read and written one after the other.
MOST_FUSED = 128


@dataclass(frozen=True)
class Due:
    """A stream table that is due, or will be before the next tick."""

    pgt_id: int
    asked: bool  # there is a pending request
    updated_at: datetime  # when its definition was last changed
    seconds: float  # its own share of its last refresh, without the other stream tables of the unit
    fills_long: bool  # it is re-initialized, which takes a while
    tier: str
    due_in: float = 0.0  # seconds; if positive, tells when the next tick is needed
    databases: tuple[str, ...] = ()  # remote databases that it reads
    owner: int | None = None
    every: float = math.inf  # seconds between two refreshes by its schedule
    proven: bool = True  # its last refresh succeeded, so its duration is known

    @property
    def slow(self) -> bool:
        return self.fills_long or self.seconds > SLOW_SECONDS


@dataclass(frozen=True)
class Unit:
    """Stream tables of one database that one worker refreshes in one go.

    A unit of kind VERIFY is a single stream table, which is compared with its query.
    """

    kind: Kind
    ids: tuple[int, ...]
    tier: int
    asked: bool  # there is a pending request for one of them
    owner: int | None = None  # of all of them; None if they have several
    every: float = math.inf  # the shortest of their schedules, in seconds

    @property
    def priority(self) -> tuple[int, int]:
        return 0 if self.asked else BANDS[self.kind], self.tier

    @property
    def patience(self) -> float:
        """Seconds for which more urgent units that arrive later can go first."""
        return 0.0 if self.asked else min(self.every, float(sum(self.priority)))


def plan_units(due: Sequence[Due], graph: DependencyGraph, busy: Collection[int], *, tiered: bool) -> list[Unit]:
    """The units for what is due and not being refreshed already, in order of priority."""
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
    """The key of stream tables that may share a unit.

    A remote database that does not answer delays only the stream tables that read it. Requests, and stream tables whose
    last refresh did not succeed, may take any time; they delay only stream tables of the same owner.
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
