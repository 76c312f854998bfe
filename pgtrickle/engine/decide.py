"""What a refresh does: nothing, the change, or everything anew, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from psycopg import sql
from psycopg.rows import dict_row

from pgtrickle.capture.frontier import Frontier, Snapshot
from pgtrickle.capture.window import since
from pgtrickle.catalog.analysis import load_query
from pgtrickle.engine.cut import Cut
from pgtrickle.engine.programs import Compiled
from pgtrickle.engine.types import StreamTableRow
from pgtrickle.errors import NotDifferentiableError

Action = Literal["NO_DATA", "DIFFERENTIAL", "FULL", "REINITIALIZE"]


@dataclass(frozen=True)
class Source:
    """A source at the cut, seen from one stream table's frontier."""

    relid: int
    label: str
    buffer: str | None
    stable_name: str | None
    signature: str | None
    known_signature: str | None
    changed: bool
    buffered: int  # bytes of its change buffer
    markers: tuple[str, ...]

    @property
    def captured(self) -> bool:
        return self.buffer is not None


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str | None
    mode: Literal["DIFFERENTIAL", "FULL"]
    mode_reason: str | None
    retrack: tuple[int, ...] = ()  # sources whose capture no longer fits them
    by_cost: bool = False  # in full because that is cheaper this time
    polled: bool = False  # the result may change although no captured change tells so


_MARKERS = {
    "TRUNCATE": "{} was truncated",
    "SCHEMA": "columns of {} were renamed or retyped",
    "OVERFLOW": "the change buffer of {} overflowed",
    "MERGE": "a MERGE moved rows of {} between partitions, where capture cannot see them",
}


def changed_sources(cut: Cut, frontiers: Mapping[int, Frontier | None]) -> dict[int, list[Source]]:
    """For each stream table its sources, with what happened to them since its frontier."""
    with cut.conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(load_query("sources"), {"ids": list(frontiers)}).fetchall()
    probes: dict[tuple[str, Snapshot], sql.Composable] = {}
    for row in rows:
        frontier = frontiers[row["pgt_id"]]
        if frontier is None or row["buffer"] is None or frontier.node != cut.node:
            continue
        window = since(frontier.snapshot, "__pgt_xid")
        buffer = sql.Identifier("pgtrickle_changes", row["buffer"])
        marked = sql.SQL(
            "ARRAY(SELECT DISTINCT kind FROM pgtrickle_changes.pgt_markers WHERE source_stable_name = {} AND {})"
        ).format(sql.Literal(row["stable_name"]), since(frontier.snapshot, "xid"))
        probes[row["stable_name"], frontier.snapshot] = sql.SQL("(EXISTS (SELECT FROM {} WHERE {}), {})").format(
            buffer, window, marked
        )
    found: dict[tuple[str, Snapshot], tuple[bool, tuple[str, ...]]] = {}
    if probes:
        answers = cut.conn.execute(sql.SQL("VALUES ") + sql.SQL(", ").join(probes.values())).fetchall()
        found = {key: (changed, tuple(markers)) for key, (changed, markers) in zip(probes, answers, strict=True)}
    result: dict[int, list[Source]] = {pgt_id: [] for pgt_id in frontiers}
    for row in rows:
        frontier = frontiers[row["pgt_id"]]
        known = (row["stable_name"], frontier.snapshot) if frontier is not None and frontier.node == cut.node else None
        changed, markers = found.get(known, (False, ())) if known is not None else (False, ())
        result[row["pgt_id"]].append(
            Source(
                row["relid"],
                f"{row['schema']}.{row['name']}",
                row["buffer"],
                row["stable_name"],
                row["signature"],
                row["known_signature"],
                changed,
                row["buffered"],
                markers,
            )
        )
    return result


def decide(row: StreamTableRow, compiled: Compiled, sources: Sequence[Source], now: Frontier) -> Decision:
    """The action for one stream table at this cut."""
    mode: Literal["DIFFERENTIAL", "FULL"] = "DIFFERENTIAL"
    reason: str | None = None
    uncaptured = [source.label for source in sources if not source.captured]
    if row.refresh_mode == "FULL":
        mode, reason = "FULL", "refresh_mode is FULL"
    elif compiled.program is None:
        mode, reason = "FULL", compiled.reason
        if compiled.fragment:
            reason = f"{reason}: {compiled.fragment}"
        if row.refresh_mode == "DIFFERENTIAL":
            raise NotDifferentiableError(
                f"{row.label} cannot be maintained differentially: {reason}",
                "Use refresh_mode AUTO or FULL, or change that part of the query.",
            )
    elif uncaptured:
        mode, reason = "FULL", f"changes of {', '.join(uncaptured)} are not captured"
    polled = bool(uncaptured) or _follows_time(compiled.reason)
    known = Frontier.from_json(row.frontier)
    again = _must_start_over(row, sources, known, now)
    if again is not None:
        stale = tuple(
            source.relid
            for source in sources
            if source.captured and (source.signature != source.known_signature or "SCHEMA" in source.markers)
        )
        return Decision("REINITIALIZE", again, mode, reason, stale, polled=polled)
    moved = any(source.changed for source in sources)
    if mode == "FULL":
        if sources and not moved and not polled:
            return Decision("NO_DATA", "no source changed", mode, reason)
        return Decision("FULL", reason, mode, reason, polled=polled)
    if not moved:
        return Decision("NO_DATA", "no source changed", mode, reason)
    return Decision("DIFFERENTIAL", None, mode, reason)


def _follows_time(reason: str | None) -> bool:
    """A result that changes although its sources do not."""
    return reason is not None and ("current time" in reason or reason.startswith("STABLE functions"))


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
    for source in sources:
        for kind in source.markers:
            return _MARKERS[kind].format(source.label)
        if source.captured and source.signature != source.known_signature:
            return f"capture triggers or partitions of {source.label} changed"
    return None
