"""Random queries over the sources of a world. The same seed gives the same queries, each independent of the others.

Queries are valid by construction as far as that is easy. Those that PostgreSQL refuses, and those that return no rows
or too many, are discarded (`admitted`). Values have kinds, so that no query's result depends on which of several equal
values represents them (1.5 or 1.50), on the order of rows, or on the digits of a float sum.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import psycopg
from psycopg import sql

from tests.support.expressions import Expressions
from tests.support.value_kinds import FAMILIES, KINDS_OF_OUTPUT, ORDERED, SHOP, TYPES, Value, World, fresh

MOST_ROWS = 1500
_TIMEOUT = "2s"
_JOINS = ("JOIN", "JOIN", "JOIN", "LEFT JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN", "CROSS JOIN")


@dataclass(frozen=True)
class GeneratedQuery:
    """A generated query: its number for the seed, its text, and the columns to compare by value."""

    number: int
    sql: str
    by_value: frozenset[str]


@dataclass(frozen=True)
class _Query:
    sql: str
    columns: tuple[tuple[str, Value], ...]  # the name, and the value as an enclosing query sees it

    def under(self, alias: str) -> list[Value]:
        return [Value(f"{alias}.{name}", value.kind, value.worn) for name, value in self.columns]


def generated(seed: int, first: int = 0, world: World = SHOP) -> Iterator[GeneratedQuery]:
    """Yield queries endlessly."""
    for number in count(first):
        rng = random.Random(f"{seed}:{number}")
        # Small queries test types and collations well enough, and take a fraction of the time to plan.
        depth = rng.choice((0, 0, 1, 1, 2)) if world.is_mixed else 2
        query = _Generator(rng, world).query(depth)
        # The oracle compares floats with a tolerance.
        by_value = frozenset(name for name, value in query.columns if value.is_loose and value.kind != "float")
        yield GeneratedQuery(number, query.sql, by_value)


def admitted(conn: psycopg.Connection[Any], query: GeneratedQuery) -> bool:
    """Whether PostgreSQL accepts the query, and it returns at least one row but not too many."""
    try:
        with conn.transaction():
            conn.execute(sql.SQL("SET LOCAL statement_timeout = {}").format(sql.Literal(_TIMEOUT)))
            row = conn.execute(sql.SQL("SELECT count(*) FROM ({}) AS q").format(sql.SQL(query.sql))).fetchone()
    except psycopg.Error:
        return False
    assert row is not None
    return bool(0 < row[0] <= MOST_ROWS)


@dataclass
class _Generator:
    rng: random.Random
    world: World
    _names: Iterator[int] = field(default_factory=lambda: count(1))
    _ctes: list[tuple[str, _Query]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.make = Expressions(self.rng, self.world)
        self.chance = self.make.chance

    def name(self, prefix: str) -> str:
        return f"{prefix}{next(self._names)}"

    def query(self, depth: int, wanted: Sequence[str] | None = None) -> _Query:
        """A query of at most this nesting depth; `wanted` are the kinds of its columns, in order."""
        if depth == 2 and wanted is None and self.chance(0.15):
            return self.with_()
        if depth and self.chance(0.12):
            return self.union(depth, wanted)
        text, scope = self.from_(depth)
        where = [self.condition(scope, depth) for _ in range(self.rng.choice((0, 0, 1, 1, 2)))]
        text += _where(where)
        share = self.rng.random()
        if share < 0.35:
            return self.grouped(text, fresh(scope), wanted)
        return self.output(text, scope, depth, wanted, distinct=share < 0.5)

    def with_(self) -> _Query:
        name, inner = self.name("w"), self.query(1)
        self._ctes.append((name, inner))
        outer = self.query(1)
        word = self.rng.choice(("", "", "MATERIALIZED ", "NOT MATERIALIZED "))
        return _Query(f"WITH {name} AS {word}({inner.sql}) {outer.sql}", outer.columns)

    def union(self, depth: int, wanted: Sequence[str] | None) -> _Query:
        kinds = wanted or [self.rng.choice(KINDS_OF_OUTPUT) for _ in range(self.rng.randint(1, 3))]
        others = [self.another(kind) for kind in kinds]
        first, second = self.query(depth - 1, kinds), self.query(depth - 1, others)
        kinds = [kind if kind == other else FAMILIES[kind] for kind, other in zip(kinds, others, strict=True)]
        worn = [a.worn or b.worn for (_, a), (_, b) in zip(first.columns, second.columns, strict=True)]
        word = "UNION" if self.chance(0.25) and not any(worn) else "UNION ALL"
        values = [Value(name, kind) for (name, _), kind in zip(first.columns, kinds, strict=True)]
        columns = [
            (value.sql, Value(value.sql, value.kind, is_worn or (word == "UNION" and value.is_loose)))
            for value, is_worn in zip(values, worn, strict=True)
        ]
        return _Query(f"{first.sql} {word} {second.sql}", tuple(columns))

    def another(self, kind: str) -> str:
        """A kind that a UNION can combine with this one in a column."""
        if not self.world.is_mixed or kind not in FAMILIES or self.chance(0.5):
            return kind
        return self.rng.choice([other for other in TYPES if FAMILIES.get(other) == FAMILIES[kind]])

    def output(
        self, text: str, scope: list[Value], depth: int, wanted: Sequence[str] | None, *, distinct: bool
    ) -> _Query:
        kinds: Sequence[str | None] = wanted or [None] * self.rng.randint(1, 4)
        values = [self.shown(fresh(scope) if distinct else scope, depth, kind) for kind in kinds]
        columns = [(self.name("o"), value) for value in values]
        items = ", ".join(f"{value.sql} AS {name}" for name, value in columns)
        worn = [(name, Value(name, value.kind, value.worn or (distinct and value.is_loose))) for name, value in columns]
        return _Query(f"SELECT {'DISTINCT ' if distinct else ''}{items} FROM {text}", tuple(worn))

    def shown(self, scope: list[Value], depth: int, kind: str | None) -> Value:
        """The value of an output column: mostly a column, sometimes an expression or a condition."""
        if kind is None and scope and self.chance(0.6):
            return self.rng.choice(scope)
        usable = fresh(scope)
        if kind in {None, "bool"} and depth and usable and self.chance(0.15):
            return Value(self.subquery(usable, depth), "bool")
        if kind in {None, "text"} and usable and self.chance(0.15):
            test = self.condition(usable, depth)
            return Value(f"CASE WHEN {test} THEN {self.make.value(usable, 'text').sql} ELSE 'other' END", "text")
        if kind in {None, "bool"} and usable and self.chance(0.2):
            return Value(f"({self.make.test(usable)})", "bool")
        return self.make.value(usable, kind or self.rng.choice(("int", "text", "money")))

    def grouped(self, text: str, scope: list[Value], wanted: Sequence[str] | None) -> _Query:
        keys = [self.make.key(scope) for _ in range(self.rng.choice((0, 1, 1, 1, 2)))] if scope else []
        kinds: Sequence[str | None] = wanted or [None] * self.rng.randint(1, 3)
        values = [key for key in keys if wanted is None and self.chance(0.85)]
        values = [Value(key.sql, key.kind, key.is_loose) for key in values]
        values += [self.make.aggregate(scope, kind) for kind in kinds]
        columns = [(self.name("o"), value) for value in values]
        items = ", ".join(f"{value.sql} AS {name}" for name, value in columns)
        group = f" GROUP BY {', '.join(key.sql for key in keys)}" if keys else ""
        having = f" HAVING {self.make.having(scope)}" if self.chance(0.3) else ""
        return _Query(f"SELECT {items} FROM {text}{group}{having}", tuple(columns))

    def from_(self, depth: int) -> tuple[str, list[Value]]:
        text, scope = self.source(depth)
        for _ in range(self.rng.choice((0, 0, 1, 1, 1, 2) if depth else (0, 0, 1))):
            other, theirs = self.source(depth - 1)
            kind = self.rng.choice(_JOINS)
            shared = self.shared_names(scope, theirs)
            if kind == "CROSS JOIN":
                text += f" {kind} {other}"
            elif shared and self.chance(0.4):
                name, merged = self.rng.choice(shared)
                text += f" {kind} {other} USING ({name})"
                theirs = [*theirs, Value(name, merged, worn=True)]
            else:
                text += f" {kind} {other} ON {self.meeting(scope, theirs, full=kind == 'FULL JOIN')}"
            scope = scope + theirs
        return text, scope

    def shared_names(self, left: list[Value], right: list[Value]) -> list[tuple[str, str]]:
        """The columns that USING can name, with the kind of the merged column."""
        if not self.world.is_mixed:
            return []
        names = [value.column for value in left]
        return [
            (a.column, a.kind if a.kind == b.kind else FAMILIES[a.kind])
            for a, b in self.world.pairs(left, right)
            if a.column == b.column and names.count(a.column) == 1 and a.kind in FAMILIES
        ]

    def source(self, depth: int) -> tuple[str, list[Value]]:
        alias = self.name("t")
        if self._ctes and self.chance(0.6):
            name, query = self.rng.choice(self._ctes)
            return f"{name} AS {alias}", query.under(alias)
        if depth > 0 and self.chance(0.3):
            query = self.query(depth - 1)
            return f"({query.sql}) AS {alias}", query.under(alias)
        table = self.rng.choice(list(self.world.tables))
        columns = self.world.tables[table].items()
        return f"{self.world.schema}.{table} AS {alias}", [Value(f"{alias}.{name}", kind) for name, kind in columns]

    def meeting(self, left: list[Value], right: list[Value], *, full: bool) -> str:
        """A condition between two inputs, in most cases one for which rows have partners."""
        found = self.world.pairs(left, right)
        if not found:
            return "true"
        a, b = self.rng.choice(self.world.likely(found) if self.world.likely(found) and self.chance(0.85) else found)
        if full:  # PostgreSQL accepts nothing but equality here
            return f"{a.sql} = {b.sql}"
        test = f"{a.sql} = {b.sql}"
        if self.chance(0.12):
            test = f"{a.sql} IS NOT DISTINCT FROM {b.sql}"
        elif a.kind in ORDERED and self.chance(0.12):
            test = f"{a.sql} {self.rng.choice(('<', '>=', '<>'))} {b.sql}"
        elif a.kind in {"int", "big"} and self.chance(0.1):
            test = f"{a.sql} + 1 = {b.sql}"
        if self.chance(0.25):
            return f"({test}) {self.rng.choice(('AND', 'AND', 'AND', 'OR'))} ({self.make.test(fresh(left + right))})"
        return test

    def condition(self, scope: list[Value], depth: int) -> str:
        usable = fresh(scope)
        if depth and usable and self.chance(0.2):
            test = self.subquery(usable, depth)
            return test if self.chance(0.8) else f"{test} {self.rng.choice(('AND', 'OR'))} ({self.make.test(usable)})"
        return self.make.test(usable)

    def subquery(self, scope: list[Value], depth: int) -> str:
        """EXISTS or IN, correlated or not, over a source or a nested query."""
        text, inner = self.from_(depth - 1) if self.chance(0.35) else self.source(depth - 1)
        found = self.world.pairs(scope, inner)
        negated = self.rng.choice(("", "NOT "))
        conditions = [self.make.test(fresh(inner))] if self.chance(0.5) else []
        if found and self.chance(0.5):
            a, b = self.rng.choice(self.world.likely(found) or found)
            if self.chance(0.3):
                mine, theirs = self.rng.choice(found)
                conditions.append(f"{mine.sql} <> {theirs.sql}")
            return f"{a.sql} {negated}IN (SELECT {b.sql} FROM {text}{_where(conditions)})"
        if found and self.chance(0.85):
            a, b = self.rng.choice(self.world.likely(found) or found)
            word = "=" if a.kind not in ORDERED or self.chance(0.8) else self.rng.choice(("<", ">", "<>"))
            conditions.append(f"{b.sql} {word} {a.sql}")
        return f"{negated}EXISTS (SELECT 1 FROM {text}{_where(conditions)})"


def _where(conditions: Sequence[str]) -> str:
    return f" WHERE {' AND '.join(f'({part})' for part in conditions)}" if conditions else ""
