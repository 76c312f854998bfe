"""Outer joins as inner joins plus padded rows: rows without a partner, padded with NULLs."""

from __future__ import annotations

from sqlglot import exp

from pgtrickle.query.conditions import cast_to, conjuncts
from pgtrickle.query.plan import Column, Exists, Filter, InnerJoin, Join, Plan, Project, UnionAll
from pgtrickle.query.subqueries import BOOLEAN


def partner_mark(rows: Plan, others: Plan, condition: exp.Expression) -> Exists:
    """The rows of one side, marked by whether they match a row of the other side."""
    first = (rows.columns or others.columns)[0].id if rows.columns or others.columns else "0"
    return Exists(rows, others, condition, Column(f"m{first}", "partner", BOOLEAN))


def padded(marked: Plan, rows: Plan, mark: Column, columns: tuple[Column, ...]) -> Plan:
    """The marked rows without a partner, padded to the columns of the join."""
    own = {column.id for column in rows.columns}
    items = tuple(
        (column, column.ref() if column.id in own else cast_to(exp.null(), column.type.name)) for column in columns
    )
    return Project(Filter(marked, exp.Not(this=mark.ref())), items)


def outer_as_union(join: Join) -> UnionAll:
    """The rows of an outer join, computed by operators that Spark can run with weights."""
    terms: list[Plan] = [InnerJoin((join.left, join.right), tuple(conjuncts(join.condition)))]
    if join.kind in {"left", "full"}:
        marked = partner_mark(join.left, join.right, join.condition)
        terms.append(padded(marked, join.left, marked.mark, join.columns))
    if join.kind in {"right", "full"}:
        marked = partner_mark(join.right, join.left, join.condition)
        terms.append(padded(marked, join.right, marked.mark, join.columns))
    return UnionAll(tuple(terms), join.columns)
