"""From a query's plan to the plan of its change.

Inner joins take the change of one side at a time: inputs to the left at their new state, to the right at their old one,
so that nothing counts twice. Outer joins are the inner join plus the padded rows without a partner. What cannot be added
up is recomputed for the groups that the change touches. One function per operator; `RULES` is the whole algebra.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlglot import exp

from pgtrickle.ivm.key_bounds import Keys, restrict
from pgtrickle.ivm.outer_join import padded, partner_mark
from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Exists,
    Filter,
    Flip,
    Join,
    Plan,
    Project,
    Regroup,
    Scan,
    UnionAll,
    Values,
    Version,
    at_version,
    equi_keys,
)
from pgtrickle.query.unsupported import Unsupported

# Spark plans for seconds beyond this. The largest plan of the corpus, four tables in a chain of left joins, has 312.
MOST_OPERATORS = 600


def differentiate(plan: Plan) -> Plan | None:
    """The plan whose value is the change of the given one between frontier and cut; None where it never changes.

    Raises Unsupported as soon as it has too many operators. Outer joins and existence tests within each other multiply:
    each reads states of what is below it several times.
    """
    change = RULES[type(plan)](plan)
    if change is not None and change.operators > MOST_OPERATORS:
        raise Unsupported(f"its change takes more than {MOST_OPERATORS} operators: the whole query costs less")
    return change


def _scan(plan: Scan) -> Plan:
    return Scan(plan.relation, plan.fields, Version.DELTA)


def _values(plan: Values) -> None:
    return None


def _filter(plan: Filter) -> Plan | None:
    change = differentiate(plan.input)
    return None if change is None else Filter(change, plan.condition)


def _project(plan: Project) -> Plan | None:
    change = differentiate(plan.input)
    return None if change is None else Project(change, plan.items)


def _union(plan: UnionAll) -> Plan | None:
    return _all_of([differentiate(child) for child in plan.inputs], plan.columns)


def _join(plan: Join) -> Plan | None:
    left, right = differentiate(plan.left), differentiate(plan.right)
    terms: list[Plan | None] = [_inner(Join("inner", plan.left, plan.right, plan.condition), left, right)]
    if plan.kind in {"left", "full"}:
        terms.append(_without_partner(partner_mark(plan.left, plan.right, plan.condition), left, right, plan.columns))
    if plan.kind in {"right", "full"}:
        terms.append(_without_partner(partner_mark(plan.right, plan.left, plan.condition), right, left, plan.columns))
    return _all_of(terms, plan.columns)


def _inner(plan: Join, left_change: Plan | None, right_change: Plan | None) -> Plan | None:
    terms: list[Plan | None] = []
    if left_change is not None:
        right = at_version(plan.right, Version.OLD)
        for mine, theirs in equi_keys(plan):
            right = restrict(right, theirs, Keys(left_change, mine))
        terms.append(Join("inner", left_change, right, plan.condition))
    if right_change is not None:
        left = plan.left
        for mine, theirs in equi_keys(plan):
            left = restrict(left, mine, Keys(right_change, theirs))
        terms.append(Join("inner", left, right_change, plan.condition))
    return _all_of(terms, plan.columns)


def _without_partner(
    marked: Exists, left_change: Plan | None, right_change: Plan | None, columns: tuple[Column, ...]
) -> Plan | None:
    """The change of the padded rows: those of one side that no row of the other meets."""
    change = _marks(marked, left_change, right_change)
    return None if change is None else padded(change, marked.left, marked.mark, columns)


def _exists(plan: Exists) -> Plan | None:
    return _marks(plan, differentiate(plan.left), differentiate(plan.right))


def _marks(plan: Exists, left_change: Plan | None, right_change: Plan | None) -> Plan | None:
    """The change of marked rows, given the changes of both sides."""
    pairs = equi_keys(plan)
    terms: list[Plan | None] = []
    if left_change is not None:
        right = plan.right
        for mine, theirs in pairs:
            right = restrict(right, theirs, Keys(left_change, mine))
        terms.append(Exists(left_change, right, plan.condition, plan.mark))
    if right_change is not None:
        left, right = plan.left, plan.right
        for mine, theirs in pairs:
            left = restrict(left, mine, Keys(right_change, theirs))
            # Rows that are left may meet the same partners as those that changed, and by their own type's equality be others.
            if theirs.type.tells_apart(mine.type):
                right = restrict(right, theirs, Keys(right_change, theirs))
        unchanged = Filter(plan.left, exp.false())
        terms.append(Flip(left, left_change or unchanged, right, right_change, plan.condition, plan.mark))
    return _all_of(terms, plan.columns)


def _aggregate(plan: Aggregate) -> Plan | None:
    change = differentiate(plan.input)
    if change is None:
        return None
    new = plan.input
    for key in plan.keys:
        new = restrict(new, key, Keys(change, key, nulls=True))
    old = at_version(new, Version.OLD)
    return Regroup(Aggregate(new, plan.keys, plan.calls), Aggregate(old, plan.keys, plan.calls), change)


def _all_of(terms: Sequence[Plan | None], columns: tuple[Column, ...]) -> Plan | None:
    present = tuple(term for term in terms if term is not None)
    if not present:
        return None
    if len(present) == 1 and present[0].columns == columns:
        return present[0]
    return UnionAll(present, columns)


RULES: dict[type[Any], Callable[[Any], Plan | None]] = {
    Scan: _scan,
    Values: _values,
    Filter: _filter,
    Project: _project,
    Join: _join,
    Exists: _exists,
    Aggregate: _aggregate,
    UnionAll: _union,
}
