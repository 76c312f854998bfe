"""Turn arguments of aggregates into columns of the input, so that the aggregation need not know the expressions.

FILTER is folded in: the aggregates listed here ignore NULL. If a numeric expression only adds and multiplies integers
and numeric(p,s), its digits are known beforehand; it is cast to the numeric(p,s) that holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from sqlglot import exp

from pgtrickle.query.conditions import cast_to, unwrap
from pgtrickle.query.plan import Aggregate, Column, NewColumn, Plan, Project, TypesOf, rebuild
from pgtrickle.query.types import NUMERIC, PgType

_IGNORE_NULL = (exp.Count, exp.Sum, exp.Avg, exp.Min, exp.Max, exp.LogicalAnd, exp.LogicalOr)
_LITERAL_DIGITS = 20
# Precision and scale.
_Digits = tuple[int, int]
_AsColumn = Callable[[exp.Expression, exp.Expression | None], exp.Expression]


def compute_arguments(plan: Plan, new_column: NewColumn, types_of: TypesOf) -> Plan:
    """The plan with the arguments of its aggregates computed below them."""
    plan = rebuild(plan, lambda child: compute_arguments(child, new_column, types_of))
    if not isinstance(plan, Aggregate):
        return plan
    columns = {column.id: column for column in plan.input.columns}
    computed: dict[exp.Expression, Column] = {}
    items: list[tuple[Column, exp.Expression]] = []

    def as_column(value: exp.Expression, condition: exp.Expression | None) -> exp.Expression:
        value = unwrap(value)
        if condition is None and isinstance(value, exp.Column) and _exact(value, plan.input) is None:
            return value
        whole = value if condition is None else exp.Case().when(condition.copy(), value.copy())
        if whole not in computed:
            # The type of the value alone: a CASE loses the digits of its branch.
            type_ = types_of(columns.values(), [value])[0]
            exact = _exact(value, plan.input) if type_.oid == NUMERIC else None
            type_ = exact or type_
            computed[whole] = new_column("argument", type_)
            items.append((computed[whole], whole if exact is None else cast_to(exp.Paren(this=whole), type_.name)))
        return computed[whole].ref()

    calls = tuple((column, _over_columns(call, as_column)) for column, call in plan.calls)
    if not items:
        return plan
    passed = tuple((column, column.ref()) for column in plan.input.columns)
    return replace(plan, input=Project(plan.input, (*passed, *items)), calls=calls)


def _over_columns(call: exp.Expression, as_column: _AsColumn) -> exp.Expression:
    """The aggregate over columns; unchanged if it does more than ignore NULLs."""
    condition = call.expression.this if isinstance(call, exp.Filter) else None
    inner = call.this if isinstance(call, exp.Filter) else call
    if isinstance(inner, exp.Anonymous) and inner.name.lower() == "every" and len(inner.expressions) == 1:
        inner = exp.LogicalAnd(this=inner.expressions[0])  # the SQL standard's name for bool_and
    if not isinstance(inner, _IGNORE_NULL):
        return call
    if any(value and name not in {"this", "big_int"} for name, value in inner.args.items()):
        return call
    argument = unwrap(inner.this)
    result = inner.copy()
    match argument:
        case exp.Star():
            if condition is None:
                return call
            result.set("this", as_column(exp.Literal.number(1), condition))
        case exp.Distinct(expressions=[value]) if not argument.args.get("on"):
            result.set("this", exp.Distinct(expressions=[as_column(value, condition)]))
        case exp.Distinct() | exp.Order():
            return call
        case _:
            result.set("this", as_column(argument, condition))
    return result


def _unknown(name: str) -> _Digits | None:
    return None


def _exact(value: exp.Expression, plan: Plan) -> PgType | None:
    """The numeric(p,s) that holds an expression exactly; None if its digits are unknown or already in its type."""
    columns = {column.id: column for column in plan.columns}
    if isinstance(value, exp.Column) and columns[value.name].type.precision is not None:
        return None
    computed = {column.id: item for column, item in plan.items} if isinstance(plan, Project) else {}
    below = {column.id: column for column in plan.input.columns} if isinstance(plan, Project) else {}
    digits = _digits(value, columns, lambda name: _digits(computed[name], below) if name in computed else None)
    if digits is None:
        return None
    precision, scale = digits
    type_ = PgType(NUMERIC, (precision << 16 | scale) + 4, f"numeric({precision},{scale})")
    return type_ if type_.is_decimal else None


def _digits(
    node: exp.Expression, columns: Mapping[str, Column], otherwise: Callable[[str], _Digits | None] = _unknown
) -> _Digits | None:
    """Precision and scale that hold every value of the expression exactly; None if they are unknown."""
    node = unwrap(node)
    match node:
        case exp.Column():
            type_ = columns[node.name].type
            if (type_.is_integer or type_.is_decimal) and type_.precision is not None and type_.scale is not None:
                return type_.precision, type_.scale
            return otherwise(node.name) if type_.oid == NUMERIC else None
        case exp.Literal() if not node.is_string and node.name.replace(".", "", 1).isdigit():
            scale = len(node.name.partition(".")[2])
            digits = len(node.name.replace(".", ""))
            return (digits, scale) if digits <= _LITERAL_DIGITS else None
        case exp.Cast() if node.to.is_type("decimal") and not node.to.expressions:
            return _digits(node.this, columns, otherwise)
        case exp.Neg():
            return _digits(node.this, columns, otherwise)
        case exp.Mul() | exp.Add() | exp.Sub():
            left, right = _digits(node.this, columns, otherwise), _digits(node.expression, columns, otherwise)
            if left is None or right is None:
                return None
            if isinstance(node, exp.Mul):
                return left[0] + right[0], left[1] + right[1]
            scale = max(left[1], right[1])
            return max(left[0] - left[1], right[0] - right[1]) + 1 + scale, scale
        case _:
            return None
