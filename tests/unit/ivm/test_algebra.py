"""The algebra on random queries, tables and changes: the change of a plan is what happens to its result.

The reference interpreter (`tests/support/interpreter.py`) says what a plan means. `PGTRICKLE_EXAMPLES=long` tries more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import TypeVar

from hypothesis import assume, given, reject

from pgtrickle.compile.placement import Placer
from pgtrickle.compile.pushdown import push_down
from pgtrickle.ivm.additive import AdditiveForm
from pgtrickle.ivm.differentiate import differentiate
from pgtrickle.ivm.outer_join import outer_as_union
from pgtrickle.ivm.program import Program, Step
from pgtrickle.ivm.simplify import simplify
from pgtrickle.ivm.unique_key import key_of
from pgtrickle.query.plan import (
    Column,
    Join,
    NewColumn,
    Plan,
    Project,
    Relation,
    RelationColumn,
    Scan,
    TypesOf,
    Version,
    at_version,
    inputs_of,
    rebuild,
    scans_of,
)
from pgtrickle.query.rewrites.aggregate_arguments import compute_arguments
from pgtrickle.query.rewrites.compute_operands import compute_operands
from pgtrickle.query.rewrites.flatten_joins import flatten_joins
from pgtrickle.query.rewrites.imply_filters import imply_filters
from pgtrickle.query.rewrites.normalise import normalise
from pgtrickle.query.rewrites.prune import prune
from pgtrickle.query.rewrites.push_filters import push_filters
from pgtrickle.query.rewrites.push_projections import push_projections
from pgtrickle.query.unsupported import Unsupported
from tests.support.group_state import GroupStates, add_states, group_rows, group_states, living
from tests.support.interpreter import EXACT, Reading, States, TableState, ZSet, interpret, minus
from tests.support.planning import bind_query, plan_query
from tests.support.random_queries import TABLES, Case, cases, joins

T = TypeVar("T")
Rewrite = Callable[[Plan, NewColumn, TypesOf], Plan]

READINGS = (EXACT, Reading("exact", flip="read"), Reading("traced"), Reading("ignored"))

REWRITES: dict[str, Rewrite] = {
    "push_filters": lambda plan, *_: push_filters(plan, []),
    "compute_operands": compute_operands,
    "compute_arguments": compute_arguments,
    "flatten_joins": lambda plan, *_: flatten_joins(plan),
    "imply_filters": lambda plan, *_: imply_filters(plan),
    "push_projections": lambda plan, *_: push_projections(plan),
    "prune": lambda plan, *_: prune(plan, {column.id for column in plan.columns}),
    "normalise": normalise,
    "outer_as_union": lambda plan, *_: _without_outer_joins(plan),
}


@given(cases() | joins())
def test_the_change_of_a_plan_is_new_minus_old(case: Case) -> None:
    bound, new_column, types_of = bind_query(case.query, TABLES)
    for plan in (bound, normalise(bound, new_column, types_of)):
        change = _change_of(plan)
        difference = _difference(plan, case.states)
        for reading in READINGS:
            assert _changed_rows(change, case.states, reading) == difference, reading


@given(cases() | joins())
def test_a_change_is_as_simple_as_the_tables_that_changed(case: Case) -> None:
    plan = normalise(*bind_query(case.query, TABLES))
    change = _change_of(plan)
    for changed in _subsets({scan.relation.oid for scan in scans_of(plan)}):
        states = {oid: state if oid in changed else _unchanged(state) for oid, state in case.states.items()}
        simple = None if change is None else simplify(change, changed)
        for scan in scans_of(simple) if simple is not None else ():
            assert scan.version is Version.NEW or scan.relation.oid in changed
        difference = _difference(plan, states)
        for reading in READINGS:
            assert _changed_rows(simple, states, reading) == difference, reading


@given(cases() | joins())
def test_a_rewrite_keeps_the_rows(case: Case) -> None:
    plan, new_column, types_of = bind_query(case.query, TABLES)
    rows = interpret(plan, case.states)
    for name, rewrite in REWRITES.items():
        rewritten = rewrite(plan, new_column, types_of)
        assert [column.id for column in rewritten.columns] == [column.id for column in plan.columns], name
        assert interpret(rewritten, case.states) == rows, name


@given(cases(additive=True))
def test_the_state_of_groups_adds_up(case: Case) -> None:
    program = _program_of(case)
    form = program.additive
    assume(form is not None)  # sums of sums have digits that are not known
    assert form is not None
    assert program.change is not None
    before, after = _groups_before_and_after(form, program.change, case.states)
    assert living(form, after) == living(form, group_states(form, form.input, case.states))
    assert group_rows(form, living(form, after)) == interpret(program.core, case.states)
    assert group_rows(form, living(form, before)) == interpret(at_version(program.core, Version.OLD), case.states)


@given(cases() | cases(additive=True))
def test_a_program_gives_the_change_of_its_query(case: Case) -> None:
    """As the apply does: the change of the core, or of the groups that it touches, goes through the finish steps."""
    program = _program_of(case)
    assert program.change is not None
    if program.additive is None:
        change = interpret(program.change, case.states)
    else:
        form = program.additive
        before, after = _groups_before_and_after(form, program.change, case.states)
        touched = group_states(form, program.change, case.states)
        new, old = (
            group_rows(form, {key: state for key, state in living(form, groups).items() if key in touched})
            for groups in (after, before)
        )
        change = minus(new, old)
    bound, *_ = bind_query(case.query, TABLES)
    assert _finished(change, program.core.columns, program.finish) == _difference(bound, case.states)


@given(cases() | joins())
def test_a_key_identifies_rows(case: Case) -> None:
    plan, new_column, types_of = bind_query(case.query, TABLES)
    for form in (plan, normalise(plan, new_column, types_of)):
        key = key_of(form)
        if key is None:
            continue
        rows = interpret(form, case.states)
        places = [i for i, column in enumerate(form.columns) if column.id in key]
        assert len({tuple(row[i] for i in places) for row in rows}) == sum(rows.values())


@given(cases() | joins())
def test_expressions_of_a_change_sink(case: Case) -> None:
    change = _change_of(normalise(*bind_query(case.query, TABLES)))
    for node in _projections(change) if change is not None else ():
        sunk = push_down(node)
        if sunk is not None:
            assert interpret(sunk, case.states) == interpret(node, case.states)


@given(cases() | joins())
def test_placement_keeps_the_rows(case: Case) -> None:
    change = _change_of(normalise(*bind_query(case.query, TABLES)))
    assume(change is not None)
    assert change is not None
    rows = interpret(change, case.states)
    assert interpret(Placer("auto").place(change), case.states) == rows
    assert interpret(Placer("spark").place(change), case.states) == rows


def _change_of(plan: Plan) -> Plan | None:
    """The change, if it can be computed."""
    return _unless(("operators",), lambda: differentiate(plan))


def _program_of(case: Case) -> Program:
    """The program, if the query can be maintained."""
    return _unless(("operators", "reads no table", "print differently"), lambda: plan_query(case.query, TABLES))


def _unless(reasons: Sequence[str], plan: Callable[[], T]) -> T:
    """The plan; an example that is refused for one of these reasons is discarded."""
    try:
        return plan()
    except Unsupported as error:
        if not any(reason in error.reason for reason in reasons):
            raise
        reject()


def _changed_rows(change: Plan | None, states: States, reading: Reading) -> ZSet:
    return {} if change is None else interpret(change, states, reading)


def _difference(plan: Plan, states: States) -> ZSet:
    """The difference between the results of a plan."""
    return minus(interpret(plan, states), interpret(at_version(plan, Version.OLD), states))


def _subsets(oids: Iterable[int]) -> Iterator[frozenset[int]]:
    ordered = sorted(oids)
    return map(frozenset, chain.from_iterable(combinations(ordered, size) for size in range(len(ordered) + 1)))


def _unchanged(state: TableState) -> TableState:
    return TableState(state.new, {})


def _without_outer_joins(plan: Plan) -> Plan:
    plan = rebuild(plan, _without_outer_joins)
    return outer_as_union(plan) if isinstance(plan, Join) else plan


def _projections(plan: Plan) -> Iterator[Project]:
    if isinstance(plan, Project):
        yield plan
    for child in inputs_of(plan):
        yield from _projections(child)


def _groups_before_and_after(form: AdditiveForm, change: Plan, states: States) -> tuple[GroupStates, GroupStates]:
    """The stored state before and after the change is added."""
    before = group_states(form, at_version(form.input, Version.OLD), states)
    return before, add_states(before, group_states(form, change, states))


def _finished(rows: ZSet, columns: Sequence[Column], steps: Sequence[Step]) -> ZSet:
    """Rows with weights after the finish steps."""
    fields = tuple((column, RelationColumn(column.id, i, column.type)) for i, column in enumerate(columns))
    relation = Relation(0, "shop", "change", "r", tuple(item for _, item in fields))
    plan: Plan = Scan(relation, fields)
    for step in steps:
        plan = replace(step, input=plan)
    return interpret(plan, {0: TableState(rows, {})})
