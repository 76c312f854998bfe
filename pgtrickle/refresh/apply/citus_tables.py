"""Applies to stream tables whose rows a Citus cluster stores on other nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa

from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.enums import Storage
from pgtrickle.errors import DatabaseFailedError, SourceLockedError
from pgtrickle.postgres.fence import run_as_owner
from pgtrickle.refresh.apply.load import Delta
from pgtrickle.sites.citus.cluster import PREPARED

RECOVERY_LOOKS = 10  # a tenth of a second apart
LARGE_ROWS = 100_000  # from this size on, a stream table over distributed tables is distributed too


@contextmanager
def errors_of_nodes(conn: psycopg.Connection[Any], row: StreamTableRow) -> Iterator[None]:
    """Turn errors of other nodes, while a table placed there is changed, into DatabaseFailedError, which is retried."""
    try:
        yield
    except (psycopg.errors.InternalError_, psycopg.OperationalError) as error:
        if conn.broken or conn.closed:
            raise
        raise DatabaseFailedError(
            f"{row.label} could not be changed on all nodes: {error.diag.message_primary}",
            "Nothing was changed. A service tries again by itself; pgtrickle.citus_status tells of nodes.",
        ) from error


def require_recovered(conn: psycopg.Connection[Any], row: StreamTableRow) -> None:
    """Raise SourceLockedError while a crash has left transactions prepared, or a node cannot be reached.

    A crash may have left part of an earlier apply prepared but not committed. Its rows become visible when Citus
    commits it.
    """
    left: set[str] | None = None
    for _ in range(RECOVERY_LOOKS):
        rows = conn.execute("SELECT success, result FROM run_command_on_workers(%s)", (PREPARED,)).fetchall()
        if not all(success for success, _ in rows):
            break
        here = conn.execute(PREPARED).fetchone()
        assert here is not None
        found = {gid for gids in (here[0], *(result for _, result in rows)) for gid in gids.split()}
        left = found if left is None else left & found
        if not left:
            return
        time.sleep(0.1)  # transactions that are committing just now end soon
    raise SourceLockedError(
        f"a node cannot be reached, or transactions that a crash left are not recovered: {row.label} waits for them",
        "A service tries again by itself; Citus recovers them every citus.recover_2pc_interval.",
    )


def place_on_nodes(
    conn: psycopg.Connection[Any], row: StreamTableRow, delta: Delta | None, settings: Mapping[str, str]
) -> StreamTableRow:
    """Have Citus place a stream table that is filled for the first time; small ones become reference tables.

    Returns its new catalog row.
    """
    rows = delta.num_rows if isinstance(delta, pa.Table) else LARGE_ROWS if delta is not None else 0
    placement = Storage.REFERENCE if rows < LARGE_ROWS else Storage.DISTRIBUTED
    run_as_owner(conn, row, f"SELECT pgtrickle._distribute_stream_table({row.pgt_id:d}, '{placement}', NULL)", settings)
    return replace(row, st_placement=placement)


def commit_in_two_phases(conn: psycopg.Connection[Any], pgt_id: int, token: int) -> None:
    """Write to a table that Citus manages, so that all nodes prepare before any of them commits."""
    conn.execute(
        "INSERT INTO pgtrickle_changes.pgt_applies AS a (pgt_id, fencing_token) VALUES (%s, %s)"
        " ON CONFLICT (pgt_id) DO UPDATE SET fencing_token = excluded.fencing_token",
        (pgt_id, token),
    )
