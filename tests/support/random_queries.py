"""Random queries over small tables and their changes, for Hypothesis: it shrinks failures to a readable text.

Queries are written as PostgreSQL would print them, over few small numbers, so that rows meet, repeat and cancel out. An
alias is used once in a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, TypeAlias, TypeVar

from hypothesis import strategies as st

from pgtrickle.query.plan import Relation
from tests.support.evaluation import NAN, Row, Value
from tests.support.interpreter import States, TableState, minus, zset
from tests.support.planning import INTEGER, MONEY, table

T = TypeVar("T")
Kind: TypeAlias = Literal["number", "boolean"]

TABLES = [
    table(1, "t", {"a": INTEGER, "b": INTEGER, "c": MONEY}),
    table(2, "u", {"a": INTEGER, "b": INTEGER}),
    table(3, "v", {"id": INTEGER, "a": INTEGER}, ("id",)),
]

_COMPARISONS = ("=", "=", "<>", "<", "<=", ">", ">=", "IS DISTINCT FROM", "IS NOT DISTINCT FROM")
_JOINS = ("JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN")
_ADDITIVE = ("count(*)", "count({})", "sum({})", "avg({})")
_RECOMPUTED = ("min({})", "max({})", "count(DISTINCT {})", "sum(DISTINCT {})")
_MOST_SOURCES = 4
_MOST_ROWS = 6
_MOST_JOINED_ROWS = 4


@dataclass(frozen=True)
class Case:
    """A query, and its tables at the frontier and at the cut."""

    query: str
    states: States


@st.composite
def cases(draw: st.DrawFn, *, additive: bool = False, nan: bool = True) -> Case:
    """A query with states of the tables that it reads."""
    writer = _Writer(draw)
    query = writer.additive() if additive else writer.query(2, writer.kinds())
    unread = TableState({}, {})
    states = {
        relation.oid: draw(_states(relation, nan)) if relation.oid in writer.read else unread for relation in TABLES
    }
    return Case(query, states)


@st.composite
def joins(draw: st.DrawFn) -> Case:
    """A query that joins three to six tables, some of them several times, all of which change."""
    writer = _Writer(draw)
    query = writer.joins()
    unread = TableState({}, {})
    states = {
        relation.oid: draw(_states(relation, False, _MOST_JOINED_ROWS)) if relation.oid in writer.read else unread
        for relation in TABLES
    }
    return Case(query, states)


@st.composite
def _states(draw: st.DrawFn, relation: Relation, nan: bool, most: int = _MOST_ROWS) -> TableState:
    """A table's rows before and after some of them were inserted, deleted and updated."""
    row = _rows(relation, nan)
    places = st.integers(0, most - 1)
    changes = st.tuples(row, st.none()) | st.tuples(st.none(), places) | st.tuples(row, places)
    old = draw(st.lists(row, min_size=1, max_size=most))
    old = list({row[0]: row for row in old}.values()) if relation.key else old
    new = list(old)
    for inserted, deleted in draw(st.lists(changes, min_size=1, max_size=3)):
        if deleted is not None and new:
            del new[deleted % len(new)]
        if inserted is not None and not (relation.key and inserted[0] in {other[0] for other in new}):
            new.append(inserted)
    now = zset((row, 1) for row in new)
    return TableState(now, minus(now, zset((row, 1) for row in old)))


def _rows(relation: Relation, nan: bool) -> st.SearchStrategy[Row]:
    columns = []
    for column in relation.columns:
        values: list[Value] = [0, 1, 2, 3, 4] if column.name in relation.key else [0, 1, 2, 3, 1, None]
        if column.type == MONEY and nan:
            values.append(NAN)
        columns.append(st.sampled_from(values))
    return st.tuples(*columns)


@dataclass(frozen=True)
class _Field:
    """A column that expressions can read."""

    sql: str
    kind: Kind


