"""Claims: the exclusive right to refresh a stream table.

A claim is stored in the stream table's catalog row and holds as long as the lease of its process. Its fencing token is
checked by the apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from pgtrickle.catalog.query_files import load_query
from pgtrickle.catalog.stream_table import load_rows
from pgtrickle.postgres.connection import be_pooled
from pgtrickle.refresh.claim.lease import BorrowedLease, Lease
from pgtrickle.refresh.stages import Claimed


@dataclass(frozen=True)
class Claims:
    """The claims of one process on the stream tables of one database."""

    conn: psycopg.Connection[Any]
    lease: Lease | BorrowedLease

    def take(self, ids: Sequence[int]) -> dict[int, int]:
        """Claim the stream tables that no other process holds, and return their fencing tokens by id."""
        self.lease.ensure()
        parameters = {"service": self.lease.service_id, "ids": list(ids)}
        with self.conn.transaction():
            return dict(self.conn.execute(load_query("claim"), parameters).fetchall())

    def claim(self, ids: Sequence[int], *, all_or_none: bool) -> tuple[list[Claimed], list[str]]:
        """The stream tables that could be claimed, and the names of the others."""
        tokens = self.take(ids)
        rows = load_rows(self.conn, ids)
        if any(row.pooler_compatibility_mode for row in rows):
            be_pooled(self.conn)
        taken = [row.label for row in rows if row.pgt_id not in tokens]
        if taken and all_or_none:
            self.release(self.conn, list(tokens))
            return [], taken
        return [Claimed(row, tokens[row.pgt_id]) for row in rows if row.pgt_id in tokens], taken

    def release(self, conn: psycopg.Connection[Any], ids: Sequence[int]) -> None:
        """Release claims."""
        if ids:
            conn.execute(
                "UPDATE pgtrickle.pgt_stream_tables SET claimed_by = NULL WHERE claimed_by = %s AND pgt_id = ANY (%s)",
                (self.lease.service_id, list(ids)),
            )
