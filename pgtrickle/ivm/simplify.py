"""The delta plan for one refresh: unchanged tables contribute nothing, and their old state is their new one."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace

from sqlglot import exp

from pgtrickle.query.plan import (
    Aggregate,
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
    Scan,
    UnionAll,
    Values,
    Version,
)


def simplify(plan: Plan, changed: Set[int]) -> Plan | None:
    """The plan, given that only the tables with these OIDs changed; None if it is empty."""
    return _Simplifier(changed).plan(plan)


@dataclass(frozen=True)
class _Simplifier:
    changed: Set[int]
    done: dict[int, Plan | None] = field(default_factory=dict)  # a node that occurs several times stays one node

    def plan(self, plan: Plan) -> Plan | None:
        if id(plan) not in self.done:
            self.done[id(plan)] = self._simplify(plan)
        return self.done[id(plan)]

    def _simplify(self, plan: Plan) -> Plan | None:
        match plan:
            case Scan(relation=relation, version=version):
                if relation.oid in self.changed or version is Version.NEW:
                    return plan
                return None if version is Version.DELTA else replace(plan, version=Version.NEW)
            case Values():
                return plan
            case Filter(condition=exp.Boolean(this=False)):
                return None
            case Filter(input=child) | Project(input=child) | Negate(input=child):
                inner = self.plan(child)
                return None if inner is None else replace(plan, input=inner)
            case KeyFilter(input=child, origin=origin):
                inner, keys = self.plan(child), self.plan(origin)
                if inner is None:
                    return None
                return KeyFilter(inner, plan.column, keys or _nothing(origin), plan.origin_column, plan.nulls)
            case InnerJoin(inputs=inputs):
                parts = [self.plan(child) for child in inputs]
                return replace(plan, inputs=tuple(filter(None, parts))) if all(parts) else None
            case Join(left=left, right=right):
                one, other = self.plan(left), self.plan(right)
                return None if one is None or other is None else replace(plan, left=one, right=other)
            case Exists(left=left, right=right):
                rows, others = self.plan(left), self.plan(right)
                return None if rows is None or others is None else replace(plan, left=rows, right=others)
            case Aggregate(input=child):
                inner = self.plan(child)
                return None if inner is None else replace(plan, input=inner)
            case UnionAll(inputs=inputs, columns=columns):
                kept = tuple(term for term in (self.plan(child) for child in inputs) if term is not None)
                return UnionAll(kept, columns) if kept else None
            case Regroup(new=new, old=old, trigger=trigger):
                touched = self.plan(trigger)
                now, before = self.plan(new), self.plan(old)
                if touched is None or now is None or before is None:
                    return None
                return Regroup(now, before, touched)
            case Flip(left=left, left_delta=left_delta, right=right, right_delta=right_delta):
                change = self.plan(right_delta)
                rows, others = self.plan(left), self.plan(right)
                if change is None or rows is None or others is None:
                    return None
                moved = self.plan(left_delta) or _nothing(left)
                return replace(plan, left=rows, left_delta=moved, right=others, right_delta=change)
            case _:
                raise AssertionError(f"{type(plan).__name__} is made after placement")


def _nothing(plan: Plan) -> Plan:
    """An empty relation with the plan's columns."""
    return Values(plan.columns, ())