class _Writer:
    """Writes one query."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._aliases = count(1)
        self._sources = _MOST_SOURCES
        self.read: set[int] = set()  # the OIDs of its tables

    def _pick(self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))

    def _likely(self, percent: int) -> bool:
        return self._draw(st.integers(1, 100)) > 100 - percent

    def kinds(self) -> list[Kind]:
        return self._draw(st.lists(st.sampled_from(("number", "number", "boolean")), min_size=1, max_size=3))

    # -- queries -------------------------------------------------------------------------------------------------------

    def query(self, depth: int, kinds: Sequence[Kind]) -> str:
        """A query with columns of these kinds: c1, c2 and so on."""
        shape = self._pick(("plain", "plain", "grouped", "distinct", "union") if depth else ("plain", "grouped"))
        match shape:
            case "plain":
                return self._plain(depth, kinds)
            case "distinct":
                return self._plain(depth, kinds, "DISTINCT ")
            case "grouped":
                return self._grouped(depth, kinds, self._pick((_ADDITIVE, _RECOMPUTED)))
            case _:
                word = self._pick(("UNION ALL", "UNION ALL", "UNION"))
                return f"{self._plain(depth - 1, kinds)} {word} {self._plain(depth - 1, kinds)}"

    def additive(self) -> str:
        """A query whose groups add up."""
        return self._grouped(1, ["number", *self.kinds()], _ADDITIVE, counted=True)

    def joins(self) -> str:
        """A query over an inner join of many sources, possibly grouped."""
        self._sources = 2 * self._pick((3, 4, 5, 6))
        from_, fields = self._inner_joined(self._sources // 2)
        where = ""
        if self._likely(40):
            where = f" WHERE {self._alternatives(fields) if self._likely(40) else self._condition(fields)}"
        kinds = self.kinds()
        match self._pick(("plain", "plain", "distinct", "grouped")):
            case "grouped":
                key = self._key(fields)
                calls = ", ".join(
                    f"{self._call(fields, self._pick((_ADDITIVE, _RECOMPUTED)))} AS c{i + 2}" for i in range(len(kinds))
                )
                return f"SELECT {key} AS c1, {calls} FROM {from_}{where} GROUP BY {key}"
            case shape:
                distinct = "DISTINCT " if shape == "distinct" else ""
                return (
                    f"SELECT {distinct}{_listed([self._output(0, fields, kind) for kind in kinds])} FROM {from_}{where}"
                )

    def _plain(self, depth: int, kinds: Sequence[Kind], distinct: str = "") -> str:
        from_, fields = self._from(depth)
        where = self._where(depth, fields)
        return f"SELECT {distinct}{_listed([self._output(depth, fields, kind) for kind in kinds])} FROM {from_}{where}"

    def _output(self, depth: int, fields: Sequence[_Field], kind: Kind) -> str:
        if kind == "number":
            return self._number(fields)
        return self._mark(depth, fields) if self._likely(40) else self._condition(fields)

    def _grouped(self, depth: int, kinds: Sequence[Kind], calls: Sequence[str], *, counted: bool = False) -> str:
        from_, fields = self._from(depth)
        where = self._where(depth, fields)
        keys = [self._key(fields) for _ in range(self._pick((1, 0, 2)))]
        values = [self._grouped_output(fields, keys, kind, calls) for kind in kinds]
        group = f" GROUP BY {', '.join(keys)}" if keys else ""
        if counted or not keys:  # or it might be no aggregation
            values[0] = f"({self._call(fields, calls)} > 0)" if kinds[0] == "boolean" else self._call(fields, calls)
        having = ""
        if self._likely(20):
            having = f" HAVING ({self._call(fields, calls)} {self._pick(_COMPARISONS)} {self._literal()})"
        return f"SELECT {_listed(values)} FROM {from_}{where}{group}{having}"

    def _key(self, fields: Sequence[_Field]) -> str:
        field = self._pick(fields)
        return f"({field.sql} + 1)" if field.kind == "number" and self._likely(20) else field.sql

    def _grouped_output(self, fields: Sequence[_Field], keys: Sequence[str], kind: Kind, calls: Sequence[str]) -> str:
        if kind == "boolean":
            return f"({self._call(fields, calls)} {self._pick(_COMPARISONS)} {self._literal()})"
        numbers = [field.sql for field in fields if field.kind == "number"]
        shown = [key for key in keys if key in numbers]
        if shown and self._likely(60):
            return self._pick(shown)
        call = self._call(fields, calls)
        return f"({call} + 1)" if self._likely(20) else call

    def _call(self, fields: Sequence[_Field], calls: Sequence[str]) -> str:
        call = self._pick(calls).format(self._number(fields))
        return f"{call} FILTER (WHERE {self._condition(fields)})" if self._likely(20) else call

    # -- FROM and WHERE ------------------------------------------------------------------------------------------------

    def _from(self, depth: int) -> tuple[str, list[_Field]]:
        return self._joined(self._pick((1, 2, 2, 3)) if depth else 1, depth)

    def _joined(self, width: int, depth: int) -> tuple[str, list[_Field]]:
        """That many sources, joined in any order."""
        if width == 1 or self._sources <= 1:
            return self._source(depth)
        on_left = self._draw(st.integers(1, width - 1))
        left, mine = self._joined(on_left, depth)
        right, theirs = self._joined(width - on_left, depth)
        return f"({left} {self._pick(_JOINS)} {right} ON {self._meeting(mine, theirs)})", mine + theirs

    def _inner_joined(self, width: int) -> tuple[str, list[_Field]]:
        """So many sources, nearly all of them joined by equality; some of the joins are subqueries."""
        if width == 1:
            return self._source(0)
        on_left = self._pick((1, width - 1, width - 1, width // 2))
        left, mine = self._inner_joined(on_left)
        right, theirs = self._inner_joined(width - on_left)
        condition = f"({self._number(mine, plain=True)} = {self._number(theirs, plain=True)})"
        if self._likely(25):
            condition = f"({condition} AND {self._meeting(mine, theirs)})"
        elif self._likely(15):
            condition = self._meeting(mine, theirs)
        joined, fields = f"({left} {'LEFT ' if self._likely(10) else ''}JOIN {right} ON {condition})", mine + theirs
        if not self._likely(25):
            return joined, fields
        alias = f"x{next(self._aliases)}"
        shown = self._draw(st.lists(st.sampled_from(fields), min_size=1, max_size=4))
        return (
            f"(SELECT {_listed([field.sql for field in shown])} FROM {joined}) {alias}",
            _fields(alias, [field.kind for field in shown]),
        )

    def _source(self, depth: int) -> tuple[str, list[_Field]]:
        self._sources -= 1
        alias = f"x{next(self._aliases)}"
        if depth and self._likely(35):
            kinds = self.kinds()
            return f"({self.query(depth - 1, kinds)}) {alias}", _fields(alias, kinds)
        if self._likely(8):
            return f"(SELECT 1 AS c1 UNION ALL SELECT 0 AS c1) {alias}", _fields(alias, ["number"])
        relation = self._pick(TABLES)
        self.read.add(relation.oid)
        fields = [_Field(f"{alias}.{column.name}", "number") for column in relation.columns]
        return f"{relation.label} {alias}", fields

    def _meeting(self, mine: Sequence[_Field], theirs: Sequence[_Field]) -> str:
        """A condition over two sides."""
        one, other = self._number(mine, plain=True), self._number(theirs, plain=True)
        match self._pick(("equal", "equal", "equal", "and", "comparison", "expression", "anything", "true")):
            case "equal":
                return f"({one} = {other})"
            case "and":
                return f"(({one} = {other}) AND {self._condition([*mine, *theirs])})"
            case "comparison":
                return f"({one} {self._pick(_COMPARISONS)} {other})"
            case "expression":
                return f"({self._number(mine)} = {self._number(theirs)})"
            case "anything":
                return self._condition([*mine, *theirs])
            case _:
                return "true"

    def _where(self, depth: int, fields: Sequence[_Field]) -> str:
        if not self._likely(50):
            return ""
        parts = [self._mark(depth, fields) if self._likely(40) else self._condition(fields)]
        if self._likely(30):
            parts.append(self._condition(fields))
        text = f" {self._pick(('AND', 'OR'))} ".join(parts)
        return f" WHERE ({text})"

    def _mark(self, depth: int, fields: Sequence[_Field]) -> str:
        """EXISTS or IN, or their negation."""
        if self._sources < 1:
            return self._condition(fields)
        shape = self._pick(("exists", "in", "rows", "query"))
        if shape == "query" and depth:
            mark = f"({self._number(fields)} IN ({self.query(depth - 1, ['number'])}))"
        else:
            from_, inner = self._from(0)
            condition = self._meeting(fields, inner)
            if self._likely(25):
                condition = f"({condition} AND {self._condition(inner)})"
            where = f" WHERE {condition}"
            if shape != "exists" and self._likely(60):
                where = ""
            if shape == "rows":
                probe = f"({self._number(fields)}, {self._number(fields)})"
                mark = f"({probe} IN (SELECT {self._number(inner)} AS c1, {self._number(inner)} AS c2 FROM {from_}{where}))"
            elif shape == "in":
                mark = f"({self._number(fields)} IN (SELECT {self._number(inner)} AS c1 FROM {from_}{where}))"
            else:
                mark = f"(EXISTS (SELECT 1 AS c1 FROM {from_}{where}))"
        return f"(NOT {mark})" if self._likely(40) else mark

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _number(self, fields: Sequence[_Field], *, plain: bool = False) -> str:
        columns = [field.sql for field in fields if field.kind == "number"]
        if not columns:
            return self._literal()
        column = self._pick(columns)
        if plain or self._likely(75):
            return column
        match self._pick(("+", "*", "coalesce", "case", "literal")):
            case "coalesce":
                return f"COALESCE({column}, {self._pick([*columns, '0'])})"
            case "case":
                return f"CASE WHEN {self._comparison(fields)} THEN {column} ELSE {self._pick([*columns, '0'])} END"
            case "literal":
                return self._literal()
            case sign:
                return f"({column} {sign} {self._pick([*columns, '2'])})"

    def _literal(self) -> str:
        return self._pick(("0", "1", "2"))

    def _alternatives(self, fields: Sequence[_Field]) -> str:
        """Alternatives that each compare columns of several sources with constants."""
        columns = [field.sql for field in fields if field.kind == "number"] or ["0"]
        chosen = self._pick(columns), self._pick(columns)
        pairs = [[f"({column} = {self._literal()})" for column in chosen] for _ in range(2)]
        return f"(({pairs[0][0]} AND {pairs[0][1]}) OR ({pairs[1][0]} AND {pairs[1][1]}))"

    def _comparison(self, fields: Sequence[_Field]) -> str:
        columns = [field.sql for field in fields if field.kind == "number"]
        if not columns:
            return self._pick([field.sql for field in fields])
        return f"({self._pick(columns)} {self._pick(_COMPARISONS)} {self._pick([*columns, '1'])})"

    def _condition(self, fields: Sequence[_Field]) -> str:
        match self._pick(
            ("comparison", "comparison", "comparison", "null", "not null", "and", "or", "not", "column", "constant")
        ):
            case "null":
                return f"({self._number(fields)} IS NULL)"
            case "not null":
                return f"({self._pick(fields).sql} IS NOT NULL)"
            case "and":
                return f"({self._comparison(fields)} AND {self._comparison(fields)})"
            case "or":
                return f"({self._comparison(fields)} OR {self._comparison(fields)})"
            case "not":
                return f"(NOT {self._comparison(fields)})"
            case "column" if any(field.kind == "boolean" for field in fields):
                return self._pick([field.sql for field in fields if field.kind == "boolean"])
            case "constant":
                return self._pick(("true", "false"))
            case _:
                return self._comparison(fields)


def _listed(values: Sequence[str]) -> str:
    return ", ".join(f"{value} AS c{i + 1}" for i, value in enumerate(values))


def _fields(alias: str, kinds: Sequence[Kind]) -> list[_Field]:
    return [_Field(f"{alias}.c{i + 1}", kind) for i, kind in enumerate(kinds)]
