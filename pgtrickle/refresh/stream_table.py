"""A stream table as the catalog has it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pgtrickle.catalog.databases import is_node
from pgtrickle.compile.sql_text import ident
from pgtrickle.errors import PgtrickleError

# What _session_settings() records, and what may be added to tell reads apart in the server's log. The catalog's rows are
# written for owners: a setting such as role or session_replication_role must not get into the service's session.
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
    """A stream table as the catalog has it."""

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
    full_seconds: float | None  # what the last refresh in full cost
    row_seconds: float | None  # what a changed row costs
    fuse_ceiling: int  # more changes than that at once are not applied; 0 for no limit
    placement: str
    pooler_compatibility_mode: bool  # refreshed without anything that outlives a transaction
    lost_members: str  # of a set: waited for, or kept as they were last read
    st_placement: str  # of its table in a Citus cluster
    has_former_row_ids: bool  # row ids of catalog version 20 and earlier
    output_distribution_column: str | None
    databases: list[str]  # others that it reads
    reads_here: bool  # tables of this one too, apart from those
    spread_here: list[int]  # distributed tables: this database, the coordinator, may have shards of them
    on_citus: bool  # the database has Citus
    session_settings: Any  # see query_settings
    defining_query: str | None  # None for those who may not see it
    owner: str | None
    own: bool | None
    problem: str | None  # a part that is missing, or a right that the owner no longer has
    outdated: bool | None  # the owner's functions are those of an earlier version
    hidden: str | None  # sources behind views of other roles, which the owner may not read

    @property
    def label(self) -> str:
        """The name as it is written in SQL."""
        return f"{_written(self.pgt_schema)}.{_written(self.pgt_name)}"

    @property
    def query_settings(self) -> dict[str, str]:
        """The settings under which the query is run, but for search_path: its names are resolved already."""
        found = self.session_settings
        if not isinstance(found, dict) or not found.keys() <= SESSION_SETTINGS or not _are_texts(found.values()):
            raise PgtrickleError(
                f"the recorded session settings of {self.label} are not those of create_stream_table()",
                "alter_stream_table(query => …) records them again.",
            )
        return {name: value for name, value in found.items() if name != "search_path"}

    @property
    def on_nodes(self) -> bool:
        """Whether it reads distributed tables from the nodes of the cluster, of which this database may be one."""
        return bool(self.spread_here) or any(map(is_node, self.databases))

    @property
    def in_parts(self) -> bool:
        """Whether no query of this database alone reads all that it reads."""
        return bool(self.databases or self.spread_here)


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _written(name: str) -> str:
    return name if re.fullmatch(r"[a-z_][a-z0-9_$]*", name) else ident(name)
