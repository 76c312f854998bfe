"""Bounds on what is read of a state: only rows whose key occurs in a change.

A restriction is pushed down to the scans. At a join it is also passed on to the other side: one input is looked up by
the change and the next by the first, so that only a few rows of each are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sqlglot import exp

from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Exists,
    Filter,
    Join,
    KeyFilter,
    Plan,
    Project,
    Scan,
    UnionAll,
    equi_keys,
)


@dataclass(frozen=True)
class Keys:
    """The values of one column of a plan."""

    origin: Plan
    column: Column
    nulls: bool = False


def restrict(plan: Plan, column: Column, keys: Keys) -> Plan:
    """The plan with at least its rows whose `column` is among the keys; unchanged if no bound can be passed on."""
    match plan:
        case Scan() | KeyFilter(input=Scan() | KeyFilter()):
            return KeyFilter(plan, column, keys.origin, keys.column, keys.nulls)
        case Filter(input=child):
            return replace(plan, input=restrict(child, column, keys))
        case Project(input=child, items=items):
            value = next(value for item, value in items if item.id == column.id)
            if isinstance(value, exp.Column):
                below = next(item for item in child.columns if item.id == value.name)
                return replace(plan, input=restrict(child, below, keys))
            if is_chain(child):
                return KeyFilter(plan, column, keys.origin, keys.column, keys.nulls)
            return plan
        case Join():
            return _restrict_join(plan, column, keys)
        case Exists(left=left, right=right):
            if column.id == plan.mark.id:
                return plan
            narrowed = restrict(left, column, keys)
            if narrowed is left:
                return plan
            for mine, theirs in equi_keys(plan):
                right = restrict(right, theirs, Keys(narrowed, mine))
            return replace(plan, left=narrowed, right=right)
        case Aggregate(input=child, keys=grouped):
            if column.id in {key.id for key in grouped}:
                return replace(plan, input=restrict(child, column, keys))
            return plan
        case UnionAll(inputs=inputs, columns=columns):
            position = [item.id for item in columns].index(column.id)
            return replace(plan, inputs=tuple(restrict(child, child.columns[position], keys) for child in inputs))
        case KeyFilter(input=child):
            return replace(plan, input=restrict(child, column, keys))
        case _:
            return plan


def _restrict_join(plan: Join, column: Column, keys: Keys) -> Plan:
    on_left = column.id in {item.id for item in plan.left.columns}
    # Restricting the padded side of an outer join would produce padded rows that do not exist.
    if not (plan.kind == "inner" or (plan.kind == "left" and on_left) or (plan.kind == "right" and not on_left)):
        return plan
    own, other = (plan.left, plan.right) if on_left else (plan.right, plan.left)
    narrowed = restrict(own, column, keys)
    if narrowed is own:
        return plan
    for left, right in equi_keys(plan):
        mine, theirs = (left, right) if on_left else (right, left)
        other = restrict(other, theirs, Keys(narrowed, mine))
    return replace(plan, left=narrowed, right=other) if on_left else replace(plan, left=other, right=narrowed)


def is_chain(plan: Plan) -> bool:
    """Whether the plan is filters and projections over one table, which PostgreSQL evaluates while it reads."""
    match plan:
        case Scan():
            return True
        case Filter(input=child) | Project(input=child) | KeyFilter(input=child):
            return is_chain(child)
        case _:
            return False
