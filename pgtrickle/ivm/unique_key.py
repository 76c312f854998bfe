"""The columns that identify the rows of a query's result."""

from __future__ import annotations

from collections.abc import Sequence

from sqlglot import exp

from pgtrickle.query.conditions import unwrap
from pgtrickle.query.constants import constant
from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Exists,
    Filter,
    InnerJoin,
    Join,
    Plan,
    Project,
    Scan,
    UnionAll,
    equalities,
    equi_keys,
)


def key_of(plan: Plan) -> frozenset[str] | None:
    """Ids of columns whose values are unique in the plan's result (NULLs count as equal); None if none are known.

    An empty set means that there is at most one row.
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
            passed = _cast_items(plan) | {
                value.name: column.id for column, value in items if isinstance(value, exp.Column)
            }
            return frozenset(passed[id_] for id_ in below) if all(id_ in passed for id_ in below) else None
        case InnerJoin():
            return _inner_join_key(plan)
        case Join():
            return _join_key(plan)
        case Exists(left=left):
            return key_of(left)
        case Aggregate(keys=keys):
            return frozenset(key.id for key in keys)
        case UnionAll():
            return _union_key(plan)
        case _:
            return None


def _union_key(plan: UnionAll) -> frozenset[str] | None:
    """The key of a union whose inputs a constant distinguishes: the constant, and a key common to all inputs."""
    positions = []
    for child in plan.inputs:
        key = key_of(child)
        if key is None:
            return None
        positions.append({i for i, column in enumerate(child.columns) if column.id in key})
    if all(_is_spread(child) for child in plan.inputs):
        # The key of a distributed table is unique across all nodes.
        return frozenset(plan.columns[i].id for i in positions[0])
    marks = [i for i in range(len(plan.columns)) if _tells_apart(plan.inputs, i)]
    if not marks or any(found != positions[0] for found in positions):
        return None
    return frozenset(plan.columns[i].id for i in {marks[0], *positions[0]})


def _is_spread(plan: Plan) -> bool:
    """Whether the plan reads rows of a distributed table on one node."""
    match plan:
        case Scan(relation=relation):
            return relation.spread
        case Filter(input=child) | Project(input=child):
            return _is_spread(child)
        case _:
            return False


def _tells_apart(inputs: Sequence[Plan], position: int) -> bool:
    """Whether every input has a constant in this column, and no two inputs the same one."""
    values = [_constant(child, child.columns[position].id) for child in inputs]
    return None not in values and len(set(values)) == len(values)


def _constant(plan: Plan, id_: str) -> str | None:
    """The constant that a column has in all rows, as Spark SQL; None if there is none."""
    match plan:
        case Filter(input=child):
            return _constant(child, id_)
        case Project(input=child, items=items):
            value = next(value for column, value in items if column.id == id_)
            return _constant(child, value.name) if isinstance(value, exp.Column) else constant(value)
        case _:
            return None


def _inner_join_key(plan: InnerJoin) -> frozenset[str] | None:
    """The keys of those inputs that determine the rows of all others."""
    keys = [key_of(child) for child in plan.inputs]
    if None in keys:
        return None
    pairs = [
        pair
        for pair in equalities(plan.inputs, plan.conditions)
        if pair.columns[0].type.equality_is_shared(pair.columns[1].type)
    ]

    def determined(by: set[int]) -> bool:
        """Whether these inputs determine all: an input that is joined on its whole key has at most one row."""
        found = set(by)
        while True:
            more = set()
            for i in set(range(len(keys))) - found:
                ids = [
                    pair.columns[side].id
                    for pair in pairs
                    for side in (0, 1)
                    if pair.sides[side] == i and pair.sides[1 - side] in found
                ]
                if (keys[i] or frozenset()) <= _as_unique(plan.inputs[i], ids):
                    more.add(i)
            if not more:
                return len(found) == len(keys)
            found |= more

    kept = set(range(len(keys)))
    for i in reversed(range(len(keys))):
        if determined(kept - {i}):
            kept.remove(i)
    return frozenset().union(*(keys[i] or frozenset() for i in kept))


def _join_key(plan: Join) -> frozenset[str] | None:
    left, right = key_of(plan.left), key_of(plan.right)
    if left is None or right is None:
        return None
    pairs = [(one, other) for one, other in equi_keys(plan) if one.type.equality_is_shared(other.type)]
    # A side that is joined on its whole key has at most one row for each row of the other.
    if plan.kind == "left" and right <= _as_unique(plan.right, [other.id for _, other in pairs]):
        return left
    if plan.kind == "right" and left <= _as_unique(plan.left, [one.id for one, _ in pairs]):
        return right
    return left | right


def _as_unique(plan: Plan, ids: Sequence[str]) -> set[str]:
    """These columns, and those that they were cast from if the cast keeps different values different."""
    return set(ids).union(*(_cast_from(plan, id_) for id_ in ids))


def _cast_items(plan: Project) -> dict[str, str]:
    """Map columns below to the columns that they are cast to, if the cast keeps different values different."""
    types = {column.id: column.type for column in plan.input.columns}
    found = {}
    for column, value in plan.items:
        inner = unwrap(value.this) if isinstance(value, exp.Cast) else None
        if isinstance(inner, exp.Column) and types[inner.name].is_kept_apart_by(column.type):
            found[inner.name] = column.id
    return found


def _cast_from(plan: Plan, id_: str) -> set[str]:
    match plan:
        case Filter(input=child):
            return _cast_from(child, id_)
        case Project(input=child, items=items):
            value = next(value for column, value in items if column.id == id_)
            casts = {target: source for source, target in _cast_items(plan).items()}
            source = value.name if isinstance(value, exp.Column) else casts.get(id_)
            if source is None:
                return set()
            below = {source} | _cast_from(child, source)
            return {other.id for other, passed in items if isinstance(passed, exp.Column) and passed.name in below}
        case _:
            return set()


def key_columns(plan: Plan, output: tuple[Column, ...]) -> tuple[str, ...] | None:
    """The names of the output columns that form a key, in order; None if the result has no key of its own."""
    key = key_of(plan)
    if key is None or not key <= {column.id for column in output}:
        return None
    return tuple(column.name for column in output if column.id in key)
