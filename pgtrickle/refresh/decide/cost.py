"""Consequences of how much a refresh has to read: a blown fuse, a full refresh, or reading by executors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import sql

from pgtrickle.catalog.analysis import load_query
from pgtrickle.compile.postgres import CHANGES_SCHEMA
from pgtrickle.errors import FuseBlownError
from pgtrickle.frontier.window import since
from pgtrickle.refresh.cut.cut import Cut
from pgtrickle.refresh.cut.sources import Source
from pgtrickle.refresh.work import Work
from pgtrickle.sites.broker import SharedChanges
from pgtrickle.sites.citus.shards import Shards

WORTH_COUNTING = 1 << 20  # bytes of change buffers from which on their rows are counted
DEARER = 1.5  # times the cost of a full refresh: from there on, AUTO refreshes in full
TOGETHER = 4  # factor on the limit for large refreshes if several stream tables read the same changes


def check_fuse(work: Work, cut: Cut) -> None:
    """Raise FuseBlownError if there are more changes than the fuse allows: an operator has to decide on them."""
    ceiling = work.row.fuse_ceiling
    assert work.decision is not None
    if ceiling and work.decision.action in {"DIFFERENTIAL", "FULL"} and _pending(work, cut) > ceiling:
        raise FuseBlownError(
            f"the fuse of {work.row.label} has blown: more than {ceiling} changes came at once",
            f"Look at them, then SELECT pgtrickle.reset_fuse('{work.row.label}', 'apply') or 'reinitialize'.",
        )


def compare_costs(work: Work, cut: Cut) -> None:
    """Let AUTO refresh in full if there are so many changes that a differential refresh would cost more."""
    row, decision = work.row, work.decision
    assert decision is not None
    if decision.action != "DIFFERENTIAL" or row.refresh_mode != "AUTO":
        return
    if sum(source.buffered for source in work.sources if source.changed) < WORTH_COUNTING:
        return
    work.changes = _pending(work, cut)
    if row.full_seconds and row.row_seconds and work.changes * row.row_seconds > DEARER * row.full_seconds:
        reason = (
            f"{work.changes} changes would take about {work.changes * row.row_seconds:.1f} s,"
            f" and the last refresh in full took {row.full_seconds:.1f} s"
        )
        work.decision = replace(decision, action="FULL", reason=reason, by_cost=True)


def is_large(work: Work, cut: Cut, most: int, readers_of: Counter[int]) -> bool:
    """Whether a refresh reads more bytes than should pass through the driver, so that executors have to read them."""
    assert work.decision is not None
    if work.decision.action == "DIFFERENTIAL":
        # The driver reads changes once for all stream tables; executors read them once for each.
        if any(readers_of[source.relid] > 1 for source in work.sources):
            most *= TOGETHER
        new = sum(_bytes_of(cut.others[one.database].conn, [one.there]) for one in work.sources if one.joined)
        return new + sum(source.buffered for source in work.sources if source.changed) > most
    size = 0
    for database in ("", *work.cut_databases):
        relations = [source.there or source.relid for source in work.sources if source.database == database]
        other = cut.others[database] if database else cut
        size += _bytes_of(other.conn, relations + ([] if database else [work.row.relid]))
        size += _bytes_of_shards(other.conn, [other.shards[one] for one in relations if one in other.shards])
    return size > most


def _pending(work: Work, cut: Cut) -> int:
    """The number of changes in the buffers of the sources that the stream table has not applied."""
    pending = 0
    for source in work.sources:
        if source.changed and source.buffer is not None and not source.joined:
            conn = cut.others[source.database].conn if source.database else cut.conn
            brokered = _brokered(source, work, cut)
            if brokered is not None:
                pending += brokered.changed(work.windows[source.database])
                continue
            window = since(work.windows[source.database], "__pgt_xid")
            buffer = sql.Identifier(CHANGES_SCHEMA, source.buffer)
            row = conn.execute(sql.SQL("SELECT count(*) FROM {} WHERE {}").format(buffer, window)).fetchone()
            assert row is not None
            pending += row[0]
    return pending


def _brokered(source: Source, work: Work, cut: Cut) -> SharedChanges | None:
    """The changes of a source as offered by a broker, if it has them."""
    shared_cut = cut.others[source.database].shared_cut if source.database else None
    if shared_cut is None or source.stable_name is None or source.database not in work.windows:
        return None
    return shared_cut.of(source.stable_name, work.windows[source.database])


def _bytes_of(conn: psycopg.Connection[Any], relations: Sequence[int]) -> int:
    row = conn.execute(load_query("sizes"), {"relations": relations}).fetchone()
    assert row is not None
    return int(row[0])


def _bytes_of_shards(conn: psycopg.Connection[Any], shards: Sequence[Shards]) -> int:
    names = [name for one in shards for name in one.names]
    if not names:
        return 0
    with_partitions = (
        "SELECT sum(pg_table_size(member)) FROM unnest(%s::text[]) AS n, pgtrickle._tree(to_regclass(n)) AS member"
    )
    row = conn.execute(with_partitions, (names,)).fetchone()
    assert row is not None
    return int(row[0] or 0)
