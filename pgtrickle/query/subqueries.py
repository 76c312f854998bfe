"""Turn EXISTS and IN into marks: boolean columns that say whether the other side has a matching row.

`x IN (…)` has three possible results. It is true if a row matches; otherwise NULL if one of the rows is NULL, or if x
is NULL and there is a row; otherwise false. Further marks, independent of each other (two for one column, one for
several), keep this exact for NOT IN, OR, CASE and the select list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sqlglot import exp

from pgtrickle.query.conditions import cast_to, conjunction, conjuncts, unwrap
from pgtrickle.query.plan import Column, Exists, Plan, used_ids
from pgtrickle.query.scope import Scope
from pgtrickle.query.types import BOOL, PgType
from pgtrickle.query.unsupported import Unsupported

if TYPE_CHECKING:
    from pgtrickle.query.binder import Binder

BOOLEAN = PgType(BOOL, -1, "boolean")

# Two expressions, one from each side.
_Pair = tuple[exp.Expression, exp.Expression]
# Takes pairs of probed and selected expressions, and their equalities; returns the conditions on the subquery's rows.
_Condition = Callable[[list[_Pair], list[exp.Expression]], list[exp.Expression]]


def has_subquery(node: exp.Expression | None) -> bool:
    return node is not None and node.find(exp.Query) is not None


def lift_condition(binder: Binder, plan: Plan, node: exp.Expression, scope: Scope) -> tuple[Plan, exp.Expression]:
    """Lift subqueries from a condition that only keeps rows for which it is true: a plain IN needs no NULL marks."""
    inner = unwrap(node)
    if isinstance(inner, exp.In) and inner.args.get("query"):
        return _lift_in(binder, plan, inner, scope, exact=False)
    return lift_value(binder, plan, node, scope)


def lift_value(binder: Binder, plan: Plan, node: exp.Expression, scope: Scope) -> tuple[Plan, exp.Expression]:
    """Replace the subqueries of any expression by marks on the plan, and resolve the rest."""
    if not has_subquery(node):
        return plan, binder.resolve(node, scope)
    if binder.is_aggregated(node):
        raise Unsupported("a subquery beside an aggregate is not maintained differentially", node)
    if isinstance(node, exp.Exists):
        return _lift_exists(binder, plan, node, scope)
    if isinstance(node, exp.In) and node.args.get("query"):
        return _lift_in(binder, plan, node, scope, exact=True)
    if isinstance(node, exp.Query | exp.Any | exp.All):
        raise Unsupported("a scalar or quantified subquery is not maintained differentially", node)
    node = node.copy()
    for name, child in list(node.args.items()):
        if isinstance(child, exp.Expression):
            plan, lifted = lift_value(binder, plan, child, scope)
            node.set(name, lifted)
        elif isinstance(child, list):
            items = []
            for item in child:
                if isinstance(item, exp.Expression):
                    plan, item = lift_value(binder, plan, item, scope)
                items.append(item)
            node.set(name, items)
    return plan, node


def _lift_exists(binder: Binder, plan: Plan, node: exp.Exists, scope: Scope) -> tuple[Plan, exp.Expression]:
    right, correlated, _ = _bind_inner(binder, node.this, scope)
    mark = binder.column("exists", BOOLEAN)
    return Exists(plan, right, conjunction(correlated), mark), mark.ref()


def _lift_in(binder: Binder, plan: Plan, node: exp.In, scope: Scope, *, exact: bool) -> tuple[Plan, exp.Expression]:
    probe = unwrap(node.this)
    wanted = [binder.resolve(item, scope) for item in (probe.expressions if isinstance(probe, exp.Tuple) else [probe])]
    plan, match = _mark_in(binder, plan, node, wanted, scope, lambda _, equalities: equalities)
    if not exact:
        return plan, match
    unknown: list[exp.Expression] = []
    if len(wanted) == 1:
        plan, null_row = _mark_in(binder, plan, node, wanted, scope, lambda pairs, _: [_is_null(pairs[0][1])])
        plan, any_row = _mark_in(binder, plan, node, wanted, scope, lambda pairs, _: [_is_null(pairs[0][0])])
        unknown = [null_row, any_row]
    else:
        plan, undecided = _mark_in(
            binder, plan, node, wanted, scope, lambda _, equalities: [_is_null(conjunction(equalities))]
        )
        unknown = [undecided]
    null = cast_to(exp.null(), "boolean")
    case = exp.Case().when(match, exp.true())
    for mark in unknown:
        case = case.when(mark, null.copy())
    return plan, exp.Paren(this=case.else_(exp.false()))


def _mark_in(
    binder: Binder, plan: Plan, node: exp.In, wanted: list[exp.Expression], scope: Scope, condition: _Condition
) -> tuple[Plan, exp.Expression]:
    right, correlated, found = _bind_inner(binder, node.args["query"], scope)
    if len(found) != len(wanted):
        raise Unsupported("IN compares a row with a subquery of other width", node)
    probed = zip(wanted, _types(binder, plan.columns, wanted), strict=True)
    selected = zip(found, _types(binder, right.columns, found), strict=True)
    equalities = [binder.equality(*one, *other) for one, other in zip(probed, selected, strict=True)]
    conditions = condition(list(zip(wanted, found, strict=True)), equalities)
    mark = binder.column("in", BOOLEAN)
    return Exists(plan, right, conjunction([*conditions, *correlated]), mark), mark.ref()


def _types(binder: Binder, columns: tuple[Column, ...], expressions: list[exp.Expression]) -> list[PgType]:
    if not used_ids(exp.Tuple(expressions=expressions)) <= {column.id for column in columns}:
        raise Unsupported("a subquery refers to a query further out than the one around it")
    return binder.typing.types_of(columns, expressions)


def _is_null(node: exp.Expression) -> exp.Expression:
    return exp.Is(this=exp.Paren(this=node.copy()), expression=exp.null())


def _bind_inner(
    binder: Binder, node: exp.Expression, outer: Scope
) -> tuple[Plan, list[exp.Expression], list[exp.Expression]]:
    """The subquery's rows, the conditions that correlate them with the enclosing query, and its select list."""
    query = node.this if isinstance(node, exp.Subquery) else node
    if isinstance(query, exp.Select) and _is_plain(binder, query):
        scope = Scope(outer=outer)
        plan = binder._bind_from(query, scope)
        own = {column.id for column in plan.columns}
        local: list[exp.Expression] = []
        tied: list[exp.Expression] = []
        where = query.args.get("where")
        for part in conjuncts(where.this if where else None):
            if has_subquery(part):
                local.append(part)
                continue
            ids = {item.name for item in binder.resolve(part, scope).find_all(exp.Column)}
            if ids <= own:
                local.append(part)
            else:
                tied.append(binder.resolve(part, scope))
        plan = binder.apply_where(plan, local, scope)
        found = [binder.resolve(item.unalias(), scope) for item in query.expressions]
        return plan, tied, found
    bound = binder.bind(query, None)
    return bound.plan, [], [column.ref() for column in bound.output]


def _is_plain(binder: Binder, query: exp.Select) -> bool:
    """Whether the subquery returns rows of FROM and WHERE as they are, so that conditions may move out of it."""
    parts = ("group", "having", "distinct", "limit", "offset", "with_")
    if any(query.args.get(part) for part in parts):
        return False
    return not any(binder.is_aggregated(item) or has_subquery(item) for item in query.expressions)
