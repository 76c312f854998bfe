"""Rewrite a plan to an equivalent one that is cheaper to maintain.

Filters are pushed down, expressions move to the one source they read, inner joins below inner joins become one, and
unused columns are removed. PostgreSQL evaluates any expression over one source in the fetch, but an expression over two
sources must be one that Spark supports. So the lower an expression is in the plan, the better.
"""

from __future__ import annotations

from pgtrickle.query.plan import (
    Aggregate,
    Exists,
    Filter,
    InnerJoin,
    Join,
    NewColumn,
    Plan,
    Project,
    TypesOf,
    UnionAll,
    used_ids,
)
from pgtrickle.query.rewrites.aggregate_arguments import compute_arguments
from pgtrickle.query.rewrites.columns import column_ids
from pgtrickle.query.rewrites.compute_operands import compute_operands
from pgtrickle.query.rewrites.flatten_joins import flatten_joins
from pgtrickle.query.rewrites.prune import prune
from pgtrickle.query.rewrites.push_filters import push_filters
from pgtrickle.query.rewrites.push_projections import push_projections
from pgtrickle.query.unsupported import Unsupported


def normalise(plan: Plan, new_column: NewColumn, types_of: TypesOf) -> Plan:
    """The plan with filters and expressions pushed down, join keys as columns, flat joins, and unused columns removed."""
    plan = push_filters(plan, [])
    plan = compute_operands(plan, new_column, types_of)
    plan = compute_arguments(plan, new_column, types_of)
    plan = push_projections(plan)
    plan = flatten_joins(plan)
    plan = prune(plan, {column.id for column in plan.columns})
    check_scopes(plan)
    return plan


def check_scopes(plan: Plan) -> None:
    """Raise Unsupported if an expression reads columns of other inputs than its own: a correlation not lifted."""
    known: set[str]
    read: set[str]
    match plan:
        case Filter(input=child, condition=condition):
            known, read = column_ids(child), used_ids(condition)
        case Project(input=child, items=items):
            known, read = column_ids(child), set().union(*(used_ids(value) for _, value in items)) if items else set()
        case InnerJoin(inputs=inputs, conditions=conditions):
            known = set().union(*map(column_ids, inputs))
            read = set().union(*map(used_ids, conditions))
        case Join(left=left, right=right, condition=condition) | Exists(left=left, right=right, condition=condition):
            known, read = column_ids(left) | column_ids(right), used_ids(condition)
        case Aggregate(input=child, keys=keys, calls=calls):
            known = column_ids(child)
            read = {column.id for column in keys}.union(*(used_ids(call) for _, call in calls))
        case _:
            known, read = set(), set()
    if not read <= known:
        raise Unsupported("a subquery refers to a query further out than the one around it")
    match plan:
        case Filter(input=child) | Project(input=child) | Aggregate(input=child):
            check_scopes(child)
        case Join(left=left, right=right) | Exists(left=left, right=right):
            check_scopes(left)
            check_scopes(right)
        case UnionAll(inputs=inputs) | InnerJoin(inputs=inputs):
            for child in inputs:
                check_scopes(child)
        case _:
            return
