"""Check whether the rows of a result without a key can be found by their text.

They cannot if the text of a column does not depend on the rows alone. A group of 1.5 and 1.50 shows one of the two,
and which one depends on the order of rows; so do the last digits of a float sum.
"""

from __future__ import annotations

from sqlglot import exp

from pgtrickle.query.conditions import unwrap
from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Exists,
    Filter,
    InnerJoin,
    Join,
    Plan,
    Project,
    UnionAll,
    inputs_of,
    used_ids,
)
from pgtrickle.query.unsupported import Unsupported


def check_fingerprint(plan: Plan) -> None:
    """Raise Unsupported if the rows of the plan's result cannot be found by their text."""
    _check_float_aggregates(plan)
    chosen = _chosen(plan)
    for column in plan.columns:
        if column.id in chosen:
            raise Unsupported(
                f"equal values of {column.type.name} can print differently, and the result has no key to find its"
                f" rows by: {column.name or 'a column'} shows one value of its group"
            )


def _check_float_aggregates(plan: Plan) -> None:
    if isinstance(plan, Aggregate) and any(column.type.is_float for column, _ in plan.calls):
        raise Unsupported(
            "the digits of a float aggregate depend on the order of its rows, and the result has no key to find"
            " its rows by: add the GROUP BY columns to the output",
            plan.calls[0][1],
        )
    for child in inputs_of(plan):
        _check_float_aggregates(child)


def _chosen(plan: Plan) -> set[str]:
    """Ids of the plan's columns that show one of several equal values."""
    match plan:
        case Aggregate(input=child, keys=keys, calls=calls):
            below = _chosen(child)
            types = {column.id: column.type for column in child.columns}
            found = {key.id for key in keys if key.id in below or not key.type.prints_alike}
            for column, call in calls:
                value = unwrap(call.this) if isinstance(call, exp.Min | exp.Max) else None
                if (isinstance(value, exp.Column) and not types[value.name].prints_alike) or (
                    used_ids(call) & below and not isinstance(call, exp.Count)
                ):
                    found.add(column.id)
            return found
        case Project(input=child, items=items):
            below = _chosen(child)
            return {column.id for column, value in items if used_ids(value) & below}
        case Filter(input=child):
            return _chosen(child)
        case Exists(left=left):
            return _chosen(left)
        case InnerJoin(inputs=inputs):
            return set().union(*map(_chosen, inputs))
        case Join(left=left, right=right):
            return _chosen(left) | _chosen(right)
        case UnionAll(inputs=inputs, columns=columns):
            return {ours.id for child in inputs for ours in _above(child, columns)}
        case _:
            return set()


def _above(child: Plan, columns: tuple[Column, ...]) -> list[Column]:
    """The union's columns that show a chosen column of the input."""
    chosen = _chosen(child)
    return [ours for ours, theirs in zip(columns, child.columns, strict=True) if theirs.id in chosen]
