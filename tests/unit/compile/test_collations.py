"""Comparisons between collations in PostgreSQL's SQL, without a server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgtrickle.compile.postgres import compile_fragment
from pgtrickle.query.plan import Exists, Flip, Plan, inputs_of
from tests.support.planning import STRING, plan_query, table

NOCASE = replace(STRING, collation="shop.nocase", deterministic=False)
OTHER = replace(STRING, collation='"C"')
TABLES = [table(1, "names", {"plain": STRING, "nocase": NOCASE, "c": OTHER}), table(2, "words", {"w": STRING})]


EXISTS = "SELECT w FROM shop.words WHERE EXISTS (SELECT 1 FROM shop.names WHERE ({}))"


@pytest.mark.parametrize("comparison", ["w = nocase", "nocase = w"])
def test_a_semi_join_names_a_nondeterministic_collation_on_the_other_side(comparison: str) -> None:
    marked = node_of(Exists, plan_query(EXISTS.format(comparison), TABLES).plan)
    assert compile_fragment(marked, ()).text.count(" COLLATE shop.nocase") == 1


def test_the_change_of_a_semi_join_names_a_nondeterministic_collation() -> None:
    flip = node_of(Flip, plan_query(EXISTS.format("w = nocase"), TABLES).change)
    # The mark now, the mark before, and which rows are affected.
    assert compile_fragment(flip, ()).text.count(" COLLATE shop.nocase") == 3


@pytest.mark.parametrize("comparison", ["w = plain", "w = c"])
def test_deterministic_collations_are_not_named(comparison: str) -> None:
    marked = node_of(Exists, plan_query(EXISTS.format(comparison), TABLES).plan)
    assert "COLLATE" not in compile_fragment(marked, ()).text


def node_of(kind: type[Plan], plan: Plan | None) -> Plan:
    """The first node of that kind in the plan."""
    assert plan is not None
    found = _find(kind, plan)
    assert found is not None, f"there is no {kind.__name__}"
    return found


def _find(kind: type[Plan], plan: Plan) -> Plan | None:
    if isinstance(plan, kind):
        return plan
    return next((found for child in inputs_of(plan) if (found := _find(kind, child)) is not None), None)
