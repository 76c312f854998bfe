"""The part of a distributed table that is on one node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shards:
    """What a node has of a distributed table, at its cut."""

    names: tuple[str, ...]  # quoted, with schema
    query: str  # for the rows of all of them
