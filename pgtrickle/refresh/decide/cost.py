"""Consequences of how much a refresh has to read: a blown fuse, a full refresh, or reading by executors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import sql

from pgtrickle.catalog.query_files import load_query
from pgtrickle.compile.postgres import CHANGES_SCHEMA
from pgtrickle.enums import Action, RefreshMode
from pgtrickle.errors import FuseBlownError
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.frontier.window import since
from pgtrickle.refresh.cut.cut import Cut
from pgtrickle.refresh.decide.decision import Decision
from pgtrickle.refresh.stages import AtCut, Decided
from pgtrickle.sites.citus.shards import Shards
from pgtrickle.sites.shared_cut import SharedChanges
from pgtrickle.sites.source import Source

WORTH_COUNTING = 1 << 20  # bytes of change buffers from which on their rows are counted
DEARER = 1.5  # times the cost of a full refresh: from there on, AUTO refreshes in full
TOGETHER = 4  # factor on the limit for large refreshes if several stream tables read the same changes


def check_fuse(at_cut: AtCut, decision: Decision, cut: Cut) -> None:
    """Raise FuseBlownError if there are more changes than the fuse allows: an operator has to decide on them."""
    row = at_cut.row
    ceiling = row.fuse_ceiling
    if ceiling and decision.action in {Action.DIFFERENTIAL, Action.FULL} and _pending(at_cut, cut) > ceiling:
        raise FuseBlownError(
            f"the fuse of {row.label} has blown: more than {ceiling} changes came at once",
            f"Look at them, then SELECT pgtrickle.reset_fuse('{row.label}', 'apply') or 'reinitialize'.",
        )


def compare_costs(at_cut: AtCut, decision: Decision, cut: Cut) -> tuple[Decision, int]:
    """Let AUTO refresh in full if there are so many changes that a differential refresh would cost more.

    Returns the decision and the number of changes, which is 0 if they are too few to be counted.
    """
    row = at_cut.row
    if decision.action is not Action.DIFFERENTIAL or row.refresh_mode != RefreshMode.AUTO:
        return decision, 0
    if sum(source.buffered for source in at_cut.sources if source.changed) < WORTH_COUNTING:
        return decision, 0
    changes = _pending(at_cut, cut)
    if row.full_seconds and row.row_seconds and changes * row.row_seconds > DEARER * row.full_seconds:
        reason = (
            f"{changes} changes would take about {changes * row.row_seconds:.1f} s,"
            f" and the last refresh in full took {row.full_seconds:.1f} s"
        )
        decision = replace(decision, action=Action.FULL, reason=reason, by_cost=True)
    return decision, changes


def is_large(decided: Decided, cut: Cut, most: int, readers_of: Counter[int]) -> bool:
    """Whether a refresh reads more bytes than should pass through the driver, so that executors have to read them."""
    sources = decided.sources
    if decided.decision.action is Action.DIFFERENTIAL:
        # The driver reads changes once for all stream tables; executors read them once for each.
        if any(readers_of[source.relid] > 1 for source in sources):
            most *= TOGETHER
        new = sum(_bytes_of(cut.others[one.database].conn, [one.there]) for one in sources if one.joined)
        return new + sum(source.buffered for source in sources if source.changed) > most
    size = 0
    for database in ("", *decided.remote.databases):
        relations = [source.there or source.relid for source in sources if source.database == database]
        other = cut.others[database] if database else cut
        size += _bytes_of(other.conn, relations + ([] if database else [decided.row.relid]))
        size += _bytes_of_shards(other.conn, [other.shards[one] for one in relations if one in other.shards])
    return size > most


def _pending(at_cut: AtCut, cut: Cut) -> int:
    """The number of changes in the buffers of the sources that the stream table has not applied."""
    pending = 0
    windows = at_cut.windows
    for source in at_cut.sources:
        if source.changed and source.buffer is not None and not source.joined:
            conn = cut.others[source.database].conn if source.database else cut.conn
            brokered = _brokered(source, windows, cut)
            if brokered is not None:
                pending += brokered.changed(windows[source.database])
                continue
            window = since(windows[source.database], "__pgt_xid")
            buffer = sql.Identifier(CHANGES_SCHEMA, source.buffer)
            row = conn.execute(sql.SQL("SELECT count(*) FROM {} WHERE {}").format(buffer, window)).fetchone()
            assert row is not None
            pending += row[0]
    return pending


def _brokered(source: Source, windows: Mapping[str, Snapshot], cut: Cut) -> SharedChanges | None:
    """The changes of a source as offered by a broker, if it has them."""
    shared_cut = cut.others[source.database].shared_cut if source.database else None
    if shared_cut is None or source.stable_name is None or source.database not in windows:
        return None
    return shared_cut.of(source.stable_name, windows[source.database])


def _bytes_of(conn: psycopg.Connection[Any], relations: Sequence[int]) -> int:
    row = conn.execute(load_query("sizes"), {"relations": relations}).fetchone()
    assert row is not None
    return int(row[0])


def _bytes_of_shards(conn: psycopg.Connection[Any], shards: Sequence[Shards]) -> int:
    names = [name for one in shards for name in one.names]
    if not names:
        return 0
    with_partitions = (
        "SELECT sum(pg_table_size(member)) FROM unnest(%s::text[]) AS n,"
        " pgtrickle._partition_tree(to_regclass(n)) AS member"
    )
    row = conn.execute(with_partitions, (names,)).fetchone()
    assert row is not None
    return int(row[0] or 0)
