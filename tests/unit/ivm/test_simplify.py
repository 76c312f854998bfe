"""Bounds by the keys of tables that did not change."""

from __future__ import annotations

from pgtrickle.ivm.simplify import simplify
from pgtrickle.query.plan import KeyFilter, Scan, Values, Version, at_version
from tests.support.golden_schema import SCHEMA, normalise_golden


def test_no_row_has_a_key_of_a_table_that_did_not_change() -> None:
    plan = normalise_golden("SELECT o.id, o.kind FROM shop.orders o").input  # type: ignore[union-attr]
    assert isinstance(plan, Scan)
    bounded = KeyFilter(plan, plan.columns[0], at_version(plan, Version.DELTA), plan.columns[0], nulls=False)
    assert simplify(bounded, {SCHEMA[0].oid}) == bounded
    unchanged = simplify(bounded, set())
    assert isinstance(unchanged, KeyFilter)
    assert unchanged.origin == Values(plan.columns, ())
