"""Plans as text for golden files: one line per node, with its inputs below it.

A node is printed by its fields, so that a new kind of node needs nothing here. A part that occurs several times is
printed once, with a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from textwrap import wrap
from typing import Any, get_args

from sqlglot import exp

from pgtrickle.query.plan import Column, Plan, Relation, RelationColumn, Scan
from pgtrickle.query.types import PgType

_WIDTH = 116
_NODES = get_args(Plan)
# Fields whose values speak for themselves, and fields that only refer to a column of an input.
_UNLABELLED = {"relation", "fields", "version", "kind", "items", "condition", "why", "rows"}
_REFERENCES = {"keys", "column", "origin_column"}


def plan_text(plan: Plan | None) -> str:
    """The plan as a tree; a plan that is None returns no rows."""
    if plan is None:
        return "(empty)"
    counts: Counter[str] = Counter()
    _count(plan, counts)
    return "\n".join(_lines(plan, "", counts, {}))


def expression_text(node: exp.Expression) -> str:
    return node.sql(dialect="postgres")


def type_text(type_: PgType) -> str:
    collation = f" COLLATE {type_.collation}" if type_.collation else ""
    return f"{type_.name}{collation}"


def column_text(column: Column) -> str:
    """The definition of a column: its id, its name and its type."""
    return f"{column.id} {column.name} {type_text(column.type)}"


def _children(plan: Plan) -> list[tuple[str, Plan]]:
    """The plans in the fields of a node, with labels where there are several fields."""
    found: list[tuple[str, Plan]] = []
    for item in fields(plan):
        value = getattr(plan, item.name)
        if isinstance(value, _NODES):
            found.append((f"{item.name}: ", value))
        elif _is_plans(value):
            found += [("", child) for child in value]
    return [("", child) for _, child in found] if len(found) == 1 else found


def _is_plans(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(item, _NODES) for item in value)


def _count(plan: Plan, counts: Counter[str]) -> None:
    counts[plan.identity] += 1
    if counts[plan.identity] == 1:
        for _, child in _children(plan):
            _count(child, counts)


def _lines(plan: Plan, label: str, counts: Counter[str], numbers: dict[str, int], indent: str = "") -> Iterator[str]:
    shared = counts[plan.identity] > 1 and bool(_children(plan))
    if shared and plan.identity in numbers:
        yield f"{indent}{label}#{numbers[plan.identity]}"
        return
    if shared:
        numbers[plan.identity] = len(numbers) + 1
        label += f"#{numbers[plan.identity]} "
    parts = [part for item in fields(plan) if (part := _part(plan, item.name)) is not None]
    words = " ".join(part if isinstance(part, str) else f"[{', '.join(part)}]" for part in parts)
    line = f"{indent}{label}{type(plan).__name__} {words}".rstrip()
    if len(line) <= _WIDTH:
        yield line
    else:
        words = " ".join(part for part in parts if isinstance(part, str))
        yield f"{indent}{label}{type(plan).__name__} {words}".rstrip()
        for part in parts:
            yield from () if isinstance(part, str) else _list_lines(part, f"{indent}    . ")
    for name, child in _children(plan):
        yield from _lines(child, name, counts, numbers, indent + "  ")


def _list_lines(items: list[str], indent: str) -> Iterator[str]:
    """Items on lines of their own if they compute something; the others together."""
    plain = ", ".join(item.replace(" ", "\N{NO-BREAK SPACE}") for item in items if " = " not in item)
    for line in wrap(plain, _WIDTH, initial_indent=indent, subsequent_indent=indent):
        yield line.replace("\N{NO-BREAK SPACE}", " ")
    yield from (f"{indent}{item}" for item in items if " = " in item)


def _part(plan: Plan, name: str) -> str | list[str] | None:
    """A field that is no plan, as text or as the texts of its items; None if there is nothing to print."""
    value: Any = getattr(plan, name)
    if isinstance(value, _NODES) or _is_plans(value) or value is False:
        return None
    if value is True:
        return name
    if isinstance(plan, Scan) and name == "fields":
        return [f"{column.id} {item.name}" for column, item in value]
    if isinstance(value, tuple):
        passed = {column.id for _, child in _children(plan) for column in child.columns}
        items = [item.id if isinstance(item, Column) and item.id in passed else _item(item, name) for item in value]
        return items if name in _UNLABELLED else f"{name}=[{', '.join(items)}]"
    text = _item(value, name)
    return text if name in _UNLABELLED else f"{name}={text}"


def _item(value: Any, name: str) -> str:
    match value:
        case Column():
            return value.id if name in _REFERENCES else column_text(value)
        case exp.Expression():
            return expression_text(value)
        case Relation():
            return value.label
        case Enum():
            return str(value.value)
        case (Column() as column, exp.Expression() as computed):
            return assignment_text(column, computed)
        case (Column() as column, RelationColumn()):
            return column_text(column)
        case tuple():
            return f"({', '.join(_item(item, name) for item in value)})"
        case _:
            return str(value)


def assignment_text(column: Column, value: exp.Expression) -> str:
    if not isinstance(value, exp.Column):
        return f"{column_text(column)} = {expression_text(value)}"
    return column.id if value.name == column.id else f"{column.id} {column.name} = {value.name}"
