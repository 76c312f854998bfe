"""Equivalent plans that are cheaper to maintain: filters sink, expressions move to the one source they read, and
columns nobody needs disappear.

An expression over one source is evaluated by PostgreSQL in the fetch, whatever it is; one over two sources needs Spark to
know it. So the lower it stands the better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from sqlglot import exp

from pgtrickle.query.conditions import conjunction, conjuncts
from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Exists,
    Filter,
    Join,
    Plan,
    Project,
    Scan,
    UnionAll,
    Values,
    used_ids,
)
from pgtrickle.query.types import PgType
from pgtrickle.query.unsupported import Unsupported

NewColumn = Callable[[str, PgType], Column]
TypesOf = Callable[[Iterable[Column], list[exp.Expression]], list[PgType]]


def normalise(plan: Plan, new_column: NewColumn, types_of: TypesOf) -> Plan:
    """The plan with filters and expressions pushed down, join keys as columns, and unused columns removed."""
    plan = _push_filters(plan, [])
    plan = _key_joins(plan, new_column, types_of)
    plan = _push_items(plan)
    plan = prune(plan, {column.id for column in plan.columns})
    check_scopes(plan)
    return plan


def substitute(node: exp.Expression, items: Mapping[str, exp.Expression]) -> exp.Expression:
    """The expression with columns replaced by what computes them."""

    def swap(item: exp.Expression) -> exp.Expression:
        if isinstance(item, exp.Column) and item.name in items:
            value = items[item.name].copy()
            return value if isinstance(value, exp.Column | exp.Literal | exp.Paren) else exp.Paren(this=value)
        return item

    return node.copy().transform(swap, copy=False)


def _ids(plan: Plan) -> set[str]:
    return {column.id for column in plan.columns}


def _push_filters(plan: Plan, parts: list[exp.Expression]) -> Plan:
    """The plan filtered by `parts`, each as far down as it may go."""
    match plan:
        case Filter(input=child, condition=condition):
            return _push_filters(child, [*conjuncts(condition), *parts])
        case Project(input=child, items=items):
            mapping = {column.id: value for column, value in items}
            return Project(_push_filters(child, [substitute(part, mapping) for part in parts]), items)
        case Join(kind=kind, left=left, right=right, condition=condition):
            if kind == "inner":
                parts, condition = [*parts, *conjuncts(condition)], exp.true()
            to_left = [part for part in parts if kind in {"inner", "left"} and used_ids(part) <= _ids(left)]
            rest = [part for part in parts if part not in to_left]
            to_right = [part for part in rest if kind in {"inner", "right"} and used_ids(part) <= _ids(right)]
            rest = [part for part in rest if part not in to_right]
            on = conjuncts(condition)
            if kind == "inner":
                on, rest = rest, []
            # In an outer join, a condition over the side that is padded only narrows that side.
            if kind in {"left", "right"}:
                padded = right if kind == "left" else left
                narrow = [part for part in on if used_ids(part) and used_ids(part) <= _ids(padded)]
                on = [part for part in on if part not in narrow]
                if kind == "left":
                    to_right += narrow
                else:
                    to_left += narrow
            node: Plan = Join(kind, _push_filters(left, to_left), _push_filters(right, to_right), conjunction(on))
            return _filtered(node, rest)
        case Exists(left=left, right=right, condition=condition, mark=mark):
            down = [part for part in parts if used_ids(part) <= _ids(left)]
            rest = [part for part in parts if part not in down]
            on = conjuncts(condition)
            narrow = [part for part in on if used_ids(part) and used_ids(part) <= _ids(right)]
            on = [part for part in on if part not in narrow]
            node = Exists(_push_filters(left, down), _push_filters(right, narrow), conjunction(on), mark)
            return _filtered(node, rest)
        case Aggregate(input=child, keys=keys):
            down = [part for part in parts if keys and used_ids(part) <= {column.id for column in keys}]
            rest = [part for part in parts if part not in down]
            return _filtered(replace(plan, input=_push_filters(child, down)), rest)
        case UnionAll(inputs=inputs, columns=columns):
            pushed = []
            for child in inputs:
                mapping = {ours.id: theirs.ref() for ours, theirs in zip(columns, child.columns, strict=True)}
                pushed.append(_push_filters(child, [substitute(part, mapping) for part in parts]))
            return UnionAll(tuple(pushed), columns)
        case _:
            return _filtered(plan, parts)


def _filtered(plan: Plan, parts: list[exp.Expression]) -> Plan:
    return Filter(plan, conjunction(parts)) if parts else plan


def _key_joins(plan: Plan, new_column: NewColumn, types_of: TypesOf) -> Plan:
    """Both sides of an equality in a join become columns, so that a lookup by key is a lookup by column."""
    plan = _rebuild(plan, lambda child: _key_joins(child, new_column, types_of))
    if not isinstance(plan, Join | Exists):
        return plan
    left, right = plan.left, plan.right
    parts = []
    for part in conjuncts(plan.condition):
        if isinstance(part, exp.EQ):
            sides = [part.this, part.expression]
            if used_ids(sides[0]) <= _ids(right) and used_ids(sides[1]) <= _ids(left):
                sides.reverse()
            reads = [used_ids(side) for side in sides]
            if all(reads) and reads[0] <= _ids(left) and reads[1] <= _ids(right):
                left, key = _as_column(left, sides[0], new_column, types_of)
                right, other = _as_column(right, sides[1], new_column, types_of)
                part = exp.EQ(this=key, expression=other)
        parts.append(part)
    condition = conjunction(parts)
    if isinstance(plan, Exists):
        kept = Exists(left, right, condition, plan.mark)
        return kept if left is plan.left else _only(kept, (*plan.left.columns, plan.mark))
    joined = replace(plan, left=left, right=right, condition=condition)
    return joined if left is plan.left and right is plan.right else _only(joined, plan.columns)


def _only(plan: Plan, columns: tuple[Column, ...]) -> Plan:
    return Project(plan, tuple((column, column.ref()) for column in columns))


def _as_column(
    plan: Plan, value: exp.Expression, new_column: NewColumn, types_of: TypesOf
) -> tuple[Plan, exp.Expression]:
    if isinstance(value, exp.Column):
        return plan, value
    column = new_column("key", types_of(plan.columns, [value])[0])
    passed = tuple((other, other.ref()) for other in plan.columns)
    return Project(plan, (*passed, (column, value))), column.ref()


def _push_items(plan: Plan) -> Plan:
    """Projected expressions that read one side of a join are computed on that side."""
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
    return _rebuild(plan, _push_items)


def _split_items(plan: Project, join: Join, condition: exp.Expression | None = None) -> Project:
    """Move what reads one preserved side under the join."""
    sides = {"inner": ("left", "right"), "left": ("left",), "right": ("right",), "full": ()}[join.kind]
    extra: dict[str, list[tuple[Column, exp.Expression]]] = {"left": [], "right": []}
    items: list[tuple[Column, exp.Expression]] = []
    for column, value in plan.items:
        home = next((side for side in sides if used_ids(value) and used_ids(value) <= _ids(getattr(join, side))), None)
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
        case Join(left=left, right=right, condition=condition):
            wanted = needed | used_ids(condition)
            return replace(plan, left=prune(left, wanted), right=prune(right, wanted))
        case Exists(left=left, right=right, condition=condition):
            wanted = needed | used_ids(condition)
            return replace(plan, left=prune(left, wanted), right=prune(right, wanted))
        case Aggregate(input=child, keys=keys, calls=calls):
            kept_calls = tuple(pair for pair in calls if pair[0].id in needed)
            below = {column.id for column in keys}.union(*(used_ids(call) for _, call in kept_calls))
            return Aggregate(prune(child, below), keys, kept_calls)
        case UnionAll(inputs=inputs, columns=columns):
            keep = [i for i, column in enumerate(columns) if column.id in needed]
            pruned = []
            for child in inputs:
                own = child.columns
                kept_child = prune(child, {own[i].id for i in keep})
                pruned.append(_only(kept_child, tuple(own[i] for i in keep)))
            return UnionAll(tuple(pruned), tuple(columns[i] for i in keep))
        case _:
            raise AssertionError(f"{type(plan).__name__} does not occur before differentiation")


def _rebuild(plan: Plan, change: Callable[[Plan], Plan]) -> Plan:
    match plan:
        case Filter(input=child) | Project(input=child) | Aggregate(input=child):
            return replace(plan, input=change(child))
        case Join(left=left, right=right) | Exists(left=left, right=right):
            return replace(plan, left=change(left), right=change(right))
        case UnionAll(inputs=inputs):
            return replace(plan, inputs=tuple(change(child) for child in inputs))
        case _:
            return plan


def check_scopes(plan: Plan) -> None:
    """Every expression reads columns of its own inputs only; what does not is a correlation nobody lifted."""
    known: set[str]
    read: set[str]
    match plan:
        case Filter(input=child, condition=condition):
            known, read = _ids(child), used_ids(condition)
        case Project(input=child, items=items):
            known, read = _ids(child), set().union(*(used_ids(value) for _, value in items)) if items else set()
        case Join(left=left, right=right, condition=condition) | Exists(left=left, right=right, condition=condition):
            known, read = _ids(left) | _ids(right), used_ids(condition)
        case Aggregate(input=child, keys=keys, calls=calls):
            known = _ids(child)
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
        case UnionAll(inputs=inputs):
            for child in inputs:
                check_scopes(child)
        case _:
            return
