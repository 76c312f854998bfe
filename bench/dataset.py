"""The tables, queries and changes that the Rust extension's own benchmark uses, so that figures can be put side by side."""

from __future__ import annotations

import random
from typing import Any, LiteralString

import psycopg
from psycopg import sql

QUERIES: dict[str, LiteralString] = {
    "scan": "SELECT id, region, category, amount, score FROM src",
    "filter": "SELECT id, region, amount FROM src WHERE amount > 5000",
    "aggregate": "SELECT region, sum(amount) AS total, count(*) AS cnt FROM src GROUP BY region",
    "join": "SELECT s.id, s.region, s.amount, d.region_name FROM src s JOIN dim d ON s.region = d.region",
    "join_agg": (
        "SELECT d.region_name, sum(s.amount) AS total, count(*) AS cnt"
        " FROM src s JOIN dim d ON s.region = d.region GROUP BY d.region_name"
    ),
}

_ROWS = (
    "SELECT (ARRAY['north', 'south', 'east', 'west', 'central'])[1 + floor(random() * 5)::int],"
    " (ARRAY['A', 'B', 'C', 'D'])[1 + floor(random() * 4)::int],"
    " floor(random() * 10000)::int, floor(random() * 100)::int FROM generate_series(1, %s)"
)
_INSERT = f"INSERT INTO src (region, category, amount, score) {_ROWS}"


def create_tables(conn: psycopg.Connection[Any], rows: int) -> None:
    """`src` with so many rows and `dim` with five, with an index on the join keys."""
    conn.execute("DROP TABLE IF EXISTS src, dim CASCADE")
    conn.execute(
        "CREATE TABLE src (id serial PRIMARY KEY, region text NOT NULL, category text NOT NULL,"
        " amount int NOT NULL, score int NOT NULL)"
    )
    conn.execute("CREATE TABLE dim (region text PRIMARY KEY, region_name text NOT NULL)")
    conn.execute(
        "INSERT INTO dim SELECT r, initcap(r) || ' region'"
        " FROM unnest(ARRAY['north', 'south', 'east', 'west', 'central']) AS r"
    )
    conn.execute("SELECT setseed(0.5)")
    conn.execute(_INSERT, (rows,))
    conn.execute("CREATE INDEX ON src (region)")
    for table in ("src", "dim"):
        conn.execute(sql.SQL("VACUUM (ANALYZE) {}").format(sql.Identifier(table)))


def change(conn: psycopg.Connection[Any], count: int, chance: random.Random) -> None:
    """One cycle: 70 % updates and 15 % deletions of random rows, 15 % insertions."""
    updates, deletes = round(count * 0.70), round(count * 0.15)
    row = conn.execute("SELECT max(id) FROM src").fetchone()
    assert row is not None
    # More candidates than needed, for some of them were deleted before.
    candidates = chance.sample(range(1, row[0] + 1), min(row[0], 2 * (updates + deletes)))
    found = conn.execute(
        "SELECT id FROM src WHERE id = ANY (%s) ORDER BY random() LIMIT %s", (candidates, updates + deletes)
    )
    ids = [id_ for (id_,) in found.fetchall()]
    conn.execute("UPDATE src SET amount = amount + 1 WHERE id = ANY (%s)", (ids[:updates],))
    conn.execute("DELETE FROM src WHERE id = ANY (%s)", (ids[updates:],))
    conn.execute(_INSERT, (count - updates - deletes,))
    conn.execute("ANALYZE src")


def same_rows(conn: psycopg.Connection[Any], table: str, query: LiteralString) -> bool:
    """Whether a table holds what its query gives, as multisets of printed rows."""
    digest = sql.SQL("SELECT count(*), sum(hashtextextended(t::text, 0)) FROM ({}) AS t")
    stored = sql.SQL("SELECT * FROM {}").format(sql.Identifier(table))
    left, right = (conn.execute(digest.format(rows)).fetchone() for rows in (stored, sql.SQL(query)))
    return left == right
