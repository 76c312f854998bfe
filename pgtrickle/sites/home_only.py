"""Stream tables that read only the home database: no other site takes part in their refresh."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.sites.failures import Failures
from pgtrickle.sites.protocol import C, Interests, SiteCuts
from pgtrickle.sites.stream_tables import CutStreamTable, PlannedStreamTable, StreamTable


@dataclass(frozen=True)
class HomeOnly:
    """No site outside the home database."""

    brokered: bool = False

    def follow_placements(self, tables: Sequence[StreamTable], failed: Failures) -> Mapping[int, StreamTableRow]:
        return {}

    def resolve_redirected(self, tables: Sequence[StreamTable], failed: Failures) -> Mapping[int, StreamTableRow]:
        return {}

    @contextmanager
    def cut(self, tables: Sequence[PlannedStreamTable], failed: Failures) -> Iterator[SiteCuts]:
        yield SiteCuts()

    def realign(self, tables: Iterable[StreamTable], failed: Failures) -> None:
        """Nothing to do."""

    def recapture(self, table: CutStreamTable, relids: Collection[int], failed: Failures) -> Collection[int]:
        return relids

    def prove(self, tables: Sequence[CutStreamTable], failed: Failures) -> None:
        """Nothing to do."""

    def altered(self, tables: Sequence[C], failed: Failures) -> list[C]:
        return []

    def want(self, interests: Interests) -> None:
        """Nothing to do."""

    def finish(self, tables: Sequence[CutStreamTable]) -> None:
        """Nothing to do."""
