"""Push filters down as far as possible."""

from __future__ import annotations

from dataclasses import replace

from sqlglot import exp

from pgtrickle.query.conditions import conjunction, conjuncts
from pgtrickle.query.plan import (
    Aggregate,
    Exists,
    Filter,
    InnerJoin,
    Join,
    Plan,
    Project,
    UnionAll,
    used_ids,
)
from pgtrickle.query.rewrites.columns import column_ids, substitute


def push_filters(plan: Plan, parts: list[exp.Expression]) -> Plan:
    """The plan filtered by `parts`, each pushed down as far as possible."""
    match plan:
        case Filter(input=child, condition=condition):
            return push_filters(child, [*conjuncts(condition), *parts])
        case Project(input=child, items=items):
            mapping = {column.id: value for column, value in items}
            return Project(push_filters(child, [substitute(part, mapping) for part in parts]), items)
        case InnerJoin(inputs=inputs, conditions=conditions):
            rest = [*parts, *conditions]
            below = []
            for child in inputs:
                down = [part for part in rest if used_ids(part) <= column_ids(child)]
                rest = [part for part in rest if part not in down]
                below.append(push_filters(child, down))
            return InnerJoin(tuple(below), tuple(rest))
        case Join(kind=kind, left=left, right=right, condition=condition):
            to_left = [part for part in parts if kind == "left" and used_ids(part) <= column_ids(left)]
            rest = [part for part in parts if part not in to_left]
            to_right = [part for part in rest if kind == "right" and used_ids(part) <= column_ids(right)]
            rest = [part for part in rest if part not in to_right]
            on = conjuncts(condition)
            # In an outer join, an ON condition over the padded side alone only restricts that side.
            if kind in {"left", "right"}:
                padded = right if kind == "left" else left
                narrow = [part for part in on if used_ids(part) and used_ids(part) <= column_ids(padded)]
                on = [part for part in on if part not in narrow]
                if kind == "left":
                    to_right += narrow
                else:
                    to_left += narrow
            node: Plan = Join(kind, push_filters(left, to_left), push_filters(right, to_right), conjunction(on))
            return _filtered(node, rest)
        case Exists(left=left, right=right, condition=condition, mark=mark):
            down = [part for part in parts if used_ids(part) <= column_ids(left)]
            rest = [part for part in parts if part not in down]
            on = conjuncts(condition)
            narrow = [part for part in on if used_ids(part) and used_ids(part) <= column_ids(right)]
            on = [part for part in on if part not in narrow]
            node = Exists(push_filters(left, down), push_filters(right, narrow), conjunction(on), mark)
            return _filtered(node, rest)
        case Aggregate(input=child, keys=keys):
            down = [part for part in parts if keys and used_ids(part) <= {column.id for column in keys}]
            rest = [part for part in parts if part not in down]
            return _filtered(replace(plan, input=push_filters(child, down)), rest)
        case UnionAll(inputs=inputs, columns=columns):
            pushed = []
            for child in inputs:
                mapping = {ours.id: theirs.ref() for ours, theirs in zip(columns, child.columns, strict=True)}
                pushed.append(push_filters(child, [substitute(part, mapping) for part in parts]))
            return UnionAll(tuple(pushed), columns)
        case _:
            return _filtered(plan, parts)


def _filtered(plan: Plan, parts: list[exp.Expression]) -> Plan:
    return Filter(plan, conjunction(parts)) if parts else plan
