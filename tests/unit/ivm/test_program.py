"""Compilation from query text to program, without a server."""

from __future__ import annotations

import pytest

from pgtrickle.compile.placement import Placer
from pgtrickle.compile.postgres import compile_fragment
from pgtrickle.compile.spark.compiler import compile_spark, forms_of, fragment_forms
from pgtrickle.ivm.key_bounds import is_chain
from pgtrickle.ivm.simplify import simplify
from pgtrickle.query.plan import Flip, Fragment, KeyFilter, Plan, Regroup, Scan, Version, inputs_of, scans_of
from pgtrickle.query.unsupported import Unsupported
from tests.support.planning import plan_query


def nodes(plan: Plan) -> list[Plan]:
    return [plan, *(node for child in inputs_of(plan) for node in nodes(child))]


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("SELECT id, kind FROM shop.orders", ("id",)),
        ("SELECT kind FROM shop.orders", None),
        ("SELECT order_id, sku FROM shop.items", None),
        ("SELECT kind, count(*) AS n FROM shop.orders GROUP BY kind", ("kind",)),
        ("SELECT count(*) AS n FROM shop.orders", ()),
        ("SELECT DISTINCT kind, customer FROM shop.orders", ("kind", "customer")),
        ("SELECT o.id, c.tier FROM shop.orders o JOIN shop.customers c ON (c.id = o.customer)", ("id",)),
        ("SELECT o.id, c.id AS c FROM shop.orders o JOIN shop.customers c ON (c.id > o.customer)", ("id", "c")),
        ("SELECT c.id, o.id AS o FROM shop.customers c LEFT JOIN shop.orders o ON (o.customer = c.id)", ("id", "o")),
        ("SELECT id FROM shop.orders UNION ALL SELECT id FROM shop.customers", None),
    ],
)
def test_the_key_identifies_rows(query: str, key: tuple[str, ...] | None) -> None:
    assert plan_query(query).key == key


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("SELECT id FROM shop.orders LIMIT 3", "LIMIT"),
        ("SELECT id, rank() OVER (ORDER BY id) AS r FROM shop.orders", "window"),
        ("SELECT id FROM shop.orders EXCEPT SELECT id FROM shop.customers", "EXCEPT"),
        ("WITH RECURSIVE t AS (SELECT 1 AS n UNION ALL SELECT n FROM t) SELECT n FROM t", "recursive"),
        ("SELECT (SELECT count(*) FROM shop.items) AS n FROM shop.orders", "subquery"),
        ("SELECT DISTINCT ON (kind) id FROM shop.orders", "DISTINCT ON"),
        ("SELECT id FROM shop.orders FOR UPDATE", "locks"),
        ("SELECT kind, count(*) AS n FROM shop.orders GROUP BY ROLLUP (kind)", "ROLLUP"),
        ("SELECT o.id, z.n FROM shop.orders o JOIN LATERAL (SELECT o.id AS n) z ON (true)", "LATERAL"),
    ],
)
def test_unsupported_queries_name_the_reason_and_the_part(query: str, reason: str) -> None:
    with pytest.raises(Unsupported) as caught:
        plan_query(query)
    assert reason in caught.value.reason
    assert caught.value.fragment


def test_a_change_of_too_many_operators_is_not_computed() -> None:
    lost = " AND ".join(f"NOT (o.id IN (SELECT i.qty FROM shop.items i WHERE (i.order_id > {n})))" for n in range(4))
    with pytest.raises(Unsupported) as caught:
        plan_query(f"SELECT c.id, o.kind FROM shop.customers c FULL JOIN shop.orders o ON (o.id = c.id) WHERE {lost}")
    assert "operators" in caught.value.reason


def test_a_product_of_decimals_adds_up() -> None:
    program = plan_query("SELECT kind, sum(((id)::numeric * amount)) AS s FROM shop.orders GROUP BY kind")
    assert program.additive is not None
    assert program.additive.arguments[0].value.type.name == "numeric(20,2)"


def test_sums_of_decimals_add_up_and_other_aggregates_recompute_their_groups() -> None:
    added = plan_query("SELECT kind, sum(amount) AS s, avg(amount) AS a, count(*) AS n FROM shop.orders GROUP BY kind")
    assert added.additive is not None
    assert len(added.additive.arguments) == 1  # sum and avg share one
    assert added.change is not None
    assert not any(isinstance(node, Regroup) for node in nodes(added.change))
    other = plan_query("SELECT kind, max(amount) AS m FROM shop.orders GROUP BY kind")
    assert other.additive is None
    assert isinstance(other.change, Regroup)


