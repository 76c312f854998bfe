"""Derive filters of single tables from alternatives over several tables.

`(a.x = 1 AND b.y = 2) OR (a.x = 2 AND b.y = 1)` implies `a.x = 1 OR a.x = 2`. The condition itself stays where it is.
The filter that it implies is evaluated while the table is read, and a change that does not meet it ends the lookups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlglot import exp

from pgtrickle.query.conditions import conjunction, conjuncts, unwrap
from pgtrickle.query.plan import Filter, InnerJoin, Plan, rebuild, used_ids
from pgtrickle.query.rewrites.columns import column_ids


def imply_filters(plan: Plan) -> Plan:
    """The plan with the filters that its conditions imply for single inputs of inner joins."""
    plan = rebuild(plan, imply_filters)
    match plan:
        case Filter(input=InnerJoin() as join, condition=condition):
            implied = _implied(conjuncts(condition), list(_inputs(join)))
            return Filter(join, conjunction([*conjuncts(condition), *implied])) if implied else plan
        case InnerJoin(inputs=inputs, conditions=conditions):
            implied = _implied(conditions, list(_inputs(plan)))
            return InnerJoin(inputs, (*conditions, *implied)) if implied else plan
        case _:
            return plan


def _inputs(join: InnerJoin) -> Iterator[Plan]:
    """The inputs of the join and of the inner joins directly below it."""
    for child in join.inputs:
        if isinstance(child, InnerJoin):
            yield from _inputs(child)
        else:
            yield child


def _implied(conditions: Sequence[exp.Expression], inputs: Sequence[Plan]) -> list[exp.Expression]:
    implied = []
    for condition in conditions:
        if isinstance(condition, exp.Or):
            alternatives = [conjuncts(alternative) for alternative in _alternatives(condition)]
            for child in inputs:
                own = column_ids(child)
                if used_ids(condition) <= own:
                    continue  # a filter of one input already
                parts = [[part for part in parts if used_ids(part) <= own] for parts in alternatives]
                if all(parts):
                    implied.append(_disjunction([conjunction(some) for some in parts]))
    return implied


def _alternatives(condition: exp.Expression) -> list[exp.Expression]:
    condition = unwrap(condition)
    if isinstance(condition, exp.Or):
        return _alternatives(condition.this) + _alternatives(condition.expression)
    return [condition]


def _disjunction(parts: Sequence[exp.Expression]) -> exp.Expression:
    first, *others = (exp.Paren(this=part) for part in parts)
    result: exp.Expression = first
    for part in others:
        result = exp.Or(this=result, expression=part)
    return result
