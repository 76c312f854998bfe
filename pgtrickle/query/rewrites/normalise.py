"""Equivalent plans that are cheaper to maintain: filters sink, expressions move to the one source they read, and
columns nobody needs disappear.

An expression over one source is evaluated by PostgreSQL in the fetch, whatever it is; one over two sources needs Spark to
know it. So the lower it stands the better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sqlglot import exp

from pgtrickle.query.conditions import conjunction, conjuncts, unwrap
from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Exists,
    Filter,
    Join,
    NewColumn,
    Plan,
    Project,
    Scan,
    TypesOf,
    UnionAll,
    Values,
    rebuild,
    used_ids,
)
from pgtrickle.query.rewrites.aggregate_arguments import compute_arguments
from pgtrickle.query.types import RECORD
from pgtrickle.query.unsupported import Unsupported


def normalise(plan: Plan, new_column: NewColumn, types_of: TypesOf) -> Plan:
    """The plan with filters and expressions pushed down, join keys as columns, and unused columns removed."""
    plan = _push_filters(plan, [])
    plan = _compute_operands(plan, new_column, types_of)
    plan = compute_arguments(plan, new_column, types_of)
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


def _compute_operands(plan: Plan, new_column: NewColumn, types_of: TypesOf) -> Plan:
    """What a condition computes from one input becomes a column of that input.

    So a lookup by key is a lookup by column, and whoever tests the condition need not know the expression.
    """
    plan = rebuild(plan, lambda child: _compute_operands(child, new_column, types_of))
    sides: list[Plan]
    match plan:
        case Join(left=left, right=right, condition=condition) | Exists(left=left, right=right, condition=condition):
            sides = [left, right]
        case Filter(input=Join(kind="left" | "right") | Exists() as child, condition=condition):
            sides = [child]
        case _:
            return plan
    before = list(sides)

    def as_column(value: exp.Expression, *, anywhere: bool) -> exp.Expression:
        reads = used_ids(value)
        for i, side in enumerate(sides):
            home = _home(side, reads) if reads and reads <= _ids(side) else None
            if home is None and anywhere and reads and reads <= _ids(side):
                home = side
            if home is not None:
                type_ = types_of(home.columns, [value])[0]
                if type_.oid == RECORD:  # a row without a type of its own can be compared, but not looked up
                    return value
                column = new_column("key", type_)
                sides[i] = _with_column(side, home, column, value)
                return column.ref()
        return value

    def operand(node: exp.Expression) -> exp.Expression:
        node = unwrap(node)
        if isinstance(node, exp.Column) or _is_quantified(node):
            return node
        return as_column(node, anywhere=len(sides) > 1)

    def rewrite(node: exp.Expression) -> exp.Expression:
        node = unwrap(node)
        if isinstance(node, exp.Column) or (isinstance(node, exp.Is) and isinstance(unwrap(node.this), exp.Column)):
            return node
        whole = as_column(node, anywhere=False)
        if whole is not node:
            return whole
        if isinstance(node, exp.And | exp.Or):
            return type(node)(this=_wrapped(rewrite(node.this)), expression=_wrapped(rewrite(node.expression)))
        if isinstance(node, exp.Not):
            return exp.Not(this=_wrapped(rewrite(node.this)))
        if type(node) in _COMPARISONS:
            return type(node)(this=operand(node.this), expression=operand(node.expression))
        return node

    computed = conjunction([rewrite(part) for part in conjuncts(condition)])
    if all(side is old for side, old in zip(sides, before, strict=True)):
        return plan
    if isinstance(plan, Filter):
        return _only(Filter(sides[0], computed), plan.columns)
    return _only(replace(plan, left=sides[0], right=sides[1], condition=computed), plan.columns)


_COMPARISONS = (exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.NullSafeEQ, exp.NullSafeNEQ)


def _is_quantified(node: exp.Expression) -> bool:
    """ANY (…) or ALL (…) after an operator: no value, though `SELECT ALL (…)` is valid SQL and gives the array."""
    return isinstance(node, exp.Any | exp.All) or (
        isinstance(node, exp.Anonymous) and node.name.upper() in {"ALL", "SOME"}
    )


def _wrapped(node: exp.Expression) -> exp.Expression:
    return node if isinstance(node, exp.Column) else exp.Paren(this=node)


def _only(plan: Plan, columns: tuple[Column, ...]) -> Plan:
    return Project(plan, tuple((column, column.ref()) for column in columns))


def _home(plan: Plan, reads: set[str]) -> Plan | None:
    """The lowest part of the plan that has all these columns as they are read here; None where it has not."""
    match plan:
        case Filter(input=child):
            return _home(child, reads)
        case Exists(left=left):
            return _home(left, reads) if reads <= _ids(left) else None
        case Join(kind=kind, left=left, right=right):
            if reads <= _ids(left) and kind in {"inner", "left"}:
                return _home(left, reads)
            if reads <= _ids(right) and kind in {"inner", "right"}:
                return _home(right, reads)
            return None
        case _:
            return plan


def _with_column(plan: Plan, home: Plan, column: Column, value: exp.Expression) -> Plan:
    """The plan with one more column, computed in its part `home`."""
    if plan is home:
        return Project(plan, (*((other, other.ref()) for other in plan.columns), (column, value)))
    match plan:
        case Filter(input=child):
            return replace(plan, input=_with_column(child, home, column, value))
        case Exists(left=left):
            return replace(plan, left=_with_column(left, home, column, value))
        case Join(left=left, right=right) if used_ids(value) <= _ids(left):
            return replace(plan, left=_with_column(left, home, column, value))
        case Join(right=right):
            return replace(plan, right=_with_column(right, home, column, value))
        case _:
            raise AssertionError(f"{type(plan).__name__} is not above the home of a column")


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
    return rebuild(plan, _push_items)


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
            if not keys and not kept_calls:
                return Values((), ((),))  # one row, whatever it counts
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
