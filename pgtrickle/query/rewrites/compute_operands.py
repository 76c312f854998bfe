"""Turn the parts of conditions that are computed from one input into columns of that input."""

from __future__ import annotations

from dataclasses import replace

from sqlglot import exp

from pgtrickle.query.conditions import conjunction, conjuncts, unwrap
from pgtrickle.query.plan import (
    Column,
    Exists,
    Filter,
    InnerJoin,
    Join,
    NewColumn,
    Plan,
    Project,
    TypesOf,
    rebuild,
    used_ids,
)
from pgtrickle.query.rewrites.columns import column_ids, keep_columns
from pgtrickle.query.types import RECORD


def compute_operands(plan: Plan, new_column: NewColumn, types_of: TypesOf) -> Plan:
    """The plan with the parts of its conditions that are computed from one input as columns of that input.

    A lookup by key is then a lookup by column, and the operator that tests the condition need not know the expression.
    """
    plan = rebuild(plan, lambda child: compute_operands(child, new_column, types_of))
    sides: list[Plan]
    match plan:
        case InnerJoin(inputs=inputs, conditions=parts):
            sides, condition = list(inputs), conjunction(parts)
        case Join(left=left, right=right, condition=condition) | Exists(left=left, right=right, condition=condition):
            sides = [left, right]
        case Filter(input=Join(kind="left" | "right") | Exists() as child, condition=condition):
            sides = [child]
        case _:
            return plan
    before = list(sides)

    def as_column(value: exp.Expression, *, anywhere: bool) -> exp.Expression:
        reads = used_ids(value)
        for i, side in enumerate(sides):
            home = _home(side, reads) if reads and reads <= column_ids(side) else None
            if home is None and anywhere and reads and reads <= column_ids(side):
                home = side
            if home is not None:
                type_ = types_of(home.columns, [value])[0]
                if type_.oid == RECORD:  # a row of an anonymous type can be compared, but not looked up
                    return value
                column = new_column("key", type_)
                sides[i] = _with_column(side, home, column, value)
                return column.ref()
        return value

    def operand(node: exp.Expression) -> exp.Expression:
        node = unwrap(node)
        if isinstance(node, exp.Column) or _is_quantified(node):
            return node
        return as_column(node, anywhere=len(sides) > 1)

    def rewrite(node: exp.Expression) -> exp.Expression:
        node = unwrap(node)
        if isinstance(node, exp.Column) or (isinstance(node, exp.Is) and isinstance(unwrap(node.this), exp.Column)):
            return node
        whole = as_column(node, anywhere=False)
        if whole is not node:
            return whole
        if isinstance(node, exp.And | exp.Or):
            return type(node)(this=_wrapped(rewrite(node.this)), expression=_wrapped(rewrite(node.expression)))
        if isinstance(node, exp.Not):
            return exp.Not(this=_wrapped(rewrite(node.this)))
        if type(node) in _COMPARISONS:
            return type(node)(this=operand(node.this), expression=operand(node.expression))
        return node

    computed = conjunction([rewrite(part) for part in conjuncts(condition)])
    if all(side is old for side, old in zip(sides, before, strict=True)):
        return plan
    if isinstance(plan, Filter):
        return keep_columns(Filter(sides[0], computed), plan.columns)
    if isinstance(plan, InnerJoin):
        return keep_columns(InnerJoin(tuple(sides), tuple(conjuncts(computed))), plan.columns)
    return keep_columns(replace(plan, left=sides[0], right=sides[1], condition=computed), plan.columns)


_COMPARISONS = (exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.NullSafeEQ, exp.NullSafeNEQ)


def _is_quantified(node: exp.Expression) -> bool:
    """Whether this is ANY (…) or ALL (…) after an operator.

    That is not a value, although `SELECT ALL (…)` is valid SQL and returns the array.
    """
    return isinstance(node, exp.Any | exp.All) or (
        isinstance(node, exp.Anonymous) and node.name.upper() in {"ALL", "SOME"}
    )


def _wrapped(node: exp.Expression) -> exp.Expression:
    return node if isinstance(node, exp.Column) else exp.Paren(this=node)


def _home(plan: Plan, reads: set[str]) -> Plan | None:
    """The lowest part of the plan that has all these columns with the values read here; None if there is none."""
    match plan:
        case Filter(input=child):
            return _home(child, reads)
        case Exists(left=left):
            return _home(left, reads) if reads <= column_ids(left) else None
        case InnerJoin(inputs=inputs):
            return next((_home(child, reads) for child in inputs if reads <= column_ids(child)), None)
        case Join(kind="left", left=side) | Join(kind="right", right=side):
            return _home(side, reads) if reads <= column_ids(side) else None
        case Join():
            return None
        case _:
            return plan


def _with_column(plan: Plan, home: Plan, column: Column, value: exp.Expression) -> Plan:
    """The plan with one more column, computed in its part `home`."""
    if plan is home:
        return Project(plan, (*((other, other.ref()) for other in plan.columns), (column, value)))
    match plan:
        case Filter(input=child):
            return replace(plan, input=_with_column(child, home, column, value))
        case Exists(left=left):
            return replace(plan, left=_with_column(left, home, column, value))
        case InnerJoin(inputs=inputs):
            reads = used_ids(value)
            return replace(
                plan,
                inputs=tuple(
                    _with_column(child, home, column, value) if reads <= column_ids(child) else child
                    for child in inputs
                ),
            )
        case Join(left=left, right=right) if used_ids(value) <= column_ids(left):
            return replace(plan, left=_with_column(left, home, column, value))
        case Join(right=right):
            return replace(plan, right=_with_column(right, home, column, value))
        case _:
            raise AssertionError(f"{type(plan).__name__} is not above the home of a column")
