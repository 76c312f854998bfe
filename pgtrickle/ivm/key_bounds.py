"""Bounds on what is read of a state: only rows whose key occurs in a change.

A bound is pushed down to the scans. At a join it is passed on from input to input: one table is looked up by the change
and the next one by the first, so that only a few rows of each are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlglot import exp

from pgtrickle.ivm.unique_key import key_of
from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Exists,
    Filter,
    InnerJoin,
    Join,
    KeyFilter,
    Plan,
    Project,
    Relation,
    Scan,
    UnionAll,
    equalities,
    equi_keys,
)

# Columns by which one table is looked up. More would rarely exclude another row, and each costs an array of keys.
MOST_KEYS = 4


@dataclass(frozen=True)
class Keys:
    """The values of one column of a plan."""

    origin: Plan
    column: Column
    nulls: bool = False


# A column of a plan, and the values to which it is bound.
Bound = tuple[Column, Keys]


def restrict(plan: Plan, bounds: Sequence[Bound]) -> Plan:
    """The plan with at least its rows whose columns are among the keys; unchanged if no bound can be passed on."""
    if not bounds:
        return plan
    match plan:
        case Scan() | KeyFilter(input=Scan() | KeyFilter()):
            return _filtered(plan, bounds)
        case Filter(input=child) | KeyFilter(input=child):
            below = restrict(child, bounds)
            return plan if below is child else replace(plan, input=below)
        case Project():
            return _restrict_project(plan, bounds)
        case InnerJoin(inputs=inputs, conditions=conditions):
            narrowed = look_up(inputs, conditions, {i: _of(child, bounds) for i, child in enumerate(inputs)})
            return plan if all(map(_same, narrowed.inputs, inputs)) else replace(plan, inputs=narrowed.inputs)
        case Join():
            return _restrict_outer(plan, bounds)
        case Exists(left=left, right=right):
            below = restrict(left, _of(left, bounds))
            if below is left:
                return plan
            passed_on = [(theirs, Keys(below, mine)) for mine, theirs in equi_keys(plan)]
            return replace(plan, left=below, right=restrict(right, passed_on))
        case Aggregate(input=child, keys=grouped):
            ids = {key.id for key in grouped}
            below = restrict(child, [bound for bound in bounds if bound[0].id in ids])
            return plan if below is child else replace(plan, input=below)
        case UnionAll(inputs=inputs, columns=columns):
            position = {column.id: i for i, column in enumerate(columns)}
            parts = tuple(
                restrict(child, [(child.columns[position[column.id]], keys) for column, keys in bounds])
                for child in inputs
            )
            return plan if all(map(_same, parts, inputs)) else replace(plan, inputs=parts)
        case _:
            return plan


@dataclass(frozen=True)
class LookUps:
    """The inputs of an inner join, each bounded by keys of those before it in `order`."""

    inputs: tuple[Plan, ...]
    order: tuple[int, ...]


def look_up(
    inputs: Sequence[Plan],
    conditions: Iterable[exp.Expression],
    bounds: Mapping[int, Sequence[Bound]],
    start: int | None = None,
) -> LookUps:
    """Look up the inputs of an inner join one after another, along its equalities.

    It begins with the input `start`, a change, or with those that have bounds of their own. The other inputs are looked
    up by the values in their neighbours: the origin of the keys is the one neighbour, which is bounded already. So
    each input is bounded once, and the plan grows with the number of inputs. What has no bound is read as a whole.
    """
    pairs = equalities(inputs, conditions)
    bounded = list(inputs)
    linked = [dict(bounds.get(i, ())) for i in range(len(inputs))]
    waiting = list(range(len(inputs)))
    order: list[int] = []
    whole: list[int] = []

    def pass_on(i: int) -> None:
        order.append(i)
        for pair in pairs:
            for mine, theirs in ((0, 1), (1, 0)):
                if pair.sides[theirs] == i:
                    linked[pair.sides[mine]].setdefault(pair.columns[mine], Keys(bounded[i], pair.columns[theirs]))

    if start is not None:
        waiting.remove(start)
        pass_on(start)
    while waiting:
        following = min(waiting, key=lambda i: _rank(inputs[i], linked[i]))
        if start is not None and whole and not linked[following]:
            pass_on(whole.pop(0))  # the keys of a whole table are many, but better than none
            continue
        waiting.remove(following)
        bounded[following] = restrict(inputs[following], list(linked[following].items())[:MOST_KEYS])
        if bounded[following] is inputs[following]:
            whole.append(following)
        else:
            pass_on(following)
    return LookUps(tuple(bounded), (*order, *whole))


def _rank(plan: Plan, linked: Collection[Column]) -> int:
    """How early to look up an input: first by a whole key, which finds one row at most, then by how a key begins."""
    if not linked:
        return 3
    sources = [_source(plan, column) for column in linked]
    if None in sources:
        key = key_of(plan)
        return 0 if key is not None and key <= {column.id for column in linked} else 2
    names = {name for _, name in filter(None, sources)}
    for relation, _ in filter(None, sources):
        if relation.key and set(relation.key) <= names:
            return 0
        if relation.key and relation.key[0] in names:
            return 1
    return 2


def _source(plan: Plan, column: Column) -> tuple[Relation, str] | None:
    """The table and the name of the column in it; of a union, those of its first input. None if it is computed."""
    match plan:
        case Scan(relation=relation, fields=fields):
            return relation, next(item.name for own, item in fields if own.id == column.id)
        case Filter(input=child) | KeyFilter(input=child):
            return _source(child, column)
        case Project(input=child, items=items):
            value = next(value for own, value in items if own.id == column.id)
            if not isinstance(value, exp.Column):
                return None
            return _source(child, next(own for own in child.columns if own.id == value.name))
        case UnionAll(inputs=(first, *_), columns=columns):
            return _source(first, first.columns[[own.id for own in columns].index(column.id)])
        case _:
            return None


def is_chain(plan: Plan) -> bool:
    """Whether the plan is filters and projections over one table."""
    return plan.is_chain


def _filtered(plan: Plan, bounds: Sequence[Bound]) -> Plan:
    for column, keys in bounds:
        plan = KeyFilter(plan, column, keys.origin, keys.column, keys.nulls)
    return plan


def _restrict_project(plan: Project, bounds: Sequence[Bound]) -> Plan:
    child = plan.input
    below = {column.id: column for column in child.columns}
    values = {column.id: value for column, value in plan.items}
    passed: list[Bound] = []
    computed: list[Bound] = []
    for column, keys in bounds:
        value = values[column.id]
        if isinstance(value, exp.Column):
            passed.append((below[value.name], keys))
        elif child.is_chain:
            computed.append((column, keys))
    narrowed = restrict(child, passed)
    return _filtered(plan if narrowed is child else replace(plan, input=narrowed), computed)


def _restrict_outer(plan: Join, bounds: Sequence[Bound]) -> Plan:
    # Restricting the padded side of an outer join would produce padded rows that do not exist.
    if plan.kind == "full":
        return plan
    on_left = plan.kind == "left"
    own, other = (plan.left, plan.right) if on_left else (plan.right, plan.left)
    narrowed = restrict(own, _of(own, bounds))
    if narrowed is own:
        return plan
    pairs = [pair if on_left else (pair[1], pair[0]) for pair in equi_keys(plan)]
    other = restrict(other, [(theirs, Keys(narrowed, mine)) for mine, theirs in pairs])
    return replace(plan, left=narrowed, right=other) if on_left else replace(plan, left=other, right=narrowed)


def _of(plan: Plan, bounds: Sequence[Bound]) -> list[Bound]:
    """The bounds of the plan's own columns."""
    own = {column.id for column in plan.columns}
    return [bound for bound in bounds if bound[0].id in own]


def _same(one: Plan, other: Plan) -> bool:
    return one is other
