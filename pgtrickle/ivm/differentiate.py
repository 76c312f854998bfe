"""From a query's plan to the plan of its change.

An inner join takes the change of one input at a time, with the inputs before it at their new state and those after it at
their old one, so that nothing counts twice. An outer join is the inner join plus the padded rows without a
partner. What cannot be added up is recomputed for the groups that the change affects. There is one function per
operator; `RULES` is the whole algebra.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlglot import exp

from pgtrickle.ivm.key_bounds import Keys, look_up, restrict
from pgtrickle.ivm.outer_join import padded, partner_mark
from pgtrickle.query.conditions import conjuncts
from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Exists,
    Filter,
    Flip,
    InnerJoin,
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
from pgtrickle.query.rewrites.columns import keep_columns
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


def _inner_join(plan: InnerJoin) -> Plan | None:
    return _terms(plan, [differentiate(child) for child in plan.inputs])


def _terms(plan: InnerJoin, changes: Sequence[Plan | None]) -> Plan | None:
    """One term for each input that changes, given the changes of the inputs."""
    old = [at_version(child, Version.OLD) for child in plan.inputs]
    terms = [
        None if change is None else _term(plan, i, (*plan.inputs[:i], change, *old[i + 1 :]))
        for i, change in enumerate(changes)
    ]
    return _all_of(terms, plan.columns)


def _term(plan: InnerJoin, changed: int, states: Sequence[Plan]) -> Plan:
    """The rows that the change of one input contributes: it is joined with the inputs that it leads to, in that order."""
    found = look_up(states, plan.conditions, {}, start=changed)
    joined = InnerJoin(tuple(found.inputs[i] for i in found.order), plan.conditions)
    return joined if joined.columns == plan.columns else keep_columns(joined, plan.columns)


def _join(plan: Join) -> Plan | None:
    left, right = differentiate(plan.left), differentiate(plan.right)
    inner = InnerJoin((plan.left, plan.right), tuple(conjuncts(plan.condition)))
    terms: list[Plan | None] = [_terms(inner, (left, right))]
    if plan.kind in {"left", "full"}:
        terms.append(_without_partner(partner_mark(plan.left, plan.right, plan.condition), left, right, plan.columns))
    if plan.kind in {"right", "full"}:
        terms.append(_without_partner(partner_mark(plan.right, plan.left, plan.condition), right, left, plan.columns))
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
        right = restrict(plan.right, [(theirs, Keys(left_change, mine)) for mine, theirs in pairs])
        terms.append(Exists(left_change, right, plan.condition, plan.mark))
    if right_change is not None:
        left = restrict(plan.left, [(mine, Keys(right_change, theirs)) for mine, theirs in pairs])
        # Unless the type of the right keys tells them apart, an unchanged row can match the same partners as a
        # changed row although their keys differ by their own type's equality: the restriction would lose it.
        apart = [theirs for mine, theirs in pairs if theirs.type.tells_apart(mine.type)]
        right = restrict(plan.right, [(theirs, Keys(right_change, theirs)) for theirs in apart])
        unchanged = Filter(plan.left, exp.false())
        terms.append(Flip(left, left_change or unchanged, right, right_change, plan.condition, plan.mark))
    return _all_of(terms, plan.columns)


def _aggregate(plan: Aggregate) -> Plan | None:
    change = differentiate(plan.input)
    if change is None:
        return None
    new = restrict(plan.input, [(key, Keys(change, key, nulls=True)) for key in plan.keys])
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
    InnerJoin: _inner_join,
    Join: _join,
    Exists: _exists,
    Aggregate: _aggregate,
    UnionAll: _union,
}
