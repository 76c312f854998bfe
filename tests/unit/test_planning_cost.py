"""Planning has a budget, so it ends for any query."""

from __future__ import annotations

import pytest

from pgtrickle.ivm.simplify import simplify
from pgtrickle.query.budget import Budget, OverBudget, planning_within
from pgtrickle.query.plan import UnionAll
from pgtrickle.query.unsupported import Unsupported
from pgtrickle.refresh.planning.jobs import Job, change_job, check_cost, check_job
from tests.support.planning import INTEGER, STRING, plan_query, table

TABLES = [table(100 + i, f"r{i}", {"id": INTEGER, "ref": INTEGER, "kind": STRING}, ("id",)) for i in range(21)]


def chain(kind: str, joins: int) -> str:
    tables = "shop.r0 r0" + "".join(
        f" {kind} JOIN shop.r{i} r{i} ON (r{i}.id = r{i - 1}.ref)" for i in range(1, joins + 1)
    )
    return f"SELECT {', '.join(f'r{i}.kind AS k{i}' for i in range(joins + 1))} FROM {tables}"


def recomputed(tables: int) -> str:
    """Groups by three of the joined tables, with an aggregate that does not add up."""
    joined = "shop.r0 r0" + "".join(f" JOIN shop.r{i} r{i} ON (r{i}.ref = r0.id)" for i in range(1, tables))
    keys = "r0.kind, r1.kind, r2.kind"
    return (
        f"SELECT r0.kind AS a, r1.kind AS b, r2.kind AS c, max(r{tables - 1}.kind) AS m FROM {joined} GROUP BY {keys}"
    )


@pytest.mark.parametrize(("kind", "joins"), [("LEFT", 16), ("FULL", 12), ("RIGHT", 16)])
def test_joins_that_multiply_are_refused_while_they_are_planned(kind: str, joins: int) -> None:
    budget = Budget(operators=20_000)
    with planning_within(budget), pytest.raises(Unsupported, match="its change takes more than 600 operators"):
        plan_query(chain(kind, joins), TABLES)
    assert budget.made < 10_000


def test_a_change_of_too_many_joined_tables_is_refused() -> None:
    program = plan_query(chain("INNER", 20), TABLES)
    with pytest.raises(OverBudget, match="Spark would have to plan more than 1000 operators"):
        check_cost(program, "auto")


@pytest.mark.parametrize("placement", ["auto", "spark"])
@pytest.mark.parametrize("text", [recomputed(6), recomputed(10), chain("INNER", 18), chain("LEFT", 3)])
def test_every_choice_of_changed_tables_is_planned_within_the_budget(text: str, placement: str) -> None:
    budget = Budget(operators=20_000)
    with planning_within(budget):
        program = plan_query(text, TABLES)
        assert program.change is not None
        check_cost(program, "spark" if placement == "spark" else "auto")
        for changed in ({100}, {105}, {table.oid for table in TABLES}):
            change = simplify(program.change, changed)
            if change is not None:
                check_job(change_job(program, change, "spark" if placement == "spark" else "auto"))


def test_shared_parts_of_a_plan_stay_shared() -> None:
    program = plan_query(recomputed(6), TABLES)
    assert program.change is not None
    budget = Budget()
    with planning_within(budget):
        assert simplify(program.change, {table.oid for table in TABLES}) is not None
    assert budget.made < 1000


def test_exceeding_a_limit_ends_planning_with_the_reason() -> None:
    with planning_within(Budget(operators=50)), pytest.raises(OverBudget, match="more than 50 operators"):
        plan_query(recomputed(6), TABLES)
    with planning_within(Budget(seconds=0)), pytest.raises(OverBudget, match="more than 0 seconds"):
        plan_query(recomputed(6), TABLES)
    program = plan_query(chain("INNER", 5), TABLES)
    with planning_within(Budget(characters=1000)), pytest.raises(OverBudget, match="more than 1000 characters"):
        check_cost(program, "auto")
    plan_query(recomputed(6), TABLES)  # nothing is counted outside


def test_a_query_that_is_nested_too_deeply_is_over_budget() -> None:
    def nested(depth: int) -> None:
        nested(depth + 1)

    with pytest.raises(OverBudget, match="nested too deeply"), planning_within(Budget()):
        nested(0)


def test_spark_gets_no_giant_plan() -> None:
    program = plan_query(chain("INNER", 3), TABLES)
    assert program.change is not None
    job = change_job(program, program.change, "auto")
    plan = UnionAll((job.plan,) * 100, job.plan.columns)
    with pytest.raises(OverBudget, match="Spark would have to plan more than 1000 operators"):
        check_job(Job(plan, job.forms, job.columns, job.shape))
