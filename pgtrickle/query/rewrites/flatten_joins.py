"""Make one node of inner joins that are inputs of inner joins.

The change of an inner join is one term per input, so one join of n inputs has n terms, while nested joins of two would
nest change within state within change.
"""

from __future__ import annotations

from sqlglot import exp

from pgtrickle.query.plan import InnerJoin, Plan, Project, rebuild
from pgtrickle.query.rewrites.columns import substitute


def flatten_joins(plan: Plan) -> Plan:
    """The plan without inner joins directly below inner joins, or with only a choice of columns between them."""
    plan = rebuild(plan, flatten_joins)
    if isinstance(plan, Project):
        return _over_one_choice(plan)
    return _flat(plan) if isinstance(plan, InnerJoin) else plan


def _flat(plan: InnerJoin) -> Plan:
    inputs: list[Plan] = []
    conditions: list[exp.Expression] = []
    chosen: dict[str, exp.Expression] = {}
    for child in plan.inputs:
        join = child
        if isinstance(child, Project) and _is_choice(child):
            join = child.input
        if isinstance(join, InnerJoin):
            inputs += join.inputs
            conditions += join.conditions
            if isinstance(child, Project):
                chosen |= {column.id: value for column, value in child.items}
        else:
            inputs.append(child)
    if len(inputs) == len(plan.inputs):
        return plan
    conditions += [substitute(part, chosen) for part in plan.conditions]
    flat = InnerJoin(tuple(inputs), tuple(conditions))
    if flat.columns == plan.columns:
        return flat
    return Project(flat, tuple((column, chosen.get(column.id, column.ref())) for column in plan.columns))


def _over_one_choice(plan: Project) -> Project:
    """The projection over the join itself, not over a choice of its columns."""
    child = plan.input
    if not (isinstance(child, Project) and _is_choice(child)):
        return plan
    chosen = {column.id: value for column, value in child.items}
    return Project(child.input, tuple((column, substitute(value, chosen)) for column, value in plan.items))


def _is_choice(plan: Project) -> bool:
    """Whether the projection only chooses columns of an inner join."""
    return isinstance(plan.input, InnerJoin) and all(isinstance(value, exp.Column) for _, value in plan.items)
