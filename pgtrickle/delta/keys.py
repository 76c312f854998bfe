"""The columns that tell a query's rows apart."""

from __future__ import annotations

from sqlglot import exp

from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Exists,
    Filter,
    Join,
    Plan,
    Project,
    Scan,
    equi_keys,
)


def key_of(plan: Plan) -> frozenset[str] | None:
    """Ids of columns whose values are unique in the plan's result (NULLs count as equal); None where none are known.

    An empty set says that there is at most one row.
    """
    match plan:
        case Scan(relation=relation, fields=fields):
            ids = {item.name: column.id for column, item in fields}
            if relation.key and all(name in ids for name in relation.key):
                return frozenset(ids[name] for name in relation.key)
            return None
        case Filter(input=child):
            return key_of(child)
        case Project(input=child, items=items):
            below = key_of(child)
            if below is None:
                return None
            passed = {value.name: column.id for column, value in items if isinstance(value, exp.Column)}
            return frozenset(passed[id_] for id_ in below) if all(id_ in passed for id_ in below) else None
        case Join():
            return _join_key(plan)
        case Exists(left=left):
            return key_of(left)
        case Aggregate(keys=keys):
            return frozenset(key.id for key in keys)
        case _:
            return None


def _join_key(plan: Join) -> frozenset[str] | None:
    left, right = key_of(plan.left), key_of(plan.right)
    if left is None or right is None:
        return None
    pairs = equi_keys(plan)
    # A side that is met by its whole key has at most one row for each row of the other.
    if plan.kind in {"inner", "left"} and right <= {other.id for _, other in pairs}:
        return left
    if plan.kind in {"inner", "right"} and left <= {one.id for one, _ in pairs}:
        return right
    return left | right


def key_columns(plan: Plan, output: tuple[Column, ...]) -> tuple[str, ...] | None:
    """The names of the output columns that form a key, in their order; None where the result has none of its own."""
    key = key_of(plan)
    if key is None or not key <= {column.id for column in output}:
        return None
    return tuple(column.name for column in output if column.id in key)
