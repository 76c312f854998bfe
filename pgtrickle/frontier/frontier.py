"""Frontiers: the snapshots up to which a stream table has read its sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pgtrickle.frontier.snapshot import Snapshot


@dataclass(frozen=True)
class Reflected:
    """How far a remote database has been read: its snapshot, and the proof that the refresh committed there."""

    node: str
    snapshot: Snapshot
    proof: str

    @classmethod
    def from_json(cls, value: dict[str, str]) -> Reflected:
        return cls(value["node"], Snapshot.parse(value["snapshot"]), value["proof"])

    def to_json(self) -> dict[str, str]:
        return {"node": self.node, "snapshot": str(self.snapshot), "proof": self.proof}


@dataclass(frozen=True)
class Frontier:
    """What a stream table's contents reflect: a snapshot of one node, and the meaning of its query at that time."""

    node: str  # system identifier and database: snapshots of different nodes are never compared
    snapshot: Snapshot
    meaning: str  # changes when a view or function that the query uses is replaced
    databases: Mapping[str, Reflected] = field(default_factory=dict)  # other databases that it reads, by name
    shards: frozenset[int] = frozenset()  # tables of set members, by the OIDs of their stand-ins
    labels: Mapping[str, str] = field(default_factory=dict)  # labels of the enums that the query uses, by OID

    @classmethod
    def from_json(cls, value: dict[str, Any] | None) -> Frontier | None:
        if value is None:
            return None
        snapshot = replace(Snapshot.parse(value["snapshot"]), passed=value.get("passed"))
        others = {name: Reflected.from_json(one) for name, one in value.get("databases", {}).items()}
        return cls(
            value["node"],
            snapshot,
            value["meaning"],
            others,
            frozenset(value.get("shards", ())),
            value.get("labels", {}),
        )

    def to_json(self) -> dict[str, Any]:
        passed = {"passed": self.snapshot.passed} if self.snapshot.passed is not None else {}
        others = {"databases": {name: one.to_json() for name, one in self.databases.items()}} if self.databases else {}
        shards = {"shards": sorted(self.shards)} if self.shards else {}
        labels = {"labels": dict(self.labels)} if self.labels else {}
        own = {"node": self.node, "snapshot": str(self.snapshot), "meaning": self.meaning}
        return own | passed | others | shards | labels

    def renamed(self, now: Frontier) -> list[str]:
        """The enum labels that have been renamed or removed since."""
        return [name for number, name in self.labels.items() if now.labels.get(number) != name]

    def snapshot_of(self, database: str) -> Snapshot | None:
        """The snapshot up to which a database has been read; the empty name is the stream table's own database."""
        if not database:
            return self.snapshot
        return self.databases[database].snapshot if database in self.databases else None
