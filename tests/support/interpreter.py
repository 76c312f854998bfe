"""The meaning of plans: a reference interpreter over Z-sets, written only to be obviously correct.

A row is a tuple of values, a Z-set a dictionary from rows to weights other than zero. Operators that only states have,
aggregates and outer joins and the right side of marks, insist on states: no weight below zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Literal

from sqlglot import exp

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
    Scan,
    UnionAll,
    Values,
    Version,
    at_version,
    used_ids,
)
from pgtrickle.refresh.fetch.key_origins import origins_of
from tests.support.evaluation import Env, Row, Value, aggregate, evaluate

ZSet = Mapping[Row, int]


def zset(pairs: Iterable[tuple[Row, int]]) -> ZSet:
    """Rows with weights, consolidated."""
    total: dict[Row, int] = defaultdict(int)
    for row, weight in pairs:
        total[row] += weight
    return {row: weight for row, weight in total.items() if weight != 0}


def plus(one: ZSet, other: ZSet) -> ZSet:
    return zset([*one.items(), *other.items()])


def minus(one: ZSet, other: ZSet) -> ZSet:
    return plus(one, negated(other))


def negated(rows: ZSet) -> ZSet:
    return {row: -weight for row, weight in rows.items()}


@dataclass(frozen=True)
class TableState:
    """A table at the cut, and its change since the frontier; a row has all columns of the relation."""

    new: ZSet
    delta: ZSet

    def at(self, version: Version) -> ZSet:
        match version:
            case Version.NEW:
                return self.new
            case Version.DELTA:
                return self.delta
            case Version.OLD:
                return minus(self.new, self.delta)


States = Mapping[int, TableState]  # by the OID of the table


@dataclass(frozen=True)
class Reading:
    """The choices that a plan leaves to the executor."""

    # What a key filter lets through: the keys of its origin, those that the fetch finds for it, or everything.
    keys: Literal["exact", "traced", "ignored"] = "exact"
    # The old rows of a flip: computed from its inputs, as on Spark, or read again, as in PostgreSQL.
    flip: Literal["subtracted", "read"] = "subtracted"


EXACT = Reading()


def interpret(plan: Plan, states: States, reading: Reading = EXACT) -> ZSet:
    """The plan's rows."""
    return _Interpreter(states, reading).rows(plan)


