"""Stream tables as the sites of their sources see them: before the cut, and at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.frontier.frontier import Frontier, Reflected
from pgtrickle.sites.source import ForeignSource, Source


class StreamTable(Protocol):
    """Whatever stands for a stream table."""

    @property
    def row(self) -> StreamTableRow: ...


class PlannedStreamTable(StreamTable, Protocol):
    """A stream table that is about to be read."""

    @property
    def functions(self) -> tuple[str, ...]:
        """The user-defined functions, operators and types that its query uses."""
        ...

    @property
    def whole(self) -> bool:
        """Whether databases are read even if they have no news."""
        ...


@dataclass(frozen=True)
class RemoteReading:
    """What a stream table reads in remote databases at a cut."""

    sources: tuple[ForeignSource, ...] = ()
    states: Mapping[str, str] = field(
        default_factory=dict
    )  # of set members, as _poll_consumers() describes them, by database
    # By database: the version there of everything in `PlannedStreamTable.functions`, by name.
    functions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    incarnations: Mapping[str, str] = field(default_factory=dict)  # of the servers of the databases that were cut

    @property
    def databases(self) -> list[str]:
        """The remote databases that were cut for this stream table."""
        return sorted(self.incarnations)


class CutStreamTable(StreamTable, Protocol):
    """A stream table at a cut."""

    @property
    def frontier(self) -> Frontier: ...
    @property
    def sources(self) -> Sequence[Source]: ...
    @property
    def remote(self) -> RemoteReading: ...


def known_of(row: StreamTableRow, database: str) -> Reflected | None:
    """The stored frontier's entry for a remote database."""
    frontier = row.stored_frontier
    return frontier.databases.get(database) if frontier is not None else None
