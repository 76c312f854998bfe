"""Claims: who refreshes a stream table. A row in the catalog, held under a lease, with a token that the apply proves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from pgtrickle.catalog.analysis import load_query
from pgtrickle.engine.lease import KeptElsewhere, Lease


@dataclass(frozen=True)
class Claims:
    """The claims of one process on the stream tables of one database."""

    conn: psycopg.Connection[Any]
    lease: Lease | KeptElsewhere

    def take(self, ids: Sequence[int], *, all_or_none: bool) -> dict[int, int]:
        """Claim what nobody else holds; gives the tokens."""
        self.lease.ensure()
        parameters = {"service": self.lease.service_id, "ids": list(ids)}
        with self.conn.transaction():
            tokens: dict[int, int] = dict(self.conn.execute(load_query("claim"), parameters).fetchall())
        if all_or_none and len(tokens) < len(ids):
            self.release(self.conn, list(tokens))
            return {}
        return tokens

    def release(self, conn: psycopg.Connection[Any], ids: Sequence[int], pause: float = 0.0) -> None:
        """Give claims back; with a pause, for whom there is nothing to do until then."""
        if ids:
            conn.execute(
                "UPDATE pgtrickle.pgt_stream_tables SET claimed_by = NULL,"
                " next_due = greatest(next_due, clock_timestamp() + make_interval(secs => %s))"
                " WHERE claimed_by = %s AND pgt_id = ANY (%s)",
                (pause, self.lease.service_id, list(ids)),
            )
