"""The part of a distributed table that is on one node."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from pgtrickle.catalog.analysis import load_query

# What is where: the hashes are Citus's own, of the values as the column has them.
_HOLDERS = (
    "SELECT s.number, array_agg(k.text ORDER BY k.text)"
    " FROM unnest({}::text[]) AS k(text)"
    " JOIN unnest({}::int[], {}::int[]) WITH ORDINALITY AS s(lowest, highest, number)"
    " ON worker_hash(k.text::{}) BETWEEN s.lowest AND s.highest GROUP BY s.number ORDER BY s.number"
)


@dataclass(frozen=True)
class Shards:
    """What a node has of a distributed table, at its cut."""

    names: tuple[str, ...]  # quoted, with schema
    query: str  # for the rows of all of them
    column: str | None = None  # whose hash tells in which of them a row is, where one does
    lowest: tuple[int, ...] = ()  # hash in each
    highest: tuple[int, ...] = ()
    relids: tuple[int | None, ...] = ()  # what the names stood for; None for what is younger than the cut

    def holding(self, conn: psycopg.Connection[Any], type_: str, values: Sequence[str]) -> sql.Composable:
        """A query for the rows with these values in that column: shards that can have none are left alone."""
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
    """What a node has of distributed tables, by their OIDs there."""
    if not tables:
        return {}
    rows = conn.execute(load_query("shards_here"), {"tables": sorted(tables)}).fetchall()
    return {
        table: Shards(tuple(names), query, column, tuple(lowest), tuple(highest), tuple(relids))
        for table, names, query, column, lowest, highest, relids in rows
    }