@dataclass
class _Interpreter:
    states: States
    reading: Reading
    # By identity, because a part of a plan can stand in many places. The plan is kept, so that its id stays its own.
    done: dict[int, tuple[Plan, ZSet]] = field(default_factory=dict)

    def rows(self, plan: Plan) -> ZSet:
        if id(plan) not in self.done:
            rows = self._rows(plan)
            assert all(len(row) == len(plan.columns) for row in rows)
            self.done[id(plan)] = plan, rows
        return self.done[id(plan)][1]

    def state(self, plan: Plan) -> ZSet:
        rows = self.rows(plan)
        assert all(weight > 0 for weight in rows.values()), f"{type(plan).__name__} is no state"
        return rows

    def _rows(self, plan: Plan) -> ZSet:
        match plan:
            case Scan(relation=relation, fields=fields, version=version):
                names = [column.name for column in relation.columns]
                places = [names.index(item.name) for _, item in fields]
                found = self.states[relation.oid].at(version)
                return zset((tuple(row[i] for i in places), weight) for row, weight in found.items())
            case Values(rows=constants):
                return zset((tuple(evaluate(value, {}) for value in row), 1) for row in constants)
            case Filter(input=child, condition=condition):
                return {row: w for row, w in self.rows(child).items() if _holds(condition, _env(child.columns, row))}
            case Project(input=child, items=items):
                found = self.rows(child)
                envs = [(_env(child.columns, row), weight) for row, weight in found.items()]
                return zset((tuple(evaluate(value, env) for _, value in items), weight) for env, weight in envs)
            case InnerJoin():
                return self._inner_join(plan)
            case Join():
                return self._join(plan)
            case Exists(left=left, condition=condition, right=right):
                others = self.state(right)
                marked = ((row, self._matches(plan, row, others) > 0, w) for row, w in self.rows(left).items())
                return zset(((*row, mark), weight) for row, mark, weight in marked)
            case Flip():
                return self._flip(plan)
            case Aggregate():
                return self._aggregate(plan)
            case Regroup():
                return self._regroup(plan)
            case UnionAll(inputs=inputs):
                return zset(pair for child in inputs for pair in self.rows(child).items())
            case Negate(input=child):
                return negated(self.rows(child))
            case Fragment(plan=child):
                return self.rows(child)
            case KeyFilter(input=child, column=column):
                keys = self._keys(plan)
                (place,) = _places(child.columns, [column])
                return {row: w for row, w in self.rows(child).items() if keys is None or row[place] in keys}

    def _inner_join(self, plan: InnerJoin) -> ZSet:
        rows: ZSet = {(): 1}
        columns: tuple[Column, ...] = ()
        rest = list(plan.conditions)
        for child in plan.inputs:
            columns += child.columns
            ids = {column.id for column in columns}
            complete = [part for part in rest if used_ids(part) <= ids]
            rest = [part for part in rest if not used_ids(part) <= ids]
            combined = (
                ((*row, *other), weight * other_weight)
                for row, weight in rows.items()
                for other, other_weight in self.rows(child).items()
            )
            rows = zset(
                (row, weight) for row, weight in combined if all(_holds(part, _env(columns, row)) for part in complete)
            )
        assert not rest
        return rows

    def _join(self, plan: Join) -> ZSet:
        # A row is padded or not, which is no matter of weights.
        left, right = self.state(plan.left), self.state(plan.right)
        pairs: list[tuple[Row, int]] = []
        met: set[Row] = set()
        met_right: set[Row] = set()
        for row, weight in left.items():
            for other, other_weight in right.items():
                if _holds(plan.condition, _env(plan.columns, (*row, *other))):
                    pairs.append(((*row, *other), weight * other_weight))
                    met.add(row)
                    met_right.add(other)
        if plan.kind in {"left", "full"}:
            nulls = tuple(repeat(None, len(plan.right.columns)))
            pairs += [((*row, *nulls), weight) for row, weight in left.items() if row not in met]
        if plan.kind in {"right", "full"}:
            nulls = tuple(repeat(None, len(plan.left.columns)))
            pairs += [((*nulls, *row), weight) for row, weight in right.items() if row not in met_right]
        return zset(pairs)

    @staticmethod
    def _matches(plan: Exists | Flip, row: Row, others: ZSet) -> int:
        """The number of right rows that match a row of the left side."""
        columns = (*plan.left.columns, *plan.right.columns)
        return sum(w for other, w in others.items() if _holds(plan.condition, _env(columns, (*row, *other))))

    def _flip(self, plan: Flip) -> ZSet:
        now = self.state(plan.right)
        if self.reading.flip == "read":
            old_left = self.rows(at_version(plan.left, Version.OLD))
            before = self.state(at_version(plan.right, Version.OLD))
        else:
            old_left = minus(self.rows(plan.left), self.rows(plan.left_delta))
            before = minus(now, self.rows(plan.right_delta))
        pairs: list[tuple[Row, int]] = []
        for row, weight in old_left.items():
            was, is_ = self._matches(plan, row, before) > 0, self._matches(plan, row, now) > 0
            pairs += [((*row, was), -weight), ((*row, is_), weight)]
        return zset(pairs)

    def _aggregate(self, plan: Aggregate) -> ZSet:
        columns = plan.input.columns
        places = _places(columns, plan.keys)
        groups: dict[Row, list[Env]] = {} if plan.keys else {(): []}
        for row, weight in self.state(plan.input).items():
            groups.setdefault(tuple(row[i] for i in places), []).extend(repeat(_env(columns, row), weight))
        return {(*key, *(aggregate(call, group) for _, call in plan.calls)): 1 for key, group in groups.items()}

    def _regroup(self, plan: Regroup) -> ZSet:
        change = minus(self.state(plan.new), self.state(plan.old))
        if self.reading.keys != "exact" or not isinstance(plan.new, Aggregate):
            return change
        # As a bound too: no other groups than those of the trigger change.
        width = len(plan.new.keys)
        places = _places(plan.trigger.columns, plan.new.keys)
        touched = {tuple(row[i] for i in places) for row in self.rows(plan.trigger)}
        return {row: weight for row, weight in change.items() if row[:width] in touched}

    def _keys(self, plan: KeyFilter) -> set[Value] | None:
        """The values that pass the filter; None for all."""
        if self.reading.keys == "ignored":
            return None
        sources = [(plan.origin, plan.origin_column)]
        if self.reading.keys == "traced":
            traced = origins_of(plan)
            if traced is None:
                return None
            sources = [(origin.plan, origin.column) for origin in traced]
        found = set()
        for source, column in sources:
            (place,) = _places(source.columns, [column])
            found |= {row[place] for row in self.rows(source)}
        return found if plan.nulls else found - {None}


def _places(columns: Sequence[Column], wanted: Iterable[Column]) -> list[int]:
    """The positions of columns by their IDs: their names may differ."""
    ids = [column.id for column in columns]
    return [ids.index(column.id) for column in wanted]


def _env(columns: Sequence[Column], row: Row) -> Env:
    return {column.id: value for column, value in zip(columns, row, strict=True)}


def _holds(condition: exp.Expression, env: Env) -> bool:
    return evaluate(condition, env) is True
