"""The action of a refresh and its reason: nothing, a differential refresh, a full refresh or re-initialization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.enums import Action, RefreshMode
from pgtrickle.errors import NotDifferentiableError
from pgtrickle.frontier.frontier import Frontier
from pgtrickle.refresh.planning.compiled import Compiled
from pgtrickle.sites.source import Source


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str | None
    mode: RefreshMode  # DIFFERENTIAL or FULL: the effective mode
    mode_reason: str | None
    retrack: tuple[int, ...] = ()  # sources whose capture no longer fits them
    by_cost: bool = False  # a full refresh because it is cheaper this time
    polled: bool = False  # the result may change without a captured change


_MARKERS = {
    "TRUNCATE": "{} was truncated",
    "SCHEMA": "columns of {} were renamed or retyped, or it has new partitions",
    "OVERFLOW": "the change buffer of {} overflowed",
    "GAP": "{} lacked capture triggers",
    "MERGE": "a MERGE moved rows of {} between partitions, where capture cannot see them",
}


def decide(row: StreamTableRow, compiled: Compiled, sources: Sequence[Source], now: Frontier) -> Decision:
    """The action for one stream table at this cut."""
    mode = RefreshMode.DIFFERENTIAL
    reason: str | None = None
    uncaptured = [source.label for source in sources if not source.captured]
    if row.refresh_mode == RefreshMode.FULL and (compiled.program is not None or not row.in_parts):
        mode, reason = RefreshMode.FULL, "refresh_mode is FULL"
    elif compiled.program is None and row.in_parts:
        # The view would read stand-in tables, which are empty, or have Citus read nodes at different points in time.
        part = f": {compiled.fragment}" if compiled.fragment else ""
        what, way = (
            ("distributed tables", ", or create it with refresh_mode FULL") if row.on_nodes else ("other databases", "")
        )
        raise NotDifferentiableError(
            f"{row.label} reads {what} and cannot be computed: {compiled.reason}{part}",
            f"Change that part of the query, or what it uses{way}.",
        )
    elif compiled.program is None:
        mode, reason = RefreshMode.FULL, compiled.reason
        if compiled.fragment:
            reason = f"{reason}: {compiled.fragment}"
        if row.refresh_mode == RefreshMode.DIFFERENTIAL:
            raise NotDifferentiableError(
                f"{row.label} cannot be maintained differentially: {reason}",
                "Use refresh_mode AUTO or FULL, or change that part of the query.",
            )
    elif uncaptured:
        mode, reason = RefreshMode.FULL, f"changes of {', '.join(uncaptured)} are not captured"
    polled = bool(uncaptured) or compiled.time_dependent
    known = row.stored_frontier
    again = _must_start_over(row, sources, known, now)
    if again is not None:
        stale = tuple(
            source.relid
            for source in sources
            if source.captured
            and (
                not source.attached
                or source.lacking
                or source.signature != source.known_signature
                or "SCHEMA" in source.markers
            )
        )
        return Decision(Action.REINITIALIZE, again, mode, reason, stale, polled=polled)
    if (
        mode is RefreshMode.DIFFERENTIAL
        and row.effective_mode != RefreshMode.DIFFERENTIAL
        and compiled.program
        and compiled.program.additive
    ):
        # While the query had no differential plan, its state table was not maintained.
        return Decision(
            Action.FULL, "the state of its groups was not kept while it was refreshed in full", mode, reason
        )
    moved = any(source.changed for source in sources)
    if mode is RefreshMode.FULL:
        if sources and not moved and not polled:
            return Decision(Action.NO_DATA, "no source changed", mode, reason)
        return Decision(Action.FULL, reason, mode, reason, polled=polled)
    if not moved:
        return Decision(Action.NO_DATA, "no source changed", mode, reason)
    return Decision(Action.DIFFERENTIAL, None, mode, reason)


def _must_start_over(
    row: StreamTableRow, sources: Sequence[Source], known: Frontier | None, now: Frontier
) -> str | None:
    if row.reinit_reason is not None:
        return row.reinit_reason
    if known is None:
        return "no frontier is stored"
    if known.node != now.node:
        return "the database was restored or moved: its transactions are not those of the frontier"
    if known.meaning != now.meaning:
        return "a view or function that the query uses was replaced, or the guard of the table was switched off"
    if renamed := known.renamed(now):
        return f"a value of an enum was renamed: it was {renamed[0]}"
    if (reason := _other_members(sources, known)) is not None:
        return reason
    for source in sources:
        read_before = bool(source.database) and not source.resting and not source.joined
        if read_before and (reason := _forgotten(source, known, now)) is not None:
            return reason
        if source.moved_in:
            return f"shards of {source.label} came before their changes were captured there"
        for kind in source.markers:
            return _MARKERS[kind].format(source.label)
        if source.lacking:
            return f"{'shards of ' if source.spread else ''}{source.label} lack capture triggers"
        if source.rewritten:
            return f"{source.label} was written anew by ALTER TABLE, and a column was altered"
        if source.captured and source.signature != source.known_signature and not source.joined:
            return f"capture triggers or partitions of {source.label} changed"
    return None


def _other_members(sources: Sequence[Source], known: Frontier) -> str | None:
    """Why the stored rows do not fit the present members of the sets, if they do not.

    A database that is new to the stream table is not a reason: it joins without re-initialization.
    """
    shards = {source.relid for source in sources if source.shard}
    if known.shards - shards:
        return "a database left the set"
    for source in sources:
        if source.shard and source.relid not in known.shards and source.database in known.databases:
            return f"{source.label} became part of a set"
    return None


def _forgotten(source: Source, known: Frontier, now: Frontier) -> str | None:
    """Why the frontier is not valid for a source in a remote database, if it is not."""
    before = known.databases.get(source.database)
    if not source.attached:
        return f"changes of {source.label} were not captured for it"
    if before is None:
        return f"database {source.database} is new to it"
    if before.node != now.databases[source.database].node:
        return f"database {source.database} was restored or moved: its transactions are not those of the frontier"
    if before.proof not in source.proofs:
        return f"database {source.database} was restored, or crashed: it does not remember the last refresh"
    return None
