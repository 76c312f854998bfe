"""The state of groups that add up, as Spark sums it and the apply adds it, over the interpreter's rows."""

from __future__ import annotations

from collections.abc import Mapping

from pgtrickle.ivm.additive import AdditiveForm
from pgtrickle.query.plan import Plan
from tests.support.evaluation import Row, evaluate
from tests.support.interpreter import EXACT, Reading, States, ZSet, interpret

GroupStates = Mapping[Row, Row]  # by the key of the group: rows; of each argument the values, their sum and the NaNs


def group_states(form: AdditiveForm, rows: Plan, states: States, reading: Reading = EXACT) -> GroupStates:
    """The state of the groups that have these rows: of the form's input, or of its change."""
    found: dict[Row, Row] = {}
    width = len(form.keys)
    for row, weight in interpret(rows, states, reading).items():
        env = {column.id: value for column, value in zip(rows.columns, row, strict=True)}
        sums = [weight]
        for argument in form.arguments:
            value, nan = env[argument.value.id], env[argument.nan.id]
            sums += [
                0 if value is None and nan is None else weight,
                0 if value is None else value * weight,
                0 if nan is None else weight,
            ]
        found = dict(add_states(found, {row[:width]: tuple(sums)}))
    return found


def add_states(one: GroupStates, other: GroupStates) -> GroupStates:
    """Group by group, number by number."""
    return {
        key: tuple(map(sum, zip(one[key], other[key], strict=True))) if key in one and key in other else found
        for key, found in {**one, **other}.items()
    }


def living(form: AdditiveForm, groups: GroupStates) -> GroupStates:
    """The groups that have rows; without GROUP BY the only one, rows or none."""
    if not form.keys:
        return groups or {(): (0,) * len(form.state_columns)}
    gone = [state for state in groups.values() if state[0] == 0]
    assert not any(map(any, gone)), "a group without rows has sums"
    return {key: state for key, state in groups.items() if state[0] != 0}


def group_rows(form: AdditiveForm, groups: GroupStates) -> ZSet:
    """The rows that PostgreSQL makes of groups."""
    names = [name for name, _ in form.state_columns]
    envs = {key: dict(zip(names, state, strict=True)) for key, state in groups.items()}
    return {(*key, *(evaluate(value, env) for _, value in form.values)): 1 for key, env in envs.items()}
