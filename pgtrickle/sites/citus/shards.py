"""The shards of a distributed table on one node."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from pgtrickle.catalog.query_files import load_query

# The shards that can hold some values. The hashes are Citus's own, of the values in the column's type.
_HOLDERS = (
    "SELECT s.number, array_agg(k.text ORDER BY k.text)"
    " FROM unnest({}::text[]) AS k(text)"
    " JOIN unnest({}::int[], {}::int[]) WITH ORDINALITY AS s(lowest, highest, number)"
    " ON worker_hash(k.text::{}) BETWEEN s.lowest AND s.highest GROUP BY s.number ORDER BY s.number"
)


@dataclass(frozen=True)
class Shards:
    """The shards of a distributed table that a node has at its cut."""

    names: tuple[str, ...]  # quoted, with schema
    query: str  # for the rows of all of them
    column: str | None = None  # the column whose hash determines the shard of a row, if there is one
    lowest: tuple[int, ...] = ()  # hash in each shard
    highest: tuple[int, ...] = ()
    relids: tuple[int | None, ...] = ()  # OIDs behind the names; None for a table that is newer than the cut

    def holding(self, conn: psycopg.Connection[Any], type_: str, values: Sequence[str]) -> sql.Composable:
        """A query for the rows with these values in `column`, which reads only shards that can have some."""
        assert self.column is not None
        kind = sql.SQL(type_)
        asked = sql.SQL(_HOLDERS).format(
            sql.Literal(list(values)), sql.Literal(list(self.lowest)), sql.Literal(list(self.highest)), kind
        )
        parts = [
            sql.SQL("SELECT * FROM {} WHERE {} = ANY ({}::text[]::{}[])").format(
                sql.SQL(self.names[number - 1]), sql.Identifier(self.column), sql.Literal(texts), kind
            )
            for number, texts in conn.execute(asked).fetchall()
        ]
        return sql.SQL(" UNION ALL ").join(parts) if parts else sql.SQL(f"SELECT * FROM {self.names[0]} WHERE false")


def shards_here(conn: psycopg.Connection[Any], tables: Collection[int]) -> dict[int, Shards]:
    """The shards of distributed tables that a node has, by the tables' OIDs there."""
    if not tables:
        return {}
    rows = conn.execute(load_query("shards_here"), {"tables": sorted(tables)}).fetchall()
    return {
        table: Shards(tuple(names), query, column, tuple(lowest), tuple(highest), tuple(relids))
        for table, names, query, column, lowest, highest, relids in rows
    }
