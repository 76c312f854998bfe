"""Helpers to split, combine and build conditions."""

from __future__ import annotations

from collections.abc import Iterable

from sqlglot import exp


def unwrap(node: exp.Expression) -> exp.Expression:
    """The expression without enclosing parentheses."""
    while isinstance(node, exp.Paren):
        node = node.this
    return node


def conjuncts(node: exp.Expression | None) -> list[exp.Expression]:
    """The parts of a condition that must all be true."""
    if node is None:
        return []
    node = unwrap(node)
    if isinstance(node, exp.And):
        return conjuncts(node.this) + conjuncts(node.expression)
    if isinstance(node, exp.Boolean) and node.this:
        return []
    return [node]


def conjunction(parts: Iterable[exp.Expression]) -> exp.Expression:
    """A condition that is true if all parts are; TRUE if there are none."""
    result: exp.Expression | None = None
    for part in parts:
        wrapped = exp.Paren(this=part.copy())
        result = wrapped if result is None else exp.And(this=result, expression=wrapped)
    return result if result is not None else exp.true()


def cast_to(value: exp.Expression, type_name: str) -> exp.Cast:
    """A cast to a type by its name in PostgreSQL, even if sqlglot does not know the type."""
    return exp.Cast(this=value, to=exp.DataType(this=exp.DataType.Type.USERDEFINED, kind=type_name))
