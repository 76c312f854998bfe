"""The stage that compiles the queries of stream tables, or takes them from the cache."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import psycopg

from pgtrickle.catalog.query_files import load_query
from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.errors import SourceChangedError
from pgtrickle.refresh.planning.compiled import Compiled
from pgtrickle.refresh.planning.programs import Programs
from pgtrickle.refresh.progress import Progress
from pgtrickle.refresh.stages import Claimed, Planned
from pgtrickle.sites.protocol import Sites
from pgtrickle.sites.stream_tables import StreamTable


class Meaning(NamedTuple):
    """What a query means beyond its text."""

    text: str
    shape: str  # of its sources
    labels: dict[str, str]  # of enums that it uses


@dataclass(frozen=True)
class Planner:
    """Compiles the queries of the stream tables of one database."""

    conn: psycopg.Connection[Any]
    programs: Programs

    def plan(
        self, tables: Sequence[Claimed], sites: Sites, progress: Progress, whole: Collection[int] = ()
    ) -> list[Planned]:
        """The stream tables with their compiled queries. Those in `whole` read databases without news, too."""
        begin = time.monotonic()
        compiled = {table.row.pgt_id: self.programs.known(table.row.pgt_id) for table in tables}
        unknown = [table for table in tables if compiled[table.row.pgt_id] is None]
        meanings = self.meanings(unknown) if unknown else {}
        for table in unknown:
            compiled[table.row.pgt_id] = self._compile(table, meanings, progress)
            if isinstance(progress.failed.of(table), SourceChangedError) and table.row.databases:
                # What was missing may have reappeared by now.
                progress.failed.forgive(table)
                sites.realign([table], progress.failed)
                if progress.failed.of(table) is None:
                    compiled[table.row.pgt_id] = self._compile(table, self.meanings([table]), progress)
        seconds = (time.monotonic() - begin) / max(len(tables), 1)
        made = {table.row.pgt_id for table in unknown}
        planned = []
        for table in tables:
            found = compiled[table.row.pgt_id]
            if found is not None:
                progress.phases[table.row.pgt_id].plan = seconds
                planned.append(Planned(table, found, table.row.pgt_id in whole))
                progress.reached("plan", table, cached=table.row.pgt_id not in made)
        return planned

    def meanings(self, tables: Sequence[StreamTable]) -> dict[int, Meaning]:
        """What the queries of stream tables mean now, by id."""
        ids, views = [table.row.pgt_id for table in tables], [table.row.view_relid for table in tables]
        rows = self.conn.execute(load_query("meaning"), {"ids": ids, "views": views}).fetchall()
        return {row[0]: Meaning(row[1] or "", f"{row[1]}/{row[2]}/{row[3]}", row[3]) for row in rows}

    def _compile(self, table: Claimed, meanings: Mapping[int, Meaning], progress: Progress) -> Compiled | None:
        shape = shape_of(table.row, meanings)
        return progress.attempt(table, partial(self.programs.compile_for, table.row, shape))


def shape_of(row: StreamTableRow, meanings: Mapping[int, Meaning]) -> str:
    """What a plan is compiled for: the shape of the query's sources, and which of them only PostgreSQL may read."""
    return f"{meanings[row.pgt_id].shape}/{row.hidden or ''}"
