"""Helpers for the columns of plans: list them, keep some of them, replace them by expressions."""

from __future__ import annotations

from collections.abc import Mapping

from sqlglot import exp

from pgtrickle.query.plan import (
    Column,
    Plan,
    Project,
)


def substitute(node: exp.Expression, items: Mapping[str, exp.Expression]) -> exp.Expression:
    """The expression with columns replaced by the expressions that compute them."""

    def swap(item: exp.Expression) -> exp.Expression:
        if isinstance(item, exp.Column) and item.name in items:
            value = items[item.name].copy()
            return value if isinstance(value, exp.Column | exp.Literal | exp.Paren) else exp.Paren(this=value)
        return item

    return node.copy().transform(swap, copy=False)


def column_ids(plan: Plan) -> set[str]:
    return {column.id for column in plan.columns}


def keep_columns(plan: Plan, columns: tuple[Column, ...]) -> Plan:
    return Project(plan, tuple((column, column.ref()) for column in columns))
