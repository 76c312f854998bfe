"""Remote databases, members of sets and Citus nodes as sites of a refresh."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from pgtrickle.catalog.problems import dropped
from pgtrickle.catalog.stream_table import StreamTableRow, load_rows
from pgtrickle.errors import PgtrickleError
from pgtrickle.postgres.fence import run_as_owner
from pgtrickle.sites.citus.cluster import Cluster
from pgtrickle.sites.failures import Failures
from pgtrickle.sites.protocol import C, Interests, SiteCuts
from pgtrickle.sites.remote.cuts import RemoteCuts
from pgtrickle.sites.remote.databases import RemoteDatabases
from pgtrickle.sites.stream_tables import CutStreamTable, PlannedStreamTable, StreamTable


class OutsideSites:
    """All sites outside the home database."""

    def __init__(self, remote: RemoteDatabases, cluster: Cluster) -> None:
        self._remote = remote
        self._cluster = cluster
        self._cuts = RemoteCuts(remote)

    @property
    def brokered(self) -> bool:
        return self._remote.brokers is not None

    def follow_placements(self, tables: Sequence[StreamTable], failed: Failures) -> Mapping[int, StreamTableRow]:
        """Bind stream tables again whose sources Citus has placed elsewhere; return their new catalog rows."""
        if not any(table.row.on_citus for table in tables):
            return {}
        ids = [table.row.pgt_id for table in tables]
        try:
            updated = self._cluster.update_nodes()
            moved = self._cluster.follow(ids)
        except (psycopg.Error, PgtrickleError) as error:
            self._fail_readers_of_nodes(error, tables, failed)
            return {}
        if not moved and not updated:
            return {}
        rows = {row.pgt_id: row for row in load_rows(self._home, ids)}
        for table in tables:
            row = rows.get(table.row.pgt_id)
            if row is None:
                failed.add(dropped(table.row.label), [table])
            elif row.pgt_id in moved:
                self._bind_again(row, moved[row.pgt_id], failed)
        return rows

    def _bind_again(self, row: StreamTableRow, tables: Sequence[int], failed: Failures) -> None:
        table = _OfRow(row)
        try:
            for relid in tables:
                _retrack(self._home, row, relid)
            self._cluster.finish(row.pgt_id)
        except (psycopg.Error, PgtrickleError) as error:
            self._fail_readers_of_nodes(error, [table], failed)
            return
        self._remote.subscribe(table, {source.relid for source in self._remote.sources([row])}, failed)

    def _fail_readers_of_nodes(self, error: Exception, tables: Sequence[StreamTable], failed: Failures) -> None:
        """Let those of these stream tables fail that read distributed tables."""
        if self._home.broken or self._home.closed:
            raise error
        distributed = self._home.execute(
            "SELECT DISTINCT pgt_id FROM pgtrickle.pgt_dependencies WHERE pgt_id = ANY (%s)"
            " AND pgtrickle._is_distributed(coalesce(through, source_relid))",
            ([table.row.pgt_id for table in tables],),
        ).fetchall()
        failed.add(error, [table for table in tables if (table.row.pgt_id,) in distributed])

    def resolve_redirected(self, tables: Sequence[StreamTable], failed: Failures) -> Mapping[int, StreamTableRow]:
        databases = self._cuts.resolve_redirected(tables, failed)
        rows = {table.row.pgt_id: table.row for table in tables}
        return {pgt_id: replace(rows[pgt_id], databases=names) for pgt_id, names in databases.items()}

    @contextmanager
    def cut(self, tables: Sequence[PlannedStreamTable], failed: Failures) -> Iterator[SiteCuts]:
        with self._cuts.cut(tables, failed) as cuts:
            yield cuts

    def realign(self, tables: Iterable[StreamTable], failed: Failures) -> None:
        for table in tables:
            self._remote.realign(table, self._remote.sources([table.row]), failed)

    def recapture(self, table: CutStreamTable, relids: Collection[int], failed: Failures) -> Collection[int]:
        remote = {source.relid for source in table.remote.sources if source.relid in relids}
        spread = {source.relid for source in table.sources if source.relid in relids and source.spread}
        if not spread or self._recapture_distributed(table, failed):
            self._remote.subscribe(table, remote, failed)
        return set(relids) - remote - spread

    def _recapture_distributed(self, table: CutStreamTable, failed: Failures) -> bool:
        """Make the capture of the distributed tables fit them on all nodes; return whether that succeeded."""
        try:
            for relid in self._cluster.behind(table.row.pgt_id):
                self._cluster.spread([relid])
                _retrack(self._home, table.row, relid)
            self._cluster.finish(table.row.pgt_id)
        except (psycopg.Error, PgtrickleError) as error:
            self._remote.note(error, [table], failed)
            return False
        return True

    def prove(self, tables: Sequence[CutStreamTable], failed: Failures) -> None:
        self._remote.prove(tables, failed)

    def altered(self, tables: Sequence[C], failed: Failures) -> list[C]:
        return self._remote.altered(tables, failed)

    def want(self, interests: Interests) -> None:
        self._remote.want(interests)

    def finish(self, tables: Sequence[CutStreamTable]) -> None:
        self._remote.purge(tables)
        self._cuts.remember(tables)

    @property
    def _home(self) -> psycopg.Connection[Any]:
        return self._remote.home


@dataclass(frozen=True)
class _OfRow:
    """A stream table of which only the catalog row is known."""

    row: StreamTableRow


def _retrack(conn: psycopg.Connection[Any], row: StreamTableRow, relid: int) -> None:
    run_as_owner(conn, row, f"SELECT pgtrickle._retrack({relid:d}::oid::regclass)")
