"""Push expressions of a delta plan down to the one table that they read: PostgreSQL evaluates them in the fetch.

A projection moves through unions, inner joins and marks: each term of a change computes it separately. It stays above a
recomputed group, because its input does not exist below that.
"""

from __future__ import annotations

from dataclasses import replace

from sqlglot import exp

from pgtrickle.ivm.key_bounds import is_chain
from pgtrickle.ivm.outer_join import outer_as_union
from pgtrickle.query.plan import (
    Column,
    Exists,
    Filter,
    Flip,
    InnerJoin,
    Join,
    Negate,
    Plan,
    Project,
    UnionAll,
    Values,
    used_ids,
)
from pgtrickle.query.rewrites.columns import substitute

Items = tuple[tuple[Column, exp.Expression], ...]


def push_down(plan: Project) -> Plan | None:
    """The same rows with every expression computed over one table; None if one of them needs several tables."""
    return _compute(plan.input, plan.items)


def _compute(plan: Plan, items: Items) -> Plan | None:
    """The items computed from the plan's rows; None if one of them needs several tables."""
    if is_chain(plan) or all(isinstance(value, exp.Column) for _, value in items):
        return Project(plan, items)
    match plan:
        case Values(columns=columns, rows=rows):
            named = [dict(zip((column.id for column in columns), row, strict=True)) for row in rows]
            computed = tuple(tuple(substitute(value, row) for _, value in items) for row in named)
            return Values(tuple(column for column, _ in items), computed)
        case Project(input=child, items=inner):
            mapping = {column.id: value for column, value in inner}
            return _compute(child, tuple((column, substitute(value, mapping)) for column, value in items))
        case Filter(input=child, condition=condition):
            below = _add_columns(child, items, used_ids(condition))
            return None if below is None else _picked(Filter(below, condition), items)
        case Negate(input=child):
            below = _compute(child, items)
            return None if below is None else Negate(below)
        case UnionAll(inputs=inputs, columns=columns):
            terms = [_compute(_renamed(child, columns), items) for child in inputs]
            present = tuple(term for term in terms if term is not None)
            return UnionAll(present, tuple(column for column, _ in items)) if len(present) == len(inputs) else None
        case InnerJoin():
            return _through_join(plan, items)
        case Join():
            return _compute(outer_as_union(plan), items)
        case Exists(left=left, right=right, condition=condition, mark=mark):
            if _reads(items, mark):
                return None
            own = _apart(items, _ids(right))
            below = _add_columns(left, own, used_ids(condition))
            return None if below is None else _picked(replace(plan, left=below), own, items)
        case Flip(left=left, left_delta=left_delta, right=right, condition=condition, mark=mark):
            if _reads(items, mark):
                return None
            own, tested = _apart(items, _ids(right)), used_ids(condition)
            below = _add_columns(left, own, tested)
            change = _add_columns(_renamed(left_delta, left.columns), own, tested)
            if below is None or change is None:
                return None
            return _picked(replace(plan, left=below, left_delta=change), own, items)
        case _:
            return None


def _through_join(plan: InnerJoin, items: Items) -> Plan | None:
    tested: set[str] = set().union(*map(used_ids, plan.conditions))
    left, inputs = items, []
    for child in plan.inputs:
        own = tuple(item for item in left if used_ids(item[1]) <= _ids(child))
        left = tuple(item for item in left if item not in own)
        below = _add_columns(child, own, tested)
        if below is None:
            return None
        inputs.append(below)
    return None if left else _picked(replace(plan, inputs=tuple(inputs)), items)


def _add_columns(plan: Plan, items: Items, needed: set[str]) -> Plan | None:
    """The plan with the items' expressions as columns, and those of its own columns that are read above."""
    computed = tuple(item for item in items if not isinstance(item[1], exp.Column))
    passed = needed | {value.name for _, value in items if isinstance(value, exp.Column)}
    return _compute(plan, (*computed, *((column, column.ref()) for column in plan.columns if column.id in passed)))


def _picked(plan: Plan, items: Items, wanted: Items | None = None) -> Plan:
    """Project the items, all of which are columns of the plan by now, to the columns of `wanted`."""
    values = [value if isinstance(value, exp.Column) else column.ref() for column, value in items]
    return Project(plan, tuple((column, value) for (column, _), value in zip(wanted or items, values, strict=True)))


def _apart(items: Items, taken: set[str]) -> Items:
    """The items under ids that the other side does not use: padded rows have NULL under the ids of that side."""
    return tuple(
        (replace(column, id=f"own_{column.id}") if column.id in taken else column, value) for column, value in items
    )


def _renamed(plan: Plan, columns: tuple[Column, ...]) -> Plan:
    return Project(plan, tuple((ours, theirs.ref()) for ours, theirs in zip(columns, plan.columns, strict=True)))


def _reads(items: Items, mark: Column) -> bool:
    """Whether an expression (not a plain column) needs the mark, which only the operator itself computes."""
    return any(mark.id in used_ids(value) for _, value in items if not isinstance(value, exp.Column))


def _ids(plan: Plan) -> set[str]:
    return {column.id for column in plan.columns}
