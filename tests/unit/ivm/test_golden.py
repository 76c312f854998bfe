"""Golden cases of differentiation and of what surrounds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pgtrickle import ivm
from pgtrickle.ivm.additive import additive_form
from pgtrickle.ivm.differentiate import RULES, differentiate
from pgtrickle.ivm.fingerprint import check_fingerprint
from pgtrickle.ivm.key_bounds import Keys, restrict
from pgtrickle.ivm.outer_join import outer_as_union
from pgtrickle.ivm.program import is_recomputed
from pgtrickle.ivm.simplify import simplify
from pgtrickle.ivm.unique_key import key_of
from pgtrickle.query.plan import Aggregate, Column, Join, Plan, Scan, Version
from pgtrickle.query.unsupported import Unsupported
from tests.support.golden import GoldenCase, golden_cases
from tests.support.golden_schema import OIDS, bind_golden, nodes, normalise_golden, program_of
from tests.support.plan_text import assignment_text, column_text, plan_text, type_text
from tests.support.planning import INTEGER, table

Sections = dict[str, str]

KEYS = table(99, "keys", {"k": INTEGER})


def differentiated(case: GoldenCase) -> Sections:
    plan = normalise_golden(case.sql)
    rule = case.topic.partition("_")[0]
    assert any(type(node).__name__.lower() == rule for node in nodes(plan)), f"there is no {rule} in the plan"
    return {"plan": plan_text(plan), "change": plan_text(differentiate(plan))}


def simplified(case: GoldenCase) -> Sections:
    """The change for each of the alternatives of `changed`, which `or` separates."""
    change = differentiate(normalise_golden(case.sql))
    assert change is not None
    found = {}
    for tables in case.option("changed").split(" or "):
        changed = {OIDS[f"shop.{name}"] for name in tables.split(", ") if name != "nothing"}
        found[f"{tables} changed"] = plan_text(simplify(change, changed))
    return found


def restricted(case: GoldenCase) -> Sections:
    """The plan with the rows whose column is among changed keys. It is restricted below its topmost projection."""
    plan, _, _ = bind_golden(case.sql)
    column = next(column for column in plan.columns if column.name == case.option("column"))
    origin = Scan(KEYS, ((Column("k1", "k", INTEGER), KEYS.columns[0]),), Version.DELTA)
    after = restrict(plan, [(column, Keys(origin, origin.columns[0], nulls=case.flag("nulls")))])
    return {"before": plan_text(plan), "after": "(the same)" if after == plan else plan_text(after)}


def outer_join(case: GoldenCase) -> Sections:
    join = next(node for node in nodes(normalise_golden(case.sql)) if isinstance(node, Join))
    return {"join": plan_text(join), "union": plan_text(outer_as_union(join))}


def additive(case: GoldenCase) -> Sections:
    plan, new_column, types_of = bind_golden(case.sql)
    aggregate = next(node for node in nodes(plan) if isinstance(node, Aggregate))
    form = additive_form(aggregate, new_column, types_of)
    found = {"aggregation": plan_text(aggregate)}
    if form is None:
        return found | {"additive": "no"}
    return found | {
        "input": plan_text(form.input),
        "arguments": "\n".join(f"{column_text(one.value)}, {column_text(one.nan)}" for one in form.arguments),
        "state": "\n".join(f"{name} {type_text(type_)}" for name, type_ in [*form.key_columns, *form.state_columns]),
        "values": "\n".join(assignment_text(*value) for value in form.values),
    }


def unique_key(case: GoldenCase) -> Sections:
    plan = normalise_golden(case.sql)
    key = key_of(plan)
    if key is None:
        return {"plan": plan_text(plan), "key": "none"}
    names = sorted(f"{column.id} {column.name}" for column in plan.columns if column.id in key)
    assert len(names) == len(key)
    return {"plan": plan_text(plan), "key": ", ".join(names) or "none: at most one row"}


def fingerprint(case: GoldenCase) -> Sections:
    check_fingerprint(normalise_golden(case.sql))
    return {"rows": "found by their text"}


def program(case: GoldenCase) -> Sections:
    found = program_of(case.sql)
    steps = [plan_text(step).splitlines()[0] for step in found.finish]
    assert found.change is not None
    groups = "added up" if found.additive is not None else "recomputed" if is_recomputed(found.change) else "none"
    return {
        "core": plan_text(found.core),
        "finish": "\n".join(steps) or "nothing",
        "key": "__pgt_row_id" if found.key is None else ", ".join(found.key) or "at most one row",
        "groups": groups,
    }


# By module.
SUBJECTS: dict[str, Callable[[GoldenCase], Sections]] = {
    "additive": additive,
    "differentiate": differentiated,
    "fingerprint": fingerprint,
    "key_bounds": restricted,
    "outer_join": outer_join,
    "program": program,
    "simplify": simplified,
    "unique_key": unique_key,
}


@pytest.mark.parametrize("case", golden_cases("ivm"), ids=lambda case: case.id)
def test_golden(case: GoldenCase, update_golden: bool) -> None:
    try:
        found = SUBJECTS[case.subject](case)
    except Unsupported as error:
        found = {"refused": "\n".join(filter(None, [error.reason, error.fragment]))}
    case.check(found, update=update_golden)


def test_every_module_has_golden_cases() -> None:
    modules = {path.stem for path in Path(ivm.__path__[0]).glob("*.py")} - {"__init__"}
    assert modules == SUBJECTS.keys()
    assert {case.subject for case in golden_cases("ivm")} == modules


def test_every_differentiation_rule_has_golden_cases() -> None:
    topics = {case.topic.partition("_")[0] for case in golden_cases("ivm") if case.subject == "differentiate"}
    assert topics == {node.__name__.lower() for node in RULES}


def test_simplification_is_tested_with_every_kind_of_node_that_a_change_has() -> None:
    assert kinds_of_changes("simplify") >= kinds_of_changes("differentiate")


def kinds_of_changes(subject: str) -> set[type[Plan]]:
    """The kinds of nodes in the changes of the golden cases of a subject."""
    changes = [differentiate(normalise_golden(case.sql)) for case in golden_cases("ivm") if case.subject == subject]
    return {type(node) for change in changes if change is not None for node in nodes(change)}
