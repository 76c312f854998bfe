"""Comparisons of values of any two types, in every part of a query that can compare."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

import pgtrickle
from pgtrickle.errors import NotDifferentiableError, PgtrickleError
from tests.support.oracle import assert_equal_to_query

_DATA = tomllib.loads((Path(__file__).parents[1] / "fixtures" / "comparisons.toml").read_text())
VALUES: dict[str, list[str]] = _DATA["values"]
PLACES: dict[str, str] = _DATA["places"]
# The places where values of a single type are compared with each other.
ALIKE: dict[str, str] = _DATA["alike"] | {
    name: PLACES[name]
    for name in ("on", "natural_left", "full_using", "in", "not_in", "exists", "union", "group_joined")
}
OTHER = "other"
_TABLE = re.compile(r"((?:FROM|JOIN|,) )([lr])\b(?!\.)")

TYPES_SQL = """
CREATE TYPE mood AS ENUM ('high', 'low');
CREATE TYPE pair AS (a integer, b text);
CREATE DOMAIN word AS text;
CREATE DOMAIN padded AS character(3);
"""


def comparable_pairs(conn: psycopg.Connection[Any]) -> list[tuple[str, str]]:
    """The pairs of types that PostgreSQL can compare with `=`."""
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
    """The outcome of the queries for a pair of types."""

    modes: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    reasons: set[str] = field(default_factory=set)
    differences: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)  # by stream table: the mode, or WRONG; of a single pair only

    def __iadd__(self, other: Tried) -> Tried:
        for mode, count in other.modes.items():
            self.modes[mode] = self.modes.get(mode, 0) + count
        self.refused += other.refused
        self.reasons |= other.reasons
        self.differences += other.differences
        return self

    @property
    def exact(self) -> int:
        return sum(self.modes.values()) - self.modes.get("refused", 0) - len(self.differences)


def try_pair(
    conn: psycopg.Connection[Any],
    db: pgtrickle.Database,
    left: str,
    right: str,
    placements: Sequence[str] = ("auto", "spark"),
    places: dict[str, str] = PLACES,
    there: psycopg.Connection[Any] | None = None,
) -> Tried:
    """Compare values of two types in all places, through three rounds of changes.

    With `there`, stream tables read the right-hand table from that database, which is registered in `db` as OTHER. The
    home database has a table with the same rows, so that PostgreSQL can compute the expected result there.
    """
    tried = Tried()
    both = [conn] if there is None else [conn, there]
    for each in both:
        each.execute("DROP SCHEMA IF EXISTS pair_st CASCADE; CREATE SCHEMA pair_st")
        each.execute(
            f"CREATE TABLE pair_st.l (k {left}, x integer); CREATE TABLE pair_st.r (k {right}, y integer)".encode()
        )
        each.execute("SET search_path TO pair_st, public")
        for rows, table in ((VALUES[left], "l"), (VALUES[right], "r")):
            for number, value in enumerate(rows[::2]):
                _insert(each, table, value, number)
    tables: dict[str, str] = {}
    for placement, (place, query) in product(placements, places.items()):
        name = f"pair_st.{place}_{placement}"
        qualified = _TABLE.sub(r"\1pair_st.\2", query)
        if not _is_accepted(conn, qualified):
            tried.refused += 1
            tried.places[f"{place}_{placement}"] = "-"
            continue
        asked = qualified if there is None else qualified.replace(" pair_st.r", f" {OTHER}.pair_st.r")
        try:
            created = db.create_stream_table(name, asked, placement=placement, initialize=False)
        except NotDifferentiableError as error:
            if there is None:
                raise
            tried.reasons.add(error.message)
            tried.modes["refused"] = tried.modes.get("refused", 0) + 1
            continue
        except PgtrickleError as error:
            tried.differences.append(f"{left} and {right}, {place}, {placement}: not created: {error}")
            continue
        tables[name] = qualified
        mode = created.effective_mode or "none"
        tried.modes[mode] = tried.modes.get(mode, 0) + 1
        tried.places[f"{place}_{placement}"] = mode
    for change in _rounds(both, VALUES[left], VALUES[right]):
        try:
            db.refresh_all()
        except PgtrickleError as error:
            tried.differences.append(f"{left} and {right}, after {change}: {error}")
        for name, query in tables.items():
            try:
                assert_equal_to_query(conn, name, query, by_value=_columns(conn, name, ("k", "lk", "rk")))
            except AssertionError as error:
                tried.differences.append(f"{left} and {right}, {name} after {change}: {error}")
                tried.places[name.removeprefix("pair_st.")] = "WRONG"
    for name in tables:
        db.drop_stream_table(name)
    return tried


def _rounds(both: Sequence[psycopg.Connection[Any]], left: Sequence[str], right: Sequence[str]) -> Iterator[str]:
    yield "the initial population"
    for conn in both:
        for number, value in enumerate(right[1::2]):
            _insert(conn, "r", value, number)
        _insert(conn, "r", None, 0)
    yield "inserts on the right"
    for conn in both:
        for number, value in enumerate(left[1::2]):
            _insert(conn, "l", value, number)
        _insert(conn, "l", None, 1)
        conn.execute("DELETE FROM r WHERE y = 0")
    yield "inserts on the left, deletes on the right"
    for conn in both:
        conn.execute("UPDATE l SET x = x + 1")
        conn.execute("DELETE FROM r WHERE k IS NULL")
    yield "updates on the left, deletes on the right"


def _insert(conn: psycopg.Connection[Any], table: str, value: str | None, number: int) -> None:
    conn.execute(sql.SQL("INSERT INTO {} VALUES ({}, %s)").format(sql.Identifier(table), sql.Literal(value)), (number,))


def _is_accepted(conn: psycopg.Connection[Any], query: str) -> bool:
    """Whether PostgreSQL can run the query. Not all pairs have a common type; not all types can be sorted or hashed."""
    try:
        conn.execute(query.encode())
    except psycopg.Error:
        return False
    return True


def _columns(conn: psycopg.Connection[Any], table: str, names: Sequence[str]) -> list[str]:
    """Those of the columns that the table has, except ones of type regclass.

    These can contain numbers that are not the OID of a relation, which are not valid text for the type.
    """
    rows = conn.execute(
        "SELECT attname FROM pg_attribute"
        " WHERE attrelid = %s::regclass AND attname = ANY (%s) AND atttypid <> 'regclass'::regtype",
        (table, list(names)),
    ).fetchall()
    return [name for (name,) in rows]
