"""Push expressions of a projection below a join if they read only one of its sides."""

from __future__ import annotations

from dataclasses import replace

from sqlglot import exp

from pgtrickle.query.plan import (
    Column,
    Filter,
    InnerJoin,
    Join,
    Plan,
    Project,
    rebuild,
    used_ids,
)
from pgtrickle.query.rewrites.columns import column_ids, substitute


def push_projections(plan: Plan) -> Plan:
    """The plan with projected expressions that read one side of a join computed on that side."""
    if isinstance(plan, Project):
        child = plan.input
        while isinstance(child, Project):
            mapping = {column.id: value for column, value in child.items}
            plan = Project(child.input, tuple((column, substitute(value, mapping)) for column, value in plan.items))
            child = plan.input
        if isinstance(child, InnerJoin | Join):
            plan = _split_items(plan, child)
        elif isinstance(child, Filter) and isinstance(child.input, InnerJoin | Join):
            plan = _split_items(plan, child.input, child.condition)
    return rebuild(plan, push_projections)


def _split_items(plan: Project, join: InnerJoin | Join, condition: exp.Expression | None = None) -> Project:
    """Move expressions that read one preserved side below the join."""
    sides = join.inputs if isinstance(join, InnerJoin) else (join.left, join.right)
    preserved = {"left": (0,), "right": (1,), "full": ()}[join.kind] if isinstance(join, Join) else range(len(sides))
    extra: dict[int, list[tuple[Column, exp.Expression]]] = {}
    items: list[tuple[Column, exp.Expression]] = []
    for column, value in plan.items:
        reads = used_ids(value)
        home = next((i for i in preserved if reads and reads <= column_ids(sides[i])), None)
        if home is not None and not isinstance(value, exp.Column):
            extra.setdefault(home, []).append((column, value))
            items.append((column, column.ref()))
        else:
            items.append((column, value))
    if not extra:
        return plan
    parts: list[Plan] = []
    for i, child in enumerate(sides):
        passed = tuple((column, column.ref()) for column in child.columns)
        parts.append(Project(child, (*passed, *extra[i])) if i in extra else child)
    one, *others = parts
    node: Plan = (
        replace(join, inputs=(one, *others))
        if isinstance(join, InnerJoin)
        else replace(join, left=one, right=others[0])
    )
    if condition is not None:
        node = Filter(node, condition)
    return Project(node, tuple(items))
