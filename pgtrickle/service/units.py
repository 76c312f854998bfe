"""From what is due to what a worker does: stream tables that are refreshed in one go."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pgtrickle.service.dag import Dag

Kind = Literal["IMMEDIATE", "GROUP", "FUSED", "SINGLETON"]
BANDS: dict[Kind, int] = {"IMMEDIATE": 0, "GROUP": 1, "FUSED": 2, "SINGLETON": 2}
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

    @property
    def slow(self) -> bool:
        return self.fills_long or self.seconds > SLOW_SECONDS


@dataclass(frozen=True)
class Unit:
    """Stream tables of one database that one worker refreshes in one go."""

    kind: Kind
    ids: tuple[int, ...]
    tier: int
    asked: bool  # somebody waits for one of them

    @property
    def priority(self) -> tuple[int, int]:
        return 0 if self.asked else BANDS[self.kind], self.tier


def plan_units(due: Sequence[Due], dag: Dag, busy: Collection[int], *, tiered: bool) -> list[Unit]:
    """Units for what is due and not already in work."""
    units: list[Unit] = []
    left = {item.pgt_id: item for item in due if item.pgt_id not in busy}
    for id_ in list(left):
        members = dag.groups.get(id_)
        if id_ in left and members is not None:
            here = {member: left.pop(member) for member in members if member in left}
            if not members & set(busy):
                units.append(_unit("GROUP", sorted(members), here.values(), tiered))
    asked = [item for item in left.values() if item.asked]
    rest = [item for item in left.values() if not item.asked]
    # A database that does not answer delays those that read it, and nobody else.
    for databases in sorted({tuple(item.databases) for item in left.values()}):
        units += _split("IMMEDIATE", "IMMEDIATE", [i for i in asked if tuple(i.databases) == databases], tiered)
        units += _split("FUSED", "SINGLETON", [i for i in rest if tuple(i.databases) == databases], tiered)
    return sorted(units, key=lambda unit: unit.priority)


def _split(fused: Kind, alone: Kind, items: Sequence[Due], tiered: bool) -> list[Unit]:
    quick = [item for item in items if not item.slow]
    chunks = [quick[i : i + MOST_FUSED] for i in range(0, len(quick), MOST_FUSED)]
    units = [_unit(fused if len(chunk) > 1 else alone, [i.pgt_id for i in chunk], chunk, tiered) for chunk in chunks]
    return units + [_unit(alone, [item.pgt_id], [item], tiered) for item in items if item.slow]


def _unit(kind: Kind, ids: Sequence[int], items: Collection[Due], tiered: bool) -> Unit:
    tier = min(TIERS[item.tier] for item in items) if tiered else 0
    return Unit(kind, tuple(ids), tier, any(item.asked for item in items))
