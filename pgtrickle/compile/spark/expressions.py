"""Expressions that may run on Spark: a short list of those that mean the same there as in PostgreSQL.

These are comparisons of integers, decimals, dates and timestamps by their native form, equality of all types with a
key, boolean logic, NULL tests and literals. PostgreSQL evaluates everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlglot import exp

from pgtrickle.compile.postgres import form_name
from pgtrickle.query.conditions import unwrap
from pgtrickle.query.plan import Column
from pgtrickle.query.types import BOOL, Form


class NotOnSpark(Exception):
    """PostgreSQL must evaluate an expression, or the node that contains it; the message says why."""


_COMPARISONS: dict[type[exp.Expression], str] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
    exp.NullSafeEQ: "<=>",
}


_PARTS: dict[type[exp.Expression], set[str]] = {
    exp.Is: {"this", "expression", "negate"},
    exp.Between: {"this", "low", "high"},
    exp.Case: {"ifs", "default"},
    exp.Cast: {"this", "to", "_type"},
}


@dataclass
class SparkExpressions:
    """Translates conditions over the given columns and records which of their forms are needed."""

    columns: Mapping[str, Column]
    needed: set[tuple[Column, Form]] = field(default_factory=set)

    def condition(self, node: exp.Expression) -> str:
        """Spark SQL for a boolean expression."""
        node = unwrap(node)
        # Ignoring a part (the NOT of IS NOT NULL, the SYMMETRIC of BETWEEN) would produce wrong rows.
        known = _PARTS.get(type(node), {"this", "expression"})
        if any(value and name not in known for name, value in node.args.items()):
            raise NotOnSpark(f"{node.sql(dialect='postgres')} is evaluated by PostgreSQL only")
        match node:
            case exp.And() | exp.Or():
                word = "AND" if isinstance(node, exp.And) else "OR"
                return f"({self.condition(node.this)} {word} {self.condition(node.expression)})"
            case exp.Not():
                return f"(NOT {self.condition(node.this)})"
            case exp.Boolean():
                return "true" if node.this else "false"
            case exp.Is() if isinstance(node.expression, exp.Null):
                return f"({self._present(node.this)} IS {'NOT ' if node.args.get('negate') else ''}NULL)"
            case exp.Is() if isinstance(node.expression, exp.Boolean) and not node.args.get("negate"):
                return f"({self.condition(node.this)} <=> {'true' if node.expression.this else 'false'})"
            case exp.Column() if self.column(node).type.oid == BOOL:
                return self.form(node, "native")
            case exp.Between():
                low = exp.GTE(this=node.this, expression=node.args["low"])
                high = exp.LTE(this=node.this, expression=node.args["high"])
                return f"({self.condition(low)} AND {self.condition(high)})"
            case exp.NullSafeNEQ():
                return f"(NOT {self._compare(node.this, '<=>', node.expression)})"
            case exp.Case() if node.this is None:
                whens = " ".join(
                    f"WHEN {self.condition(item.this)} THEN {self.condition(item.args['true'])}"
                    for item in node.args["ifs"]
                )
                default = node.args.get("default")
                return f"(CASE {whens} ELSE {self.condition(default) if default else 'CAST(NULL AS BOOLEAN)'} END)"
            case exp.Cast() if isinstance(unwrap(node.this), exp.Null):
                return "CAST(NULL AS BOOLEAN)"
        for kind, word in _COMPARISONS.items():
            if type(node) is kind:
                return self._compare(node.this, word, node.expression)
        raise NotOnSpark(f"{node.sql(dialect='postgres')} is evaluated by PostgreSQL only")

    def _compare(self, left: exp.Expression, word: str, right: exp.Expression) -> str:
        left, right = unwrap(left), unwrap(right)
        if isinstance(right, exp.Column) and not isinstance(left, exp.Column):
            left, right = right, left
            word = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}.get(word, word)
        if not isinstance(left, exp.Column):
            raise NotOnSpark(f"{left.sql(dialect='postgres')} is evaluated by PostgreSQL only")
        one = self.column(left).type
        if isinstance(right, exp.Column):
            other = self.column(right).type
            if word in {"=", "<>", "<=>"} and one.has_key and other.has_key and one.key_family() == other.key_family():
                return f"({self.form(left, 'key')} {word} {self.form(right, 'key')})"
            both_numbers = all(type_.is_integer or type_.is_decimal for type_ in (one, other))
            nan_safe = one.is_decimal == other.is_decimal and (not one.is_decimal or one == other)
            if one.has_native and other.has_native and (one.oid == other.oid or both_numbers) and nan_safe:
                return f"({self.form(left, 'native')} {word} {self.form(right, 'native')})"
        elif isinstance(right, exp.Literal) and not right.is_string and one.is_integer and "." not in right.name:
            return f"({self.form(left, 'native')} {word} {int(right.name)}L)"
        raise NotOnSpark(f"PostgreSQL decides how {one.name} compares")

    def _present(self, node: exp.Expression) -> str:
        node = unwrap(node)
        if isinstance(node, exp.Column):
            return self.form(node, "text")
        raise NotOnSpark(f"{node.sql(dialect='postgres')} is evaluated by PostgreSQL only")

    def column(self, node: exp.Column) -> Column:
        """The column that a reference means."""
        return self.columns[node.name]

    def form(self, node: exp.Column, form: Form) -> str:
        """The name of one of the column's forms, which is recorded as needed."""
        column = self.column(node)
        self.needed.add((column, form))
        return form_name(column, form)
