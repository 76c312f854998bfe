"""Remove unused columns."""

from __future__ import annotations

from dataclasses import replace

from pgtrickle.query.plan import (
    Aggregate,
    Exists,
    Filter,
    InnerJoin,
    Join,
    Plan,
    Project,
    Scan,
    UnionAll,
    Values,
    used_ids,
)
from pgtrickle.query.rewrites.columns import keep_columns


def prune(plan: Plan, needed: set[str]) -> Plan:
    """The plan without columns that nothing above needs."""
    match plan:
        case Scan(fields=fields):
            return replace(plan, fields=tuple(pair for pair in fields if pair[0].id in needed))
        case Values(columns=columns, rows=rows):
            keep = [i for i, column in enumerate(columns) if column.id in needed]
            return Values(tuple(columns[i] for i in keep), tuple(tuple(row[i] for i in keep) for row in rows))
        case Filter(input=child, condition=condition):
            return Filter(prune(child, needed | used_ids(condition)), condition)
        case Project(input=child, items=items):
            kept = tuple(pair for pair in items if pair[0].id in needed)
            below: set[str] = set().union(*(used_ids(value) for _, value in kept)) if kept else set()
            return Project(prune(child, below), kept)
        case InnerJoin(inputs=inputs, conditions=conditions):
            wanted = needed.union(*(used_ids(part) for part in conditions))
            return InnerJoin(tuple(prune(child, wanted) for child in inputs), conditions)
        case Join(left=left, right=right, condition=condition):
            wanted = needed | used_ids(condition)
            return replace(plan, left=prune(left, wanted), right=prune(right, wanted))
        case Exists(left=left, right=right, condition=condition):
            wanted = needed | used_ids(condition)
            return replace(plan, left=prune(left, wanted), right=prune(right, wanted))
        case Aggregate(input=child, keys=keys, calls=calls):
            kept_calls = tuple(pair for pair in calls if pair[0].id in needed)
            below = {column.id for column in keys}.union(*(used_ids(call) for _, call in kept_calls))
            if not keys and not kept_calls:
                return Values((), ((),))  # one row, whatever its input
            return Aggregate(prune(child, below), keys, kept_calls)
        case UnionAll(inputs=inputs, columns=columns):
            keep = [i for i, column in enumerate(columns) if column.id in needed]
            pruned = []
            for child in inputs:
                own = child.columns
                kept_child = prune(child, {own[i].id for i in keep})
                pruned.append(keep_columns(kept_child, tuple(own[i] for i in keep)))
            return UnionAll(tuple(pruned), tuple(columns[i] for i in keep))
        case _:
            raise AssertionError(f"{type(plan).__name__} does not occur before differentiation")
