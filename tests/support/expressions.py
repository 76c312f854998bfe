"""Random expressions over values of known kinds: conditions, values, group keys and aggregates."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.value_kinds import LITERALS, LOOSE, ORDERED, PATTERNS, TYPES, WORDS, Value, World

_NUMBERS = {"int": "big", "money": "loose", "big": "loose", "loose": "loose"}
_FORMS = {
    "int": ("{} + {}", "{} - {}", "coalesce({}, {})", "greatest({}, {})", "{} % 7 + {}", "nullif({}, {})"),
    "big": ("{} + {}", "coalesce({}, {})", "{} % 7 - {}"),
    # To PostgreSQL, a sum of numeric(10,2) is numeric without a precision.
    "money": ("coalesce({}, {})", "nullif({}, {})", "least({}, {})"),
    "text": ("coalesce({}, {})", "{} || '-' || {}", "lower({})", "nullif({}, {})", "left({}, 2)"),
    "bool": ("{} AND {}", "{} OR {}"),
}
# Forms that compare two or more values of different types.
_MIXED = (
    "{} = {}",
    "{} <> {}",
    "{} IS DISTINCT FROM {}",
    "({}, {}) = ({}, {})",
    "{} IN ({}, {})",
    "{} = ANY (ARRAY[{}, {}])",
    "{} <> ALL (ARRAY[{}, {}])",
    "CASE {} WHEN {} THEN true WHEN {} THEN false END",
    "nullif({}, {}) IS NULL",
    "coalesce({}, {}) = {}",
    "{} BETWEEN {} AND {}",
    "greatest({}, {}) = {}",
    "{} IN (VALUES ({}), ({}))",
)


@dataclass
class Expressions:
    """Generates expressions from one random number generator. Callers pass only values that are not worn."""

    rng: random.Random
    world: World

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def test(self, scope: list[Value]) -> str:
        """A condition without subqueries."""
        if not scope:
            return "true"
        rng = self.rng
        match rng.random():
            case share if share < 0.1:
                return f"({self.test(scope)}) {rng.choice(('AND', 'OR', 'OR'))} ({self.test(scope)})"
            case share if share < 0.15:
                return f"NOT ({self.test(scope)})"
            case share if share < 0.27:
                return f"{rng.choice(scope).sql} IS {rng.choice(('', 'NOT '))}NULL"
        value = rng.choice(scope)
        if self.world.is_mixed and self.chance(0.4):
            others = [other for other in scope if self.world.are_comparable(value, other)]
            form = rng.choice(_MIXED)
            return form.format(value.sql, *(other.sql for other in rng.choices(others, k=form.count("{}") - 1)))
        if value.kind == "bool":
            return rng.choice(("{}", "NOT {}", "{} IS TRUE", "{} IS NOT FALSE")).format(value.sql)
        if value.kind == "text" and self.chance(0.3):
            return f"{value.sql} {rng.choice(('LIKE', 'NOT LIKE', 'ILIKE'))} {rng.choice(PATTERNS)}"
        if value.kind not in LITERALS:
            return f"{value.sql} IS NOT NULL"
        return self._comparison(
            value, [other for other in scope if self.world.are_comparable(other, value) and other is not value]
        )

    def _comparison(self, value: Value, same: list[Value]) -> str:
        rng = self.rng
        literal = rng.choice(LITERALS[value.kind])
        other = rng.choice(same).sql if same and self.chance(0.3) else literal
        words = ["=", "<>", "IS DISTINCT FROM", "IS NOT DISTINCT FROM"]
        if value.kind in ORDERED:
            words += ["<", ">", "<=", ">=", "<", ">"]
            if self.chance(0.1):
                return f"{value.sql} BETWEEN {rng.choice(LITERALS[value.kind])} AND {other}"
        if self.chance(0.1):
            return f"{value.sql} IN ({', '.join(rng.choices(LITERALS[value.kind], k=2))})"
        return f"{value.sql} {rng.choice(words)} {other}"

    def value(self, scope: list[Value], kind: str) -> Value:
        """An expression of this kind."""
        own = [value for value in scope if value.kind == kind]
        if not own:
            literal = self.rng.choice(LITERALS[kind]) if kind in LITERALS and self.chance(0.6) else "NULL"
            return Value(f"({literal})::{TYPES[kind]}", kind)
        value = self.rng.choice(own)
        if kind not in _FORMS or self.chance(0.4):
            return value
        text = self.rng.choice(_FORMS[kind]).format(value.sql, self.rng.choice(own).sql)
        return Value(f"({text}){'::numeric(10,2)' if kind == 'money' else ''}", kind)

    def key(self, scope: list[Value]) -> Value:
        """A group key: a column or an expression over one."""
        value = self.rng.choice(scope)
        if self.chance(0.25):
            match value.kind:
                case "int" | "big":
                    return Value(f"({value.sql} % 5)", value.kind)
                case "text":
                    return Value(f"upper({value.sql})", "text")
                case "time":
                    return Value(f"date_trunc('month', {value.sql} AT TIME ZONE 'UTC')::date", "date")
        return value

    def having(self, scope: list[Value]) -> str:
        rng = self.rng
        numbers = [value for value in scope if value.kind == "int"]
        if numbers and self.chance(0.5):
            return f"{rng.choice(('sum', 'max', 'count'))}({rng.choice(numbers).sql}) > {rng.choice(('1', '5', '30'))}"
        return f"count(*) {rng.choice(('>', '>=', '<', '<>'))} {rng.choice(('1', '2', '4'))}"

    def aggregate(self, scope: list[Value], kind: str | None) -> Value:
        """An aggregate whose result is of this kind, or of any kind if None."""
        where = f" FILTER (WHERE {self.test(scope)})" if scope and self.chance(0.2) else ""
        found = [make for result, make in self._aggregates(scope, where) if kind in {None, result}]
        if not found:
            assert kind is not None
            return Value(f"max(NULL::{TYPES[kind]})" if kind in ORDERED else f"NULL::{TYPES[kind]}", kind)
        return self.rng.choice(found)()

    def _aggregates(self, scope: list[Value], where: str) -> list[tuple[str, Callable[[], Value]]]:
        """The aggregates that the scope allows: the kind of the result, and a function that generates one."""
        pick = self.rng.choice
        of: dict[str, list[Value]] = defaultdict(list)
        for value in scope:
            of[value.kind].append(value)

        def call(names: str, kind: str, result: str, *, worn: bool = False, order: bool = False) -> Callable[[], Value]:
            def make() -> Value:
                name, value = pick(names.split()), pick(of[kind]).sql
                if name == "sum" and self.chance(0.3) and kind != "float":
                    value = f"{value} * {pick(('2', '3'))} + 1"
                distinct = "DISTINCT " if name in {"sum", "count"} and kind != "float" and self.chance(0.25) else ""
                more = (
                    f"{', ' + chr(39) + ',' + chr(39) if name == 'string_agg' else ''} ORDER BY {value}"
                    if order
                    else ""
                )
                return Value(f"{name}({distinct}{value}{more}){where}", result, worn)

            return make

        found: list[tuple[str, Callable[[], Value]]] = [("big", lambda: Value(f"count(*){where}", "big"))]
        for kind in of:
            found.append(("big", call("count", kind, "big")))
            if kind in _NUMBERS:
                found.append((_NUMBERS[kind], call("sum", kind, _NUMBERS[kind], worn=kind == "loose")))
            if kind in ORDERED or kind in WORDS:
                result = "text" if kind == "varchar" else kind
                found.append((result, call("min max", kind, result, worn=kind in LOOSE)))
            if kind in {"int", "money"}:
                found.append(("loose", call("avg", kind, "loose")))
        by_kind = {
            "float": ("float", call("sum avg max", "float", "float", worn=True)),
            "bool": ("bool", call("bool_and bool_or every", "bool", "bool")),
            "text": ("text", call("string_agg", "text", "text", order=True)),
            "int": ("list", call("array_agg", "int", "list", order=True)),
            "money": ("loose", call("stddev variance", "money", "loose")),
        }
        return found + [pair for kind, pair in by_kind.items() if kind in of]
