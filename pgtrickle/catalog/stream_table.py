"""The catalog row of a stream table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import dict_row

from pgtrickle.catalog.databases import is_node
from pgtrickle.catalog.query_files import load_query
from pgtrickle.compile.sql_text import ident
from pgtrickle.enums import Storage
from pgtrickle.errors import PgtrickleError
from pgtrickle.frontier.frontier import Frontier

# The settings that _session_settings() records, and application_name, which identifies reads in the server's log.
# Owners decide what is in the catalog's rows, so settings such as role or session_replication_role must not get from
# there into the service's session.
SESSION_SETTINGS = frozenset(
    {
        "TimeZone",
        "DateStyle",
        "IntervalStyle",
        "lc_monetary",
        "lc_numeric",
        "lc_time",
        "search_path",
        "application_name",
    }
)


@dataclass(frozen=True)
class StreamTableRow:
    """The catalog row of a stream table, with what is derived from it."""

    pgt_id: int
    pgt_schema: str
    pgt_name: str
    relid: int
    view_relid: int
    refresh_mode: str
    effective_mode: str | None
    mode_reason: str | None
    status: str
    status_reason: str | None
    schedule: str
    key_columns: list[str] | None
    frontier: dict[str, Any] | None
    data_timestamp: datetime | None
    reinit_reason: str | None
    fencing_token: int
    consecutive_errors: int
    full_seconds: float | None  # cost of the last full refresh
    row_seconds: float | None  # cost per changed row
    fuse_ceiling: int  # the fuse blows at more changes than this; 0 for no limit
    placement: str
    pooler_compatibility_mode: bool  # refreshed without anything that outlives a transaction
    lost_members: str  # members of a set that cannot be reached: `wait` for them, or `keep` them as last read
    st_placement: str  # where a Citus cluster stores its rows
    has_former_row_ids: bool  # row ids of catalog version 20 and earlier
    output_distribution_column: str | None
    databases: list[str]  # remote databases and Citus nodes that it reads
    reads_here: bool  # it also reads tables of this database that are not distributed
    spread_here: list[int]  # distributed tables of which this database, the coordinator, may have shards
    on_citus: bool  # the database has Citus
    session_settings: Any  # see query_settings
    defining_query: str | None  # None for roles that may not see it
    owner: str | None
    own: bool | None
    problem: str | None  # a part that is missing, or a right that the owner has lost
    outdated: bool | None  # the owner functions were made by an earlier version
    hidden: str | None  # sources behind views of other roles that the owner may not read directly

    @property
    def label(self) -> str:
        """The qualified name as it is written in SQL."""
        return f"{_written(self.pgt_schema)}.{_written(self.pgt_name)}"

    @property
    def query_settings(self) -> dict[str, str]:
        """The settings under which the query runs, without search_path: its names are already resolved."""
        found = self.session_settings
        if not isinstance(found, dict) or not found.keys() <= SESSION_SETTINGS or not _are_texts(found.values()):
            raise PgtrickleError(
                f"the recorded session settings of {self.label} are not those of create_stream_table()",
                "alter_stream_table(query => …) records them again.",
            )
        return {name: value for name, value in found.items() if name != "search_path"}

    @property
    def stored_frontier(self) -> Frontier | None:
        """How far it has read its sources; None before the first refresh."""
        return Frontier.from_json(self.frontier)

    @property
    def on_nodes(self) -> bool:
        """Whether it reads distributed tables from the nodes of the cluster; this database may be one of them."""
        return bool(self.spread_here) or any(map(is_node, self.databases))

    @property
    def is_citus_table(self) -> bool:
        """Whether it is a reference or distributed table of Citus itself."""
        return self.st_placement in {Storage.REFERENCE, Storage.DISTRIBUTED}

    @property
    def in_parts(self) -> bool:
        """Whether no query of this database alone can read all its sources, because some are remote or distributed."""
        return bool(self.databases or self.spread_here)


def load_rows(conn: psycopg.Connection[Any], ids: Sequence[int] | None = None) -> list[StreamTableRow]:
    """The catalog rows of the given stream tables, or of all."""
    with conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(load_query("stream_tables"), {"ids": list(ids) if ids is not None else None})
        return [StreamTableRow(**row) for row in rows]


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _written(name: str) -> str:
    return name if re.fullmatch(r"[a-z_][a-z0-9_$]*", name) else ident(name)
