"""Capture and sources that changed while a refresh was under way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import psycopg

from pgtrickle.errors import SourceChangedError, SourceLockedError
from pgtrickle.postgres.fence import run_as_owner
from pgtrickle.refresh.planning.programs import Plans
from pgtrickle.refresh.progress import Progress
from pgtrickle.refresh.stages import Decided
from pgtrickle.sites.protocol import Sites


def recapture(
    conn: psycopg.Connection[Any], tables: Sequence[Decided], sites: Sites, plans: Plans, progress: Progress
) -> list[Decided]:
    """Make capture fit sources that were altered, before the stream tables on them are re-initialized.

    Returns the stream tables that must be read again after that.
    """
    found = []
    for table in tables:
        known = table.row.stored_frontier
        stale = set(table.decision.retrack)
        if known is None:  # nothing was read yet: capture is as it should be, unless it is missing
            stale &= {source.relid for source in table.sources if not source.attached or source.lacking}
        if not stale:
            continue
        here = sites.recapture(table, stale, progress.failed)
        if progress.failed.of(table) is not None or not _recapture_here(conn, table, here, progress):
            continue
        if known is not None and known.node != table.frontier.node:
            conn.execute("SELECT pgtrickle._reset_copied_database()")
            for name in (source.stable_name for source in table.sources if not source.database):
                conn.execute("SELECT pgtrickle._drop_foreign_changes(%s)", (name,))
        if stale - set(here) and table.decision.reason is not None:
            # The new subscription no longer shows the reason.
            mark_reinit(conn, table.row.pgt_id, table.decision.reason)
        plans.forget(table.row.pgt_id)
        found.append(table)
    return found


def _recapture_here(conn: psycopg.Connection[Any], table: Decided, relids: Collection[int], progress: Progress) -> bool:
    """Make capture of these tables of the home database fit; return whether that succeeded."""
    try:
        for relid in relids:
            run_as_owner(conn, table.row, f"SELECT pgtrickle._retrack({relid:d}::oid::regclass)")
    except psycopg.errors.LockNotAvailable as error:
        message = error.diag.message_primary or str(error)
        locked = SourceLockedError(message, error.diag.message_hint or "A service tries again by itself.")
        progress.failed.add(locked, [table])
        return False
    except psycopg.Error as error:  # concerns this owner's stream table only
        if conn.broken or conn.closed:
            raise
        progress.failed.add(error, [table])
        return False
    return True


def mark_reinit(conn: psycopg.Connection[Any], pgt_id: int, reason: str) -> None:
    """Let the next refresh re-initialize a stream table."""
    conn.execute("UPDATE pgtrickle.pgt_stream_tables SET reinit_reason = %s WHERE pgt_id = %s", (reason, pgt_id))


def altered_since(conn: psycopg.Connection[Any], tables: Sequence[Decided]) -> list[Decided]:
    """The stream tables whose sources here have other partitions, shards or capture triggers than when they were read.

    The cut's lock does not keep these from being added or removed.
    """
    names = {
        source.relid: source.signature
        for table in tables
        for source in table.sources
        if source.attached and not source.database
    }
    if not names:
        return []
    rows = conn.execute(
        "SELECT r, pgtrickle._capture_signature(r::oid::regclass) FROM unnest(%s::bigint[]) AS r", (list(names),)
    ).fetchall()
    altered = {relid for relid, signature in rows if signature != names[relid]}
    return [
        table
        for table in tables
        if any(source.relid in altered for source in table.sources) or have_shards_moved(conn, table)
    ]


def have_shards_moved(conn: psycopg.Connection[Any], table: Decided) -> bool:
    """Whether the coordinator's shards are no longer those that were read.

    The cut's lock on the distributed table does not prevent moves.
    """
    shards = table.at_cut.shards
    if not shards or table.job is None:
        return False
    rows = conn.execute(
        "SELECT n, to_regclass(n)::oid::bigint FROM unnest(%s::text[]) AS n", (list(shards),)
    ).fetchall()
    return None in shards.values() or dict(rows) != shards


def keeps_changing(what: str) -> SourceChangedError:
    return SourceChangedError(
        f"{what} keep changing", "A service tries again by itself; otherwise refresh again later."
    )
