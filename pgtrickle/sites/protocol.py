"""What a refresh asks of the sites of its sources, beyond the home database."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.sites.broker import Interest
from pgtrickle.sites.failures import Failures
from pgtrickle.sites.remote.cut import RemoteCut
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

    A stream table that fails because of a site is added to `failed`; the others go on.
    """

    @property
    def brokered(self) -> bool:
        """Whether changes may be taken from brokers."""
        ...

    def follow(self, tables: Sequence[StreamTable], failed: Failures) -> Mapping[int, StreamTableRow]:
        """Bind stream tables again whose sources are at another site than before; return their new catalog rows."""
        ...

    def redirect(self, tables: Sequence[StreamTable], failed: Failures) -> Mapping[int, StreamTableRow]:
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
        """After the applies: purge changes that all readers have applied."""
        ...
