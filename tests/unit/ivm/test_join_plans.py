"""The plan of one changed table grows linearly with the number of tables that are joined, whatever the shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import get_args

import pytest

from pgtrickle.compile.placement import Placement
from pgtrickle.ivm.program import Program
from pgtrickle.ivm.simplify import simplify
from pgtrickle.query.plan import InnerJoin, KeyFilter, Plan, Version, inputs_of, scans_of
from pgtrickle.refresh.fetch.key_origins import origins_of
from pgtrickle.refresh.planning.jobs import change_job
from tests.support.planning import INTEGER, STRING, plan_query, table

MOST = 20
COLUMNS = {"id": INTEGER, "ref": INTEGER, "kind": STRING} | {f"c{i}": INTEGER for i in range(MOST)}
TABLES = [table(100 + i, f"r{i}", COLUMNS, ("id",)) for i in range(MOST)]


def chain(n: int) -> list[str]:
    return [f"(r{i}.id = r{i - 1}.ref)" for i in range(1, n)]


def star(n: int) -> list[str]:
    return [f"(r{i}.id = r0.c{i})" for i in range(1, n)]


def clique(n: int) -> list[str]:
    return [f"(r{i}.ref = r{j}.ref)" for i, j in combinations(range(n), 2)]


def clique_of_pairs(n: int) -> list[str]:
    return [f"(r{i}.c{j} = r{j}.c{i})" for i, j in combinations(range(n), 2)]


def snowflake(n: int) -> list[str]:
    """Up to four dimensions around a fact table, each with a chain of tables of its own."""
    return [f"(r{i}.id = r0.c{i})" if i <= 4 else f"(r{i}.id = r{i - 4}.ref)" for i in range(1, n)]


SHAPES: list[Callable[[int], list[str]]] = [chain, star, clique, clique_of_pairs, snowflake]


def query(n: int, conditions: Iterable[str]) -> str:
    columns = ", ".join(f"r{i}.kind AS k{i}" for i in range(n))
    return f"SELECT {columns} FROM {', '.join(f'shop.r{i} r{i}' for i in range(n))} WHERE ({' AND '.join(conditions)})"


def terms_of(program: Program) -> Iterator[Plan]:
    """The plan of the change for each table that changes alone."""
    assert program.change is not None
    for relation in {scan.relation for scan in program.scans}:
        term = simplify(program.change, {relation.oid})
        assert term is not None
        yield term


def operators(plan: Plan) -> set[Plan]:
    """All different operators of a plan, including those that keys come from."""
    found: set[Plan] = set()
    waiting = [plan]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += inputs_of(node)
            if isinstance(node, KeyFilter):
                waiting.append(node.origin)
                waiting += [origin.plan for origin in origins_of(node) or ()]
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("placement", get_args(Placement))
def test_a_term_grows_linearly(shape: Callable[[int], list[str]], placement: Placement) -> None:
    for n in (2, 3, 4, 7, 11, MOST):
        program = plan_query(query(n, shape(n)), TABLES)
        for term in terms_of(program):
            assert len(operators(term)) <= 6 * n
            job = change_job(program, term, placement)
            assert job.plan.operators <= n + 3
            assert len(job.fragments) == n


@pytest.mark.parametrize("shape", SHAPES)
def test_each_table_is_looked_up_by_keys_of_its_neighbours(shape: Callable[[int], list[str]]) -> None:
    for term in terms_of(plan_query(query(MOST, shape(MOST)), TABLES)):
        (join,) = (node for node in operators(term) if isinstance(node, InnerJoin))
        change, *lookups = join.inputs
        assert [scan.version for scan in scans_of(change)] == [Version.DELTA]
        before = {change}
        for lookup in lookups:
            assert isinstance(lookup, KeyFilter)
            assert keys_of(lookup) <= before
            before.add(lookup)


def keys_of(plan: Plan) -> set[Plan]:
    """Where the keys of a lookup come from."""
    return {plan.origin} | keys_of(plan.input) if isinstance(plan, KeyFilter) else set()
