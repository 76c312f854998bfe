"""Inner joins of many tables are one node, and the plan of its change grows linearly with the number of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import get_args

import pytest

from pgtrickle.compile.placement import Placement, Placer
from pgtrickle.ivm.program import Program
from pgtrickle.ivm.simplify import simplify
from pgtrickle.query.plan import Filter, Fragment, InnerJoin, Join, KeyFilter, Plan, Version, inputs_of, scans_of, walk
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


SHOP = [
    table(1, "orders", {"id": INTEGER, "customer": INTEGER, "kind": STRING}, ("id",)),
    table(2, "customers", {"id": INTEGER, "nation": INTEGER, "tier": STRING}, ("id",)),
    table(3, "items", {"order_id": INTEGER, "line": INTEGER, "supplier": INTEGER, "sku": STRING}, ("order_id", "line")),
    table(4, "suppliers", {"id": INTEGER, "nation": INTEGER}, ("id",)),
]


def joins_of(plan: Plan) -> list[InnerJoin]:
    return [node for node in walk(plan) if isinstance(node, InnerJoin)]


def join_on_spark(placed: Plan) -> InnerJoin:
    (join,) = (join for join in joins_of(placed) if all(isinstance(child, Fragment) for child in join.inputs))
    return join


def tables_of(plan: Plan) -> list[str]:
    return [scan.relation.name for scan in scans_of(plan)]


@pytest.mark.parametrize(
    "text",
    [
        "SELECT o.id, i.sku, c.tier FROM shop.orders o, shop.items i, shop.customers c"
        " WHERE ((i.order_id = o.id) AND (c.id = o.customer))",
        "SELECT o.id, i.sku, c.tier FROM shop.orders o JOIN (shop.items i JOIN shop.customers c ON (c.id > i.line))"
        " ON ((i.order_id = o.id) AND (c.id = o.customer))",
        "SELECT x.number AS id, i.sku, x.tier FROM (SELECT o.id AS number, c.tier FROM shop.orders o"
        " JOIN shop.customers c ON (c.id = o.customer)) x JOIN shop.items i ON ((i.order_id = x.number) AND (i.sku < x.tier))",
        "SELECT o.id, i.sku, c.tier FROM shop.orders o JOIN shop.items i ON (i.order_id = (o.id + 1))"
        " JOIN shop.customers c ON ((c.id + 1) = (o.customer + 2))",
    ],
)
def test_inner_joins_are_one_node(text: str) -> None:
    (join,) = joins_of(plan_query(text, SHOP).plan)
    assert len(join.inputs) == 3
    assert all(child.is_chain for child in join.inputs)


def test_what_is_computed_from_several_tables_and_outer_joins_stay_between() -> None:
    computed = plan_query(
        "SELECT o.id FROM shop.orders o JOIN shop.items i ON (i.order_id = o.id)"
        " JOIN shop.customers c ON (c.id = (o.customer + i.line))",
        SHOP,
    )
    assert [len(join.inputs) for join in joins_of(computed.plan)] == [2, 2]
    outer = plan_query(
        "SELECT o.id FROM shop.orders o LEFT JOIN shop.items i ON (i.order_id = o.id)"
        " JOIN shop.customers c ON (c.id = o.customer)",
        SHOP,
    )
    (join,) = joins_of(outer.plan)
    assert isinstance(join.inputs[0], Join)


def test_whole_keys_and_beginnings_of_keys_are_looked_up_first() -> None:
    """Suppliers are many for the nation of a customer, and one for each item of an order."""
    program = plan_query(
        "SELECT o.id FROM shop.suppliers s, shop.customers c, shop.items i, shop.orders o WHERE ((s.nation = c.nation)"
        " AND (s.id = i.supplier) AND (i.order_id = o.id) AND (c.id = o.customer))",
        SHOP,
    )
    assert program.change is not None
    term = simplify(program.change, {1})
    assert term is not None
    assert tables_of(term) == ["orders", "customers", "items", "suppliers"]


LIKE = (
    "SELECT o.id, c.tier FROM shop.orders o, shop.items i, shop.customers c"
    " WHERE ((i.sku LIKE o.kind) AND (c.id = o.customer){})"
)


def test_a_condition_that_spark_does_not_know_concerns_the_tables_it_reads() -> None:
    program = plan_query(LIKE.format(" AND (i.order_id = o.id)"), SHOP)
    join = join_on_spark(Placer("spark").place(program.plan))
    assert [tables_of(child) for child in join.inputs] == [["orders", "items"], ["customers"]]


def test_tables_that_nothing_else_links_are_not_multiplied_for_such_a_condition() -> None:
    text = LIKE.replace("i.sku LIKE o.kind", "i.sku LIKE c.tier").format(" AND (i.order_id = o.id)")
    placed = Placer("spark").place(plan_query(text, SHOP).plan)
    fragments = [node for node in walk(placed) if isinstance(node, Fragment)]
    assert [tables_of(fragment) for fragment in fragments] == [["orders", "items", "customers"]]
    elsewhere = [replace(relation, database="crm") if relation.name == "orders" else relation for relation in SHOP]
    join = join_on_spark(Placer("spark").place(plan_query(text, elsewhere).plan))
    assert [tables_of(child) for child in join.inputs] == [["orders"], ["items", "customers"]]


def test_alternatives_over_two_tables_imply_a_filter_of_each() -> None:
    program = plan_query(
        "SELECT o.id FROM shop.orders o, shop.customers c, shop.suppliers s WHERE ((c.id = o.customer)"
        " AND (s.id = o.id) AND (((c.nation = 1) AND (s.nation = 2)) OR ((c.nation = 3) AND (s.nation = 4) AND (o.id > 5))))",
        SHOP,
    )
    (join,) = joins_of(program.plan)
    filtered = {
        tables_of(child)[0]: node.condition.sql()
        for child in join.inputs
        for node in walk(child)
        if isinstance(node, Filter)
    }
    assert filtered.keys() == {"customers", "suppliers"}
    assert [literal in filtered["customers"] for literal in "1234"] == [True, False, True, False]
    assert [literal in filtered["suppliers"] for literal in "1234"] == [False, True, False, True]
