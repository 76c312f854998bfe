"""Comparisons of values of any two types, in every place of a query that has one."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

import pgtrickle
from pgtrickle.errors import PgtrickleError
from tests.support.oracle import assert_equal_to_query

_DATA = tomllib.loads((Path(__file__).parents[1] / "fixtures" / "comparisons.toml").read_text())
VALUES: dict[str, list[str]] = _DATA["values"]
PLACES: dict[str, str] = _DATA["places"]

TYPES_SQL = """
CREATE TYPE mood AS ENUM ('high', 'low');
CREATE TYPE pair AS (a integer, b text);
CREATE DOMAIN word AS text;
CREATE DOMAIN padded AS character(3);
"""


def comparable_pairs(conn: psycopg.Connection[Any]) -> list[tuple[str, str]]:
    """The pairs of types that PostgreSQL compares by `=`."""
    found = []
    for left, right in product(VALUES, repeat=2):
        try:
            conn.execute(f"SELECT NULL::{left} = NULL::{right}".encode())
        except psycopg.Error:
            continue
        found.append((left, right))
    return found


@dataclass
class Tried:
    """What became of the queries of a pair."""

    modes: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    differences: list[str] = field(default_factory=list)

    def __iadd__(self, other: Tried) -> Tried:
        for mode, count in other.modes.items():
            self.modes[mode] = self.modes.get(mode, 0) + count
        self.refused += other.refused
        self.differences += other.differences
        return self

    @property
    def exact(self) -> int:
        return sum(self.modes.values()) - len(self.differences)


def try_pair(
    conn: psycopg.Connection[Any],
    db: pgtrickle.Database,
    left: str,
    right: str,
    placements: Sequence[str] = ("auto", "spark"),
    places: dict[str, str] = PLACES,
) -> Tried:
    """Compare values of two types in all places, through three rounds of changes."""
    tried = Tried()
    conn.execute("DROP SCHEMA IF EXISTS pair_st CASCADE; CREATE SCHEMA pair_st")
    conn.execute(
        f"CREATE TABLE pair_st.l (k {left}, x integer); CREATE TABLE pair_st.r (k {right}, y integer)".encode()
    )
    conn.execute("SET search_path TO pair_st, public")
    tables: dict[str, str] = {}
    for rows, table in ((VALUES[left], "l"), (VALUES[right], "r")):
        for number, value in enumerate(rows[::2]):
            _insert(conn, table, value, number)
    for placement, (place, query) in product(placements, places.items()):
        name = f"pair_st.{place}_{placement}"
        qualified = query.replace("FROM l", "FROM pair_st.l").replace("FROM r", "FROM pair_st.r")
        qualified = qualified.replace("JOIN r", "JOIN pair_st.r").replace(", r WHERE", ", pair_st.r WHERE")
        if not _is_accepted(conn, qualified):
            tried.refused += 1
            continue
        try:
            created = db.create_stream_table(name, qualified, placement=placement, initialize=False)
        except PgtrickleError as error:
            tried.differences.append(f"{left} and {right}, {place}, {placement}: not created: {error}")
            continue
        tables[name] = qualified
        mode = created.effective_mode or "none"
        tried.modes[mode] = tried.modes.get(mode, 0) + 1
    for change in _rounds(conn, VALUES[left], VALUES[right]):
        try:
            db.refresh_all()
        except PgtrickleError as error:
            tried.differences.append(f"{left} and {right}, after {change}: {error}")
        for name, query in tables.items():
            try:
                assert_equal_to_query(conn, name, query, by_value=_columns(conn, name, ("k", "lk", "rk")))
            except AssertionError as error:
                tried.differences.append(f"{left} and {right}, {name} after {change}: {error}")
    for name in tables:
        db.drop_stream_table(name)
    return tried


def _rounds(conn: psycopg.Connection[Any], left: Sequence[str], right: Sequence[str]) -> Iterator[str]:
    yield "the first filling"
    for number, value in enumerate(right[1::2]):
        _insert(conn, "r", value, number)
    _insert(conn, "r", None, 0)
    yield "inserts on the right"
    for number, value in enumerate(left[1::2]):
        _insert(conn, "l", value, number)
    _insert(conn, "l", None, 1)
    conn.execute("DELETE FROM r WHERE y = 0")
    yield "inserts on the left, deletes on the right"
    conn.execute("UPDATE l SET x = x + 1")
    conn.execute("DELETE FROM r WHERE k IS NULL")
    yield "updates on the left, deletes on the right"


def _insert(conn: psycopg.Connection[Any], table: str, value: str | None, number: int) -> None:
    conn.execute(sql.SQL("INSERT INTO {} VALUES ({}, %s)").format(sql.Identifier(table), sql.Literal(value)), (number,))


def _is_accepted(conn: psycopg.Connection[Any], query: str) -> bool:
    """Whether PostgreSQL can run it: not every pair has a common type, not every type can be sorted or hashed."""
    try:
        conn.execute(query.encode())
    except psycopg.Error:
        return False
    return True


def _columns(conn: psycopg.Connection[Any], table: str, names: Sequence[str]) -> list[str]:
    rows = conn.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attname = ANY (%s)", (table, list(names))
    ).fetchall()
    return [name for (name,) in rows]
