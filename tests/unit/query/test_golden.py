"""Golden cases of the binder and of the rewrites."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pgtrickle.query import rewrites
from pgtrickle.query.plan import NewColumn, Plan, TypesOf
from pgtrickle.query.rewrites.aggregate_arguments import compute_arguments
from pgtrickle.query.rewrites.compute_operands import compute_operands
from pgtrickle.query.rewrites.flatten_joins import flatten_joins
from pgtrickle.query.rewrites.imply_filters import imply_filters
from pgtrickle.query.rewrites.normalise import normalise
from pgtrickle.query.rewrites.prune import prune
from pgtrickle.query.rewrites.push_filters import push_filters
from pgtrickle.query.rewrites.push_projections import push_projections
from pgtrickle.query.unsupported import Unsupported
from tests.support.golden import GoldenCase, golden_cases
from tests.support.golden_schema import bind_golden
from tests.support.plan_text import plan_text

# By module. Each takes the plan and what a rewrite needs.
REWRITES: dict[str, Callable[[Plan, NewColumn, TypesOf], Plan]] = {
    "aggregate_arguments": compute_arguments,
    "compute_operands": compute_operands,
    "flatten_joins": lambda plan, *_: flatten_joins(plan),
    "imply_filters": lambda plan, *_: imply_filters(plan),
    "normalise": normalise,
    "prune": lambda plan, *_: prune(plan, {column.id for column in plan.columns}),
    "push_filters": lambda plan, *_: push_filters(plan, []),
    "push_projections": lambda plan, *_: push_projections(plan),
}
BOUND = {"binder", "subqueries"}
HELPERS = {"__init__", "columns"}


@pytest.mark.parametrize("case", golden_cases("query"), ids=lambda case: case.id)
def test_golden(case: GoldenCase, update_golden: bool) -> None:
    case.check(sections(case), update=update_golden)


def sections(case: GoldenCase) -> dict[str, str]:
    try:
        plan, new_column, types_of = bind_golden(case.sql)
        if case.subject in BOUND:
            return {"plan": plan_text(plan)}
        rewritten = REWRITES[case.subject](plan, new_column, types_of)
    except Unsupported as error:
        return {"refused": "\n".join(filter(None, [error.reason, error.fragment]))}
    return {"before": plan_text(plan), "after": "(the same)" if rewritten == plan else plan_text(rewritten)}


def test_every_rewrite_has_golden_cases() -> None:
    modules = {path.stem for path in Path(rewrites.__path__[0]).glob("*.py")} - HELPERS
    assert modules == REWRITES.keys()
    assert {case.subject for case in golden_cases("query")} == modules | BOUND


@pytest.mark.parametrize("rewrite", sorted(REWRITES))
def test_every_rewrite_has_a_case_that_it_changes(rewrite: str) -> None:
    found = [case.expected.get("after") for case in golden_cases("query") if case.subject == rewrite]
    assert any(after not in {None, "(the same)"} for after in found)