def test_a_join_reads_inputs_before_the_change_at_the_cut_and_those_after_it_at_the_frontier() -> None:
    program = plan_query("SELECT o.id, c.tier FROM shop.orders o JOIN shop.customers c ON (c.id = o.customer)")
    assert program.change is not None
    versions = [(scan.relation.name, scan.version) for scan in scans_of(program.change)]
    assert versions == [
        ("orders", Version.DELTA),
        ("customers", Version.OLD),
        ("customers", Version.DELTA),
        ("orders", Version.NEW),
    ]
    bounded = [node for node in nodes(program.change) if isinstance(node, KeyFilter)]
    assert [node.column.name for node in bounded] == ["id", "customer"]


def test_an_outer_join_follows_rows_that_gain_or_lose_their_partner() -> None:
    program = plan_query("SELECT c.id, o.kind FROM shop.customers c LEFT JOIN shop.orders o ON (o.customer = c.id)")
    assert program.change is not None
    assert any(isinstance(node, Flip) for node in nodes(program.change))


def test_unchanged_tables_contribute_nothing() -> None:
    program = plan_query("SELECT o.id, c.tier FROM shop.orders o JOIN shop.customers c ON (c.id = o.customer)")
    assert program.change is not None
    only_orders = simplify(program.change, {1})
    assert only_orders is not None
    assert [(scan.relation.name, scan.version) for scan in scans_of(only_orders)] == [
        ("orders", Version.DELTA),
        ("customers", Version.NEW),
    ]
    assert simplify(program.change, set()) is None


def test_spark_joins_and_postgresql_reads() -> None:
    program = plan_query("SELECT o.id, c.tier FROM shop.orders o JOIN shop.customers c ON (c.id = o.customer)")
    assert program.change is not None
    placed = Placer("auto").place(program.change)
    wanted = forms_of(program.core.columns)
    fragments = fragment_forms(placed, wanted)
    for fragment, forms in fragments.items():
        text = compile_fragment(fragment.plan, tuple(sorted(forms, key=lambda pair: pair[0].id))).text
        assert " JOIN " not in text
        assert "GROUP BY" not in text
    tables: dict[Fragment, str | None] = {fragment: f"t{i}" for i, fragment in enumerate(fragments)}
    text = compile_spark(placed, wanted, tables.__getitem__) or ""
    assert text.count(" JOIN ") == 2
    assert compile_spark(placed, wanted, lambda _: None) is None  # nothing fetched, nothing to run


def test_a_condition_spark_does_not_know_stays_in_postgresql() -> None:
    program = plan_query("SELECT o.id, i.sku FROM shop.orders o JOIN shop.items i ON (i.sku LIKE o.kind)")
    assert program.change is not None
    placed = Placer("spark").place(program.change)
    fragments = [node for node in nodes(placed) if isinstance(node, Fragment)]
    assert fragments
    assert all("PostgreSQL" in fragment.why for fragment in fragments)
    assert all(not isinstance(fragment.plan, Scan) for fragment in fragments)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT o.id, c.tier FROM shop.orders o JOIN shop.customers c ON (c.id > o.customer + 3)",
        "SELECT o.id, c.tier FROM shop.orders o LEFT JOIN shop.customers c ON (c.id = o.customer AND o.kind = 'a')",
        "SELECT kind, sum(amount) FILTER (WHERE customer > 3) AS s, max(id + 1) AS m FROM shop.orders GROUP BY kind",
        "SELECT DISTINCT amount, kind FROM shop.orders",
        "SELECT c.id, count(o.kind) AS n FROM shop.customers c LEFT JOIN shop.orders o ON (o.customer = c.id) GROUP BY c.id",
    ],
)
def test_expressions_over_one_table_are_computed_where_it_is(query: str) -> None:
    program = plan_query(query)
    assert program.change is not None
    for plan in (program.change, program.additive.input if program.additive is not None else program.core):
        fragments = [node.plan for node in nodes(Placer("spark").place(plan)) if isinstance(node, Fragment)]
        assert fragments
        assert all(map(is_chain, fragments))


def test_is_not_null_keeps_its_not_on_spark() -> None:
    program = plan_query(
        "SELECT c.id FROM shop.customers c LEFT JOIN shop.orders o ON (o.customer = c.id) WHERE (o.id IS NOT NULL)"
    )
    placed = Placer("spark").place(program.plan)
    text = compile_spark(placed, forms_of(program.output), lambda _: "t") or ""
    assert "IS NOT NULL" in text
