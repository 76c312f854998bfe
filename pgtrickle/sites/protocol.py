"""What a refresh asks of the sites of its sources, beyond the home database."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.sites.failures import Failures
from pgtrickle.sites.remote.cut import RemoteCut
from pgtrickle.sites.shared_cut import Interest
from pgtrickle.sites.stream_tables import CutStreamTable, PlannedStreamTable, RemoteReading, StreamTable

C = TypeVar("C", bound=CutStreamTable)

# For each stream table: the settings under which it reads, and what brokers did not offer, by database and source.
Interests = Iterable[tuple[Mapping[str, str], Mapping[str, Mapping[str, Interest]]]]


def _nothing() -> None:
    """Nothing to lift."""


@dataclass(frozen=True)
class SiteCuts:
    """The cuts of all sites outside the home database, by name, and what each stream table reads there, by id."""

    cuts: Mapping[str, RemoteCut] = field(default_factory=dict)
    readings: Mapping[int, RemoteReading] = field(default_factory=dict)
    hurried: bool = False  # transactions of a whole cluster wait until the home database is cut, too
    lift: Callable[[], None] = _nothing  # lets them go on


class Sites(Protocol):
    """The sites of the sources of some stream tables.

    A stream table that fails because of a site is added to `failed`; the others go on. A refresh calls, in this order:
    `follow_placements`, then for each cut `resolve_redirected`, `cut`, `want` and, if plans were outdated, `realign`; then
    `recapture`, `altered` and `prove`; and after the applies `finish`.
    """

    @property
    def brokered(self) -> bool:
        """Whether changes may be taken from brokers."""
        ...

    def follow_placements(self, tables: Sequence[StreamTable], failed: Failures) -> Mapping[int, StreamTableRow]:
        """Bind stream tables again whose sources are at another site than before; return their new catalog rows."""
        ...

    def resolve_redirected(self, tables: Sequence[StreamTable], failed: Failures) -> Mapping[int, StreamTableRow]:
        """Resolve foreign tables that stand for other tables than before; return the new rows of their readers."""
        ...

    def cut(self, tables: Sequence[PlannedStreamTable], failed: Failures) -> AbstractContextManager[SiteCuts]:
        """Cut all sites that these stream tables read."""
        ...

    def realign(self, tables: Iterable[StreamTable], failed: Failures) -> None:
        """Update what the home database knows of the sources' shapes."""
        ...

    def recapture(self, table: CutStreamTable, relids: Collection[int], failed: Failures) -> Collection[int]:
        """Make capture at these sites fit altered sources; return those that are captured in the home database."""
        ...

    def prove(self, tables: Sequence[CutStreamTable], failed: Failures) -> None:
        """Commit a proof of this refresh at every site from which something was read, between cut and apply."""
        ...

    def altered(self, tables: Sequence[C], failed: Failures) -> list[C]:
        """The stream tables whose sources at these sites were altered since they were read."""
        ...

    def want(self, interests: Interests) -> None:
        """Register with brokers what they did not offer."""
        ...

    def finish(self, tables: Sequence[CutStreamTable]) -> None:
        """Purge changes that all readers have applied, and remember the state of the sites."""
        ...
