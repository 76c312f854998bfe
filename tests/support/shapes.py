"""Classify corpus queries as inner joins or sums over them, by their text and independently of pgtrickle's planner."""

from __future__ import annotations

from typing import Literal

from sqlglot import exp

from pgtrickle.query.dialect import parse

_TABLES = frozenset({"customers", "orders", "items", "regions", "products", "events"})
# Integers and numeric(p,s). Not in it: factor and reading are numeric without precision, weight and ratio are floats.
_EXACT = frozenset({"id", "customer_id", "order_id", "manager_id", "slot", "qty", "amount", "price", "credit", "tax"})


def shape_of(text: str) -> Literal["join", "sum", "join and sum"] | None:
    """The shape of a query, or None for any other.

    `join` is inner joins of tables. `sum` is count, sum and avg of exact numbers over one table, `join and sum` over
    inner joins.
    """
    tree = parse(text)
    if not isinstance(tree, exp.Select) or not _is_plain(tree):
        return None
    joined = tree.find(exp.Join) is not None
    calls = list(tree.find_all(exp.AggFunc))
    if not calls:
        return "join" if joined and tree.find(exp.Group) is None else None
    if any(call.find_ancestor(exp.Select) is not tree or not _adds_up(call) for call in calls):
        return None
    return "join and sum" if joined else "sum"


def _is_plain(tree: exp.Expression) -> bool:
    """Whether the query has only tables, filters, expressions and inner joins, and grouping only at the top."""
    if tree.find(exp.SetOperation, exp.Distinct, exp.Exists, exp.With, exp.Values, exp.Any, exp.All, exp.Lateral):
        return False
    if any(node.args.get("query") for node in tree.find_all(exp.In)):
        return False
    if any(join.side for join in tree.find_all(exp.Join)):
        return False
    if any(group.parent is not tree for group in tree.find_all(exp.Group)):
        return False
    return all(table.name in _TABLES for table in tree.find_all(exp.Table))


def _adds_up(call: exp.AggFunc) -> bool:
    if isinstance(call, exp.Count):
        return True
    return isinstance(call, exp.Sum | exp.Avg) and all(column.name in _EXACT for column in call.find_all(exp.Column))
