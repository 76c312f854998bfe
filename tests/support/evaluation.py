"""Values of expressions in pure Python, with SQL's three-valued logic: what the interpreter of plans calculates with.

NULL is None and numbers are exact. Only the syntax that random queries use, and what rewrites make of it, is known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

from sqlglot import exp

from pgtrickle.query.conditions import unwrap

Value: TypeAlias = Any
Row = tuple[Value, ...]
Env = Mapping[str, Value]  # values by the ids of columns

NAN = math.inf  # of a numeric: equal to itself and greater than every number

_ARITHMETIC: dict[type[exp.Expression], Callable[[Value, Value], Value]] = {
    exp.Add: operator.add,
    exp.Sub: operator.sub,
    exp.Mul: operator.mul,
    exp.Div: Fraction,
}
_COMPARISONS: dict[type[exp.Expression], Callable[[Value, Value], bool]] = {
    exp.EQ: operator.eq,
    exp.NEQ: operator.ne,
    exp.LT: operator.lt,
    exp.LTE: operator.le,
    exp.GT: operator.gt,
    exp.GTE: operator.ge,
}


def evaluate(node: exp.Expression, env: Env) -> Value:
    """The value of the expression if the columns have these values."""
    match node:
        case exp.Column():
            return env[node.name]
        case exp.Paren():
            return evaluate(node.this, env)
        case exp.Boolean():
            return bool(node.this)
        case exp.Null():
            return None
        case exp.Literal():
            return node.name if node.is_string else int(node.name)
        case exp.Cast():
            value = evaluate(node.this, env)
            return NAN if value == "NaN" else value
        case exp.Neg():
            value = evaluate(node.this, env)
            return value if value is None or value == NAN else -value
        case exp.Not():
            value = evaluate(node.this, env)
            return None if value is None else not value
        case exp.And():
            return _conjunction(evaluate(node.this, env), evaluate(node.expression, env))
        case exp.Or():
            return _disjunction(evaluate(node.this, env), evaluate(node.expression, env))
        case exp.Is():
            same = evaluate(node.this, env) is evaluate(node.expression, env)
            return same is not bool(node.args.get("negate"))
        case exp.NullSafeEQ():
            return evaluate(node.this, env) == evaluate(node.expression, env)
        case exp.NullSafeNEQ():
            return evaluate(node.this, env) != evaluate(node.expression, env)
        case exp.Coalesce():
            values = (evaluate(item, env) for item in (node.this, *node.expressions))
            return next((value for value in values if value is not None), None)
        case exp.Case(this=None):
            for branch in node.args["ifs"]:
                if evaluate(branch.this, env) is True:
                    return evaluate(branch.args["true"], env)
            default = node.args.get("default")
            return None if default is None else evaluate(default, env)
        case exp.Anonymous() if node.name == "nullif":
            one, other = (evaluate(item, env) for item in node.expressions)
            return None if one == other else one
    one, other = evaluate(node.this, env), evaluate(node.expression, env)
    if one is None or other is None:
        return None
    if type(node) in _COMPARISONS:
        return _COMPARISONS[type(node)](one, other)
    return NAN if NAN in (one, other) else _ARITHMETIC[type(node)](one, other)


def _conjunction(one: bool | None, other: bool | None) -> bool | None:
    if one is False or other is False:
        return False
    return None if one is None or other is None else True


def _disjunction(one: bool | None, other: bool | None) -> bool | None:
    if one is True or other is True:
        return True
    return None if one is None or other is None else False


def aggregate(call: exp.Expression, group: Iterable[Env]) -> Value:
    """The aggregate's value over the rows of a group, equal rows one by one."""
    if isinstance(call, exp.Filter):
        condition = call.expression.this
        return aggregate(call.this, [env for env in group if evaluate(condition, env) is True])
    if isinstance(call.this, exp.Star):
        return len(list(group))
    argument = unwrap(call.this)
    distinct = isinstance(argument, exp.Distinct)
    if distinct:
        (argument,) = argument.expressions
    values = [value for value in (evaluate(argument, env) for env in group) if value is not None]
    if distinct:
        values = list(set(values))
    if isinstance(call, exp.Count):
        return len(values)
    if not values:
        return None
    match call:
        case exp.Min():
            return min(values)
        case exp.Max():
            return max(values)
        case exp.LogicalAnd():
            return all(values)
        case exp.LogicalOr():
            return any(values)
        case exp.Sum():
            return NAN if NAN in values else sum(values)
        case exp.Avg():
            return NAN if NAN in values else Fraction(sum(values), len(values))
        case _:
            raise AssertionError(f"{call.sql(dialect='postgres')} is not known to the interpreter")
