"""The offers of a refresh broker: a cut of a database that consumers share, with the changes of its sources.

A consumer reads in the broker's snapshot. Rows of change buffers come from the broker, everything else from the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from pgtrickle.frontier.snapshot import Snapshot

XID = "xid"
WEIGHT = "w"


@dataclass
class Interest:
    """What consumers need of one source's changes: expressions over its buffer with their types, and conditions."""

    expressions: dict[str, tuple[str, int, int]] = field(default_factory=dict)  # type, precision, scale
    conditions: set[str] = field(default_factory=set)

    def add(self, other: Interest) -> None:
        self.expressions |= other.expressions
        self.conditions |= other.conditions


def schema_type(kind: str, precision: int, scale: int) -> pa.DataType:
    """The Arrow type in which the values of an expression are sent."""
    if kind == "numeric":
        return pa.decimal128(precision, scale)
    return {"text": pa.string(), "boolean": pa.bool_(), "bigint": pa.int64()}[kind]


@dataclass(frozen=True)
class SharedChanges:
    """The changes of one source that `base` does not see and the offer's snapshot does."""

    base: Snapshot
    columns: Mapping[str, str]  # names of the columns of expressions and conditions, by their text
    rows: pa.Table

    def serves(self, window: Snapshot) -> bool:
        """Whether all changes that a window does not see are included."""
        known = self.base.xmax, set(self.base.in_progress)
        return window.xmax >= known[0] and all(xid >= known[0] or xid in known[1] for xid in window.in_progress)

    def behind(self, window: Snapshot, columns: Sequence[str]) -> pa.Table:
        """The rows that a window does not see."""
        rows = self.rows.select([*columns, XID, WEIGHT])
        xid = rows.column(XID)
        mask = pc.greater_equal(xid, window.xmax)
        if window.in_progress:
            mask = pc.or_(mask, pc.is_in(xid, value_set=pa.array(window.in_progress, pa.int64())))
        return rows.filter(mask)

    def changed(self, window: Snapshot) -> int:
        """The number of rows that a window does not see."""
        return int(self.behind(window, ()).num_rows)


@dataclass(frozen=True)
class SharedCut:
    """A cut that a broker took and still holds."""

    number: int
    node: str
    snapshot: str  # exported; others can import it while the broker's transaction is open
    locked: frozenset[int]  # tables that the broker has locked, so that they are not rewritten meanwhile
    settings: Mapping[str, str]
    sources: Mapping[str, SharedChanges]  # by stable name

    def of(self, stable_name: str, window: Snapshot) -> SharedChanges | None:
        """The changes of a source, if they include all that a window does not see."""
        brokered = self.sources.get(stable_name)
        return brokered if brokered is not None and brokered.serves(window) else None


class Brokers(Protocol):
    """The interface through which an engine uses the brokers of databases."""

    def shared_cut(self, database: str, dsn: str, node: str, consumers: Sequence[str]) -> SharedCut | None:
        """A broker's cut that none of these consumers has used yet; None if the engine must take its own."""
        ...

    def want(
        self,
        database: str,
        dsn: str,
        home: str,
        label: str,
        wanted: Mapping[str, Interest],
        settings: Mapping[str, str],
    ) -> None:
        """Register what the broker is to read too, from its next cut on."""
        ...
