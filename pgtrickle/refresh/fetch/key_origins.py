"""Tracing the keys of a lookup to the fetched rows that hold their values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sqlglot import exp

from pgtrickle.ivm.key_bounds import is_chain
from pgtrickle.query.constants import constant
from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Exists,
    Filter,
    Flip,
    InnerJoin,
    Join,
    KeyFilter,
    Negate,
    Plan,
    Project,
    Regroup,
    UnionAll,
    Values,
    Version,
    scanning,
    scans_of,
)


@dataclass(frozen=True)
class Origin:
    """A plan over one table, and the column of it that holds values of a key."""

    plan: Plan
    column: Column


def origins_of(key: KeyFilter) -> list[Origin] | None:
    """All origins of a key's values; None if the values are computed, so that the whole table must be read."""
    return _trace(key.origin, key.origin_column)


@lru_cache(maxsize=8192)
def _trace(plan: Plan, column: Column) -> list[Origin] | None:
    if is_chain(plan):
        if scans_of(plan)[0].version is not Version.OLD:
            return [Origin(plan, column)]
        return [Origin(scanning(plan, version), column) for version in (Version.NEW, Version.DELTA)]
    match plan:
        case Values(rows=()):
            return []
        case Filter(input=child) | KeyFilter(input=child) | Negate(input=child):
            return _trace(child, column)
        case Project(input=child, items=items):
            value = next(value for item, value in items if item.id == column.id)
            if isinstance(value, exp.Column):
                return _trace(child, next(item for item in child.columns if item.id == value.name))
            # A constant, such as the NULL on the padded side of an outer join, is the only value.
            return [Origin(Values((column,), ((value,),)), column)] if constant(value) is not None else None
        case InnerJoin(inputs=inputs):
            return _trace(next(child for child in inputs if column in child.columns), column)
        case Join(left=left, right=right):
            side = left if column.id in {item.id for item in left.columns} else right
            return _trace(side, column)
        case Exists(left=left):
            return _trace(left, column)
        case Flip(left=left, left_delta=left_delta):
            return _both(_trace(left, column), _at(left_delta, left, column))
        case Regroup(new=new, old=old):
            return _both(_trace(new, column), _trace(old, column))
        case Aggregate(input=child, keys=keys):
            return _trace(child, column) if column.id in {key.id for key in keys} else None
        case UnionAll(inputs=inputs, columns=columns):
            found: list[Origin] | None = []
            for child in inputs:
                found = _both(found, _at(child, plan, column))
            return found if columns else None
        case _:
            return None


def _at(plan: Plan, model: Plan, column: Column) -> list[Origin] | None:
    """Trace the column of the plan at the position that `column` has in the model."""
    position = [item.id for item in model.columns].index(column.id)
    return _trace(plan, plan.columns[position])


def _both(one: list[Origin] | None, other: list[Origin] | None) -> list[Origin] | None:
    return None if one is None or other is None else one + [origin for origin in other if origin not in one]
