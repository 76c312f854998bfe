"""Push expressions of a projection below a join if they read only one of its sides."""

from __future__ import annotations

from dataclasses import replace

from sqlglot import exp

from pgtrickle.query.plan import (
    Column,
    Filter,
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
        if isinstance(child, Join):
            plan = _split_items(plan, child)
        elif isinstance(child, Filter) and isinstance(child.input, Join):
            plan = _split_items(plan, child.input, child.condition)
    return rebuild(plan, push_projections)


def _split_items(plan: Project, join: Join, condition: exp.Expression | None = None) -> Project:
    """Move expressions that read one preserved side below the join."""
    sides = {"inner": ("left", "right"), "left": ("left",), "right": ("right",), "full": ()}[join.kind]
    extra: dict[str, list[tuple[Column, exp.Expression]]] = {"left": [], "right": []}
    items: list[tuple[Column, exp.Expression]] = []
    for column, value in plan.items:
        home = next(
            (side for side in sides if used_ids(value) and used_ids(value) <= column_ids(getattr(join, side))), None
        )
        if home is not None and not isinstance(value, exp.Column):
            extra[home].append((column, value))
            items.append((column, column.ref()))
        else:
            items.append((column, value))
    if not any(extra.values()):
        return plan
    parts = {}
    for side in ("left", "right"):
        child: Plan = getattr(join, side)
        passed = tuple((column, column.ref()) for column in child.columns)
        parts[side] = Project(child, (*passed, *extra[side])) if extra[side] else child
    node: Plan = replace(join, left=parts["left"], right=parts["right"])
    if condition is not None:
        node = Filter(node, condition)
    return Project(node, tuple(items))
