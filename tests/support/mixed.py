"""A world whose tables have the same columns with different types and collations, and rounds of changes to it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from tests.support.value_kinds import TYPES, World

_TABLES = {
    "a": {"id": "int", "k": "text", "n": "int", "f": "real", "w": "char", "at": "date", "q": "loose"},
    "b": {"id": "int", "k": "char", "n": "money", "f": "float", "w": "varchar", "at": "stamp", "q": "big"},
    "c": {"k": "varchar", "n": "small", "f": "loose", "w": "text", "at": "date", "q": "float"},
    "d": {"id": "big", "k": "nocase", "n": "big", "f": "real", "w": "nocase", "at": "stamp", "q": "small"},
}
_MEETS = (("id", "n", "q"), ("k", "w"), ("f", "q", "n"), ("at", "at"))

_WORDS = ("a", "b", "A", "ab", "B", "", "Ab", "\u00e9", "\u00c9", None)
_WHOLE = ("0", "1", "2", "3", None)
_NUMERIC = ("1", "1.0", "2.50", "2.5", "0.1", "3", "NaN", None)
# No negative values: a float sum that cancels to nearly zero cannot be compared with a relative tolerance.
_FLOAT = ("1", "2", "2.5", "0.1", "-0", "0", "3", "NaN", None)
_DAYS = ("2026-01-01", "2026-01-02", "infinity", None)
_VALUES: dict[str, Sequence[str | None]] = {
    "text": (*_WORDS, "a ", "ab "),
    "varchar": (*_WORDS, "a ", "b   "),
    "char": _WORDS,
    "nocase": (*_WORDS, "aB"),
    "small": _WHOLE,
    "int": _WHOLE,
    "big": _WHOLE,
    "money": ("1", "2", "2.5", "0.1", None),
    "loose": _NUMERIC,
    "real": _FLOAT,
    "float": _FLOAT,
    "date": _DAYS,
    "stamp": (*_DAYS, "2026-01-01 12:00"),
}
_ROWS = 24
# The word whose rows round 5 deletes and round 6 inserts again.
_EMPTIED = "a"


def mixed_world(conn: psycopg.Connection[Any]) -> World:
    """Create the tables. Without ICU, the two case-insensitive columns are ordinary text."""
    conn.execute("CREATE SCHEMA mix")
    collation = sql.SQL("")
    try:
        conn.execute("CREATE COLLATION mix.nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
        collation = sql.SQL(" COLLATE mix.nocase")
        tables = _TABLES
    except psycopg.errors.FeatureNotSupported:
        tables = {
            table: {name: "text" if kind == "nocase" else kind for name, kind in columns.items()}
            for table, columns in _TABLES.items()
        }
    for table, columns in tables.items():
        defined = sql.SQL(", ").join(
            sql.SQL("{} {}{}{}").format(
                sql.Identifier(name),
                sql.SQL(TYPES[kind]),
                collation if kind == "nocase" else sql.SQL(""),
                sql.SQL(" PRIMARY KEY" if name == "id" else ""),
            )
            for name, kind in columns.items()
        )
        conn.execute(sql.SQL("CREATE TABLE mix.{} ({})").format(sql.Identifier(table), defined))
    return World("mix", tables, _MEETS, is_mixed=True)


class MixedWorkload:
    """Changes to the tables. A round depends only on the seed, its number and the data."""

    def __init__(self, seed: int, world: World) -> None:
        self.seed = seed
        self.world = world
        self._rng = random.Random(seed)

    def load(self, conn: psycopg.Connection[Any]) -> None:
        self._rng = random.Random(f"{self.seed}:load")
        for table in self.world.tables:
            self._insert(conn, table, range(_ROWS))

    def round(self, conn: psycopg.Connection[Any], n: int) -> None:
        self._rng = random.Random(f"{self.seed}:{n}")
        for number, (table, columns) in enumerate(self.world.tables.items()):
            name = sql.Identifier("mix", table)
            self._insert(conn, table, range(1000 * n, 1000 * n + self._rng.randint(1, 5)))
            column = self._rng.choice([column for column in columns if column != "id"])
            conn.execute(
                sql.SQL("UPDATE {} SET {} = {} WHERE n = {}").format(
                    name,
                    sql.Identifier(column),
                    sql.Literal(self._rng.choice(_VALUES[columns[column]])),
                    sql.Literal(self._rng.randint(0, 3)),
                )
            )
            conn.execute(sql.SQL("UPDATE {} SET q = coalesce(q, 0) + 1 WHERE q < 2").format(name))
            conn.execute(sql.SQL("DELETE FROM {} WHERE n = {} AND f > 1").format(name, sql.Literal(number)))
            if n == 5:
                conn.execute(sql.SQL("DELETE FROM {} WHERE k = {}").format(name, sql.Literal(_EMPTIED)))
            if n == 6:
                self._insert(conn, table, range(9000, 9003), word=_EMPTIED)

    def _insert(self, conn: psycopg.Connection[Any], table: str, keys: range, word: str | None = None) -> None:
        columns = self.world.tables[table]
        for key in keys:
            values = {
                name: str(key) if name == "id" else self._rng.choice(_VALUES[kind]) for name, kind in columns.items()
            }
            if word is not None:
                values["k"] = word
            row = sql.SQL(", ").join(sql.Literal(value) for value in values.values())
            conn.execute(sql.SQL("INSERT INTO {} VALUES ({})").format(sql.Identifier("mix", table), row))
