"""From a query's plan to the plan of its change.

An inner join takes the change of one side at a time, with inputs to the left of it at their new state and inputs to the
right at their old one, so that nothing counts twice. An outer join is the inner join plus the padded rows without a
partner. What cannot be added up is recomputed for the groups that the change affects. There is one function per
operator; `RULES` is the whole algebra.
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

# Beyond this, Spark's own planning takes seconds. The largest plan of the test corpus, a chain of left joins over four
# tables, has 312 operators.
MOST_OPERATORS = 600


def differentiate(plan: Plan) -> Plan | None:
    """The plan of the change of a given plan between frontier and cut; None if it never changes.

    Raises Unsupported as soon as the change has too many operators. Nested outer joins and existence tests multiply
    them, because each reads the states below it several times.
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
    """The change of the padded rows: the rows of one side that match no row of the other."""
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
            # Unless the type of the right keys tells them apart, an unchanged row can match the same partners as a
            # changed row although their keys differ by their own type's equality: the restriction would lose it.
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
