"""Where each part of a delta plan runs: PostgreSQL reads and evaluates, Spark joins and adds up the changes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from sqlglot import exp

from pgtrickle.compile.pushdown import push_down
from pgtrickle.compile.spark.aggregates import forms_needed
from pgtrickle.compile.spark.arithmetic import number_sql
from pgtrickle.compile.spark.expressions import NotOnSpark, SparkExpressions
from pgtrickle.ivm.key_bounds import is_chain
from pgtrickle.ivm.outer_join import outer_as_union
from pgtrickle.query.conditions import conjunction
from pgtrickle.query.constants import constant
from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Exists,
    Filter,
    Flip,
    Fragment,
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
    databases_of,
    equalities,
    scanning,
    scans_of,
    used_ids,
    walk,
)
from pgtrickle.query.rewrites.columns import keep_columns

Placement = Literal["auto", "spark"]


class AcrossDatabases(Exception):
    """No single database can compute a part of a plan, and Spark cannot compute it as PostgreSQL would."""


@dataclass(frozen=True)
class Placer:
    """Splits a plan into fragments for one placement."""

    placement: Placement
    # A node that occurs several times stays one node. The original is kept, so that its id stays its own.
    _done: dict[int, tuple[Plan, Plan]] = field(default_factory=dict, compare=False, repr=False)

    def place(self, plan: Plan) -> Plan:
        """The plan with its PostgreSQL parts wrapped as fragments; everything above them runs on Spark."""
        if id(plan) not in self._done:
            self._done[id(plan)] = plan, self._place(plan)
        return self._done[id(plan)][1]

    def _place(self, plan: Plan) -> Plan:
        if is_chain(plan) or isinstance(plan, Values):
            return self._read(plan)
        try:
            return self._on_spark(plan)
        except NotOnSpark as reason:
            if not _in_one_database(plan):
                raise AcrossDatabases(str(reason)) from reason
            return Fragment(plan, str(reason))

    def _read(self, plan: Plan) -> Plan:
        scans = scans_of(plan)
        if not scans or scans[0].version is not Version.OLD:
            return Fragment(plan, "filters and expressions are evaluated where the rows are")
        new, change = scanning(plan, Version.NEW), scanning(plan, Version.DELTA)
        return UnionAll((self._read(new), Negate(self._read(change))), plan.columns)

    def _on_spark(self, plan: Plan) -> Plan:
        match plan:
            case Filter(input=child, condition=condition):
                self._check(child, condition)
                return Filter(self.place(child), condition)
            case KeyFilter(input=child):
                return self.place(child)
            case Project(input=child, items=items):
                foreign = [value for _, value in items if not isinstance(value, exp.Column) and constant(value) is None]
                if foreign:
                    sunk = push_down(plan) if self.placement == "spark" or not _has_outer_join(child) else None
                    if sunk is None:
                        return self._calculate(plan, foreign[0])
                    return self.place(sunk)
                return Project(self.place(child), items)
            case UnionAll(inputs=inputs, columns=columns):
                return UnionAll(tuple(self.place(child) for child in inputs), columns)
            case InnerJoin():
                return self._inner_join(plan)
            case Join(left=left, right=right, condition=condition):
                self._check(plan, condition)
                if self.placement == "auto":
                    raise NotOnSpark("the state of an outer join is read where it is")
                return self._on_spark(outer_as_union(plan))
            case Exists(left=left, right=right, condition=condition):
                self._check(replace(plan, left=left), condition, plan.left, plan.right)
                return replace(plan, left=self.place(left), right=self.place(right))
            case Flip(left=left, right=right, condition=condition):
                self._check(plan, condition, left, right)
                return replace(
                    plan,
                    left=self.place(left),
                    left_delta=self.place(plan.left_delta),
                    right=self.place(right),
                    right_delta=self.place(plan.right_delta),
                )
            case Regroup(new=new, old=old, trigger=trigger):
                if self.placement == "auto":
                    raise NotOnSpark("affected groups are recomputed where the rows are")
                return Regroup(self._on_spark(new), self._on_spark(old), trigger)
            case Aggregate(input=child):
                if self.placement == "auto":
                    raise NotOnSpark("groups of a state are computed where the rows are")
                forms_needed(plan)
                return replace(plan, input=self.place(child))
            case Negate(input=child):
                return Negate(self.place(child))
            case _:
                raise AssertionError(f"{type(plan).__name__} has no place")

    def _inner_join(self, plan: InnerJoin) -> Plan:
        """The join on Spark, except for inputs that a condition connects which only PostgreSQL can test."""
        home = {column.id: i for i, child in enumerate(plan.inputs) for column in child.columns}
        groups: list[set[int]] = []
        for part in plan.conditions:
            try:
                self._check(plan, part)
            except NotOnSpark:
                group = {home[id_] for id_ in used_ids(part)} or {0}
                meeting = [other for other in groups if other & group]
                group = group.union(*meeting)
                groups = [*(other for other in groups if other not in meeting), group]
                if len(group) == len(plan.inputs) or (_in_one_database(plan) and not _is_linked(plan, group)):
                    raise
        rest = list(plan.conditions)
        inputs = dict(enumerate(plan.inputs))
        for group in groups:
            first, *others = sorted(group)
            inside = [part for part in rest if {home[id_] for id_ in used_ids(part)} <= group]
            rest = [part for part in rest if part not in inside]
            if others:
                inputs[first] = InnerJoin((inputs[first], *(inputs.pop(i) for i in others)), tuple(inside))
            else:
                inputs[first] = Filter(inputs[first], conjunction(inside))
        joined = InnerJoin(tuple(map(self.place, inputs.values())), tuple(rest))
        return joined if joined.columns == plan.columns else keep_columns(joined, plan.columns)

    def _calculate(self, plan: Project, example: exp.Expression) -> Plan:
        """Add and multiply numbers from several databases on Spark; expressions over one source are computed there."""
        if _in_one_database(plan):  # PostgreSQL can compute it, and rejects overflows
            raise NotOnSpark(f"{example.sql(dialect='postgres')} reads several sources")
        columns = {column.id: column for column in plan.input.columns}
        below: dict[str, tuple[Column, exp.Expression]] = {}
        items = []
        for column, value in plan.items:
            if isinstance(value, exp.Column) or constant(value) is not None:
                items.append((column, value))
            elif push_down(Project(plan.input, ((column, value),))) is not None:
                below[column.id] = (column, value)
                items.append((column, column.ref()))
                continue
            else:
                number_sql(value, column.type, "native", SparkExpressions(columns))
                items.append((column, value))
            below |= {name: (columns[name], columns[name].ref()) for name in sorted(used_ids(value))}
        return Project(self.place(Project(plan.input, tuple(below.values()))), tuple(items))

    @staticmethod
    def _check(plan: Plan, condition: exp.Expression, *sides: Plan) -> None:
        columns = [column for side in (sides or (plan,)) for column in side.columns]
        SparkExpressions({column.id: column for column in columns}).condition(condition)


def _in_one_database(plan: Plan) -> bool:
    """Whether one server reads all tables of the plan."""
    return len(databases_of(plan)) < 2 and not any(scan.relation.shard for scan in scans_of(plan))


def _is_linked(plan: InnerJoin, group: set[int]) -> bool:
    """Whether equalities of columns link these inputs, so that joining them alone does not multiply their rows."""
    pairs = [pair.sides for pair in equalities(plan.inputs, plan.conditions) if set(pair.sides) <= group]
    reached = {min(group)}
    while more := {i for sides in pairs if reached & set(sides) for i in sides} - reached:
        reached |= more
    return reached == group


def _has_outer_join(plan: Plan) -> bool:
    """Whether the plan reads the state of an outer join, which `auto` leaves to PostgreSQL."""
    return any(isinstance(node, Join) for node in walk(plan))
