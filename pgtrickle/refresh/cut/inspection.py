"""What a cut shows: which stream tables may be read in it, and what has happened to their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pgtrickle.catalog.query_files import load_query
from pgtrickle.errors import SourceLockedError
from pgtrickle.frontier.frontier import Frontier, Reflected
from pgtrickle.postgres.transactions import CUT_LOCK_TIMEOUT
from pgtrickle.refresh.cut.cut import Cut
from pgtrickle.refresh.cut.sources import changed_sources
from pgtrickle.refresh.planning.planner import Meaning, Planner, shape_of
from pgtrickle.refresh.progress import Progress
from pgtrickle.refresh.stages import AtCut, Planned
from pgtrickle.sites.source import Source
from pgtrickle.sites.stream_tables import RemoteReading


@dataclass(frozen=True)
class Inspection:
    """The stream tables that can be read in a cut, and those whose plan was compiled for other sources."""

    at_cut: Sequence[AtCut]
    outdated: Sequence[AtCut]


def inspect(cut: Cut, planned: Sequence[Planned], planner: Planner, progress: Progress) -> Inspection:
    """Look at stream tables and their sources at a cut. Outdated plans are forgotten."""
    planned = _readable(cut, planned, progress)
    if not planned:
        return Inspection([], [])
    meanings = planner.meanings(planned)
    frontiers = {table.row.pgt_id: table.row.stored_frontier for table in planned}
    foreign = [source for table in planned for source in _reading(cut, table).sources]
    sources = changed_sources(cut, frontiers, cut.others, foreign)
    found, outdated = [], []
    for table in planned:
        at_cut = _at_cut(cut, table, meanings[table.row.pgt_id], sources[table.row.pgt_id])
        if table.compiled.shape == shape_of(table.row, meanings) and not _is_reshaped(at_cut.remote, cut):
            found.append(at_cut)
            changed = sum(source.changed for source in at_cut.sources)
            progress.reached("cut", at_cut, sources=len(at_cut.sources), changed=changed)
        else:
            planner.programs.plans.forget(table.row.pgt_id)
            outdated.append(at_cut)
    return Inspection(found, outdated)


def _readable(cut: Cut, planned: Sequence[Planned], progress: Progress) -> list[Planned]:
    """The stream tables whose sources are locked for the cut and may be read by their owners.

    The cut's locks keep policies and rights as they are from now on.
    """
    for table in progress.failed.healthy(planned):
        view = f"q_{table.row.pgt_id}"
        if view in cut.unavailable:
            label = table.row.label
            locked = SourceLockedError(
                f"a table that {label} reads is locked by another session",
                f"`pgtrickle refresh {label}` waits {CUT_LOCK_TIMEOUT} for it; a service tries again by itself.",
            )
            progress.failed.add(cut.unavailable[view] or locked, [table])
    planned = progress.failed.healthy(planned)
    rows = cut.conn.execute(load_query("rights"), ([table.row.pgt_id for table in planned],)).fetchall()
    rights = {pgt_id: (problem, hidden) for pgt_id, problem, hidden in rows}
    readable = []
    for table in planned:
        problem, hidden = rights.get(table.row.pgt_id, (None, None))
        if problem is not None:
            progress.failed.suspend(table, problem)
        elif hidden != table.row.hidden:
            readable.append(table.with_row(replace(table.row, hidden=hidden)))
        else:
            readable.append(table)
    return readable


def _reading(cut: Cut, table: Planned) -> RemoteReading:
    return cut.readings.get(table.row.pgt_id) or RemoteReading()


def _at_cut(cut: Cut, table: Planned, meaning: Meaning, sources: Sequence[Source]) -> AtCut:
    row, remote = table.row, _reading(cut, table)
    others = _reflected(table, cut)
    covered = frozenset(source.relid for source in remote.sources if source.shard and source.database in others)
    shards = [cut.shards[relid] for relid in row.spread_here]
    return AtCut(
        table,
        Frontier(cut.node, cut.snapshot, meaning.text, others, covered, meaning.labels),
        tuple(sources),
        cut.time,
        cut.merge_mb,
        remote,
        {name: relid for one in shards for name, relid in zip(one.names, one.relids, strict=True)},
    )


def _reflected(table: Planned, cut: Cut) -> Mapping[str, Reflected]:
    """The frontier's entries for remote databases at their cuts. Databases that were not cut keep their stored ones."""
    known = table.row.stored_frontier
    kept = known.databases if known is not None else {}
    found = {
        name: Reflected(cut.others[name].node, cut.others[name].snapshot, cut.others[name].proof)
        for name in table.row.databases
        if name in cut.others
    }
    return {name: kept[name] for name in table.row.databases if name in kept} | found


def _is_reshaped(remote: RemoteReading, cut: Cut) -> bool:
    """Whether a remote table no longer has the shape that the query was compiled for."""
    for source in remote.sources:
        if source.database not in cut.others:
            continue
        found = cut.others[source.database].consumed.get((source.consumer, source.there))
        if found is not None and found.shape != source.shape:
            return True
    return False
