"""The sources of stream tables as they are at a cut, and what happened to them since the frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from pgtrickle.catalog.databases import is_node
from pgtrickle.catalog.query_files import load_query
from pgtrickle.frontier.frontier import Frontier
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.frontier.window import since
from pgtrickle.refresh.cut.cut import Cut
from pgtrickle.sites.remote.cut import RemoteCut
from pgtrickle.sites.shared_cut import SharedCut
from pgtrickle.sites.source import ForeignSource, Source

Probe = tuple[str, Snapshot]


def changed_sources(
    cut: Cut,
    frontiers: Mapping[int, Frontier | None],
    others: Mapping[str, RemoteCut],
    foreign: Sequence[ForeignSource],
) -> dict[int, list[Source]]:
    """The sources of each stream table, with what happened to them since its frontier."""
    with cut.conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(load_query("sources"), {"ids": list(frontiers)}).fetchall()
    remote = {(one.pgt_id, one.relid): one for one in foreign}
    found = [(row["pgt_id"], _at_cut(row, others, remote.get((row["pgt_id"], row["relid"])))) for row in rows]
    windows: list[Snapshot | None] = []
    for pgt_id, source in found:
        frontier = frontiers[pgt_id]
        if frontier is None or source.resting:
            windows.append(None)
            continue
        node = others[source.database].node if source.database else cut.node
        windows.append(_window(frontier, source, node))
    answers: dict[str, dict[Probe, tuple[bool, tuple[str, ...]]]] = {}
    for database in {source.database for _, source in found if not source.resting}:
        conn = others[database].conn if database else cut.conn
        here = [(one, window) for (_, one), window in zip(found, windows, strict=True) if one.database == database]
        shared_cut = others[database].shared_cut if database else None
        answers[database] = _probe(conn, [(one, window) for one, window in here if window is not None], shared_cut)
    result: dict[int, list[Source]] = {pgt_id: [] for pgt_id in frontiers}
    for (pgt_id, source), window in zip(found, windows, strict=True):
        if window is not None and source.stable_name is not None:
            changed, markers = answers[source.database][source.stable_name, window]
            source = replace(source, changed=changed, markers=markers)
        elif _joins(frontiers[pgt_id], source, remote.get((pgt_id, source.relid))):
            moved_in = is_node(source.database) and bool(others[source.database].shards[source.there].names)
            source = replace(source, changed=True, joined=True, moved_in=moved_in)
        result[pgt_id].append(source)
    return result


def _joins(frontier: Frontier | None, source: Source, known: ForeignSource | None) -> bool:
    """Whether it is a set member's table that is captured since the last refresh, and is read for the first time."""
    if frontier is None or known is None or not known.shard or not source.attached or source.resting:
        return False
    return source.database not in frontier.databases and source.relid not in frontier.shards


def _at_cut(row: dict[str, Any], others: Mapping[str, RemoteCut], known: ForeignSource | None) -> Source:
    """A source as it is in its own database."""
    label = f"{row['schema']}.{row['name']}"
    if known is None:
        return Source(
            row["relid"],
            label,
            row["buffer"],
            row["stable_name"],
            row["signature"],
            row["known_signature"],
            row["buffered"],
            spread=row["spread"],
        )
    label = f"{known.database}.{known.schema}.{known.name}"
    there: dict[str, Any] = {
        "database": known.database,
        "there": known.there,
        "shard": known.shard,
        "spread": is_node(known.database),
    }
    if known.database not in others:
        signature = row["known_signature"]
        source = Source(row["relid"], label, None, None, signature, signature, 0, resting=True)
        return replace(source, **there)
    consumed = others[known.database].consumed.get((known.consumer, known.there))
    if consumed is None:
        source = Source(row["relid"], label, None, None, None, row["known_signature"], 0)
    else:
        source = Source(
            row["relid"],
            label,
            consumed.buffer,
            consumed.stable_name,
            consumed.signature,
            row["known_signature"],
            consumed.buffered,
            proofs=(consumed.proof, consumed.former_proof),
        )
    return replace(source, **there)


def _window(frontier: Frontier, source: Source, node: str) -> Snapshot | None:
    """The snapshot since which changes of a source are read; None if the frontier has no valid one for it."""
    if not source.attached:
        return None
    if not source.database:
        return frontier.snapshot if frontier.node == node else None
    known = frontier.databases.get(source.database)
    return known.snapshot if known is not None and known.node == node and known.proof in source.proofs else None


def _probe(
    conn: psycopg.Connection[Any], wanted: Sequence[tuple[Source, Snapshot]], shared_cut: SharedCut | None
) -> dict[Probe, tuple[bool, tuple[str, ...]]]:
    """For each source and frontier, whether the source has changed since, and the markers in its database."""
    probes: dict[Probe, sql.Composable] = {}
    for source, window in wanted:
        assert source.stable_name is not None
        assert source.buffer is not None
        buffer = sql.Identifier("pgtrickle_changes", source.buffer)
        marked = sql.SQL(
            "ARRAY(SELECT DISTINCT kind FROM pgtrickle_changes.pgt_markers WHERE source_stable_name = {} AND {})"
        ).format(sql.Literal(source.stable_name), since(window, "xid"))
        changed: sql.Composable = sql.SQL("EXISTS (SELECT FROM {} WHERE {})").format(buffer, since(window, "__pgt_xid"))
        brokered = shared_cut.of(source.stable_name, window) if shared_cut is not None else None
        if brokered is not None:
            changed = sql.Literal(brokered.changed(window) > 0)
        probes[source.stable_name, window] = sql.SQL("({}, {})").format(changed, marked)
    if not probes:
        return {}
    answers = conn.execute(sql.SQL("VALUES ") + sql.SQL(", ").join(probes.values())).fetchall()
    return {key: (changed, tuple(markers)) for key, (changed, markers) in zip(probes, answers, strict=True)}
