"""The relational plan: immutable nodes over uniquely named columns.

A column has one id (`c12`) in the whole plan, so expressions never need a table alias and a node can be moved without
renaming. Every node stands for a Z-set: rows with a weight. A scan reads its table at the cut (NEW), at the stream
table's frontier (OLD), or the change between the two (DELTA); `pgtrickle.ivm` turns a plan of NEW scans into the plan
of its change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from typing import Literal, TypeAlias

from sqlglot import exp

from pgtrickle.query.budget import count_operator, count_step
from pgtrickle.query.conditions import conjuncts
from pgtrickle.query.types import PgType


class _Node:
    """Base of all nodes, which are compared by a digest.

    Plans share parts, and a part can occur in many places, so the digest is computed only once.
    """

    @cached_property
    def identity(self) -> str:
        parts = [type(self).__name__, *(_identity(getattr(self, item.name)) for item in fields(self))]  # type: ignore[arg-type]
        return blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Node) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


class _Operator(_Node):
    """A node of a plan; creating one counts against the planning budget."""

    def __post_init__(self) -> None:
        count_operator()

    @cached_property
    def operators(self) -> int:
        """The number of operators; a shared one counts once per occurrence."""
        inputs = inputs_of(self)  # type: ignore[arg-type]
        # Of the members of a set, count only the largest: a refresh computes only the members that changed.
        members = isinstance(self, UnionAll) and all(map(_reads_member, inputs))
        # An inner join of many tables reads each of them by one statement.
        joined = isinstance(self, InnerJoin)
        return 1 + (max if members else sum)(1 if joined and child.is_chain else child.operators for child in inputs)

    @cached_property
    def reads_changes(self) -> bool:
        return any(child.reads_changes for child in inputs_of(self))  # type: ignore[arg-type]

    @cached_property
    def databases(self) -> frozenset[str]:
        """The databases whose tables the plan reads."""
        return frozenset().union(*(child.databases for child in inputs_of(self)))  # type: ignore[arg-type]

    @cached_property
    def is_chain(self) -> bool:
        """Whether the plan is filters and projections over one table, which PostgreSQL evaluates while it reads."""
        return isinstance(self, Filter | Project | KeyFilter) and self.input.is_chain


def _identity(value: object) -> str:
    if isinstance(value, _Node):
        return value.identity
    if isinstance(value, tuple):
        return "(" + ",".join(_identity(item) for item in value) + ")"
    if isinstance(value, exp.Expression):
        return value.sql(dialect="postgres")
    return repr(value)


class Version(Enum):
    """Which version of a table a scan reads."""

    NEW = "new"
    OLD = "old"
    DELTA = "delta"


@dataclass(frozen=True)
class Column:
    """One column of a plan: its unique id, the name that the user gave it, and its type."""

    id: str
    name: str
    type: PgType

    def ref(self) -> exp.Column:
        return exp.column(self.id)


@dataclass(frozen=True)
class RelationColumn:
    name: str
    attnum: int
    type: PgType
    not_null: bool = False
    generated: str | None = None  # the expression of a virtual generated column


@dataclass(frozen=True, eq=False)
class Relation(_Node):
    """A table or view as PostgreSQL's catalog describes it."""

    oid: int
    schema: str
    name: str
    kind: str
    columns: tuple[RelationColumn, ...]
    key: tuple[str, ...] = ()  # the primary key, or a unique key without NULLs
    definition: str | None = None  # the canonical text of a view
    buffer: str | None = None  # the name of its change buffer in pgtrickle_changes, if it is captured
    database: str = ""  # the registered database that contains it; empty for the stream table's own
    members: tuple[Relation, ...] = ()  # if it represents one table per member of a set: those tables
    shard: bool = False  # whether it is the table of such a member
    spread: bool = False  # whether it is a distributed table in a Citus cluster; the cut knows its shards

    @property
    def label(self) -> str:
        return ".".join([*([self.database] if self.database else []), self.schema, self.name])


@dataclass(frozen=True, eq=False)
class Scan(_Operator):
    relation: Relation
    fields: tuple[tuple[Column, RelationColumn], ...]
    version: Version = Version.NEW

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(column for column, _ in self.fields)

    @cached_property
    def reads_changes(self) -> bool:
        return self.version is Version.DELTA

    @cached_property
    def databases(self) -> frozenset[str]:
        return frozenset({self.relation.database})

    @cached_property
    def is_chain(self) -> bool:
        return True


@dataclass(frozen=True, eq=False)
class Values(_Operator):
    """Constant rows from the query, which never change."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[exp.Expression, ...], ...]
    version: Version = Version.NEW


@dataclass(frozen=True, eq=False)
class Filter(_Operator):
    input: Plan
    condition: exp.Expression

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.input.columns


@dataclass(frozen=True, eq=False)
class Project(_Operator):
    input: Plan
    items: tuple[tuple[Column, exp.Expression], ...]

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(column for column, _ in self.items)


@dataclass(frozen=True, eq=False)
class InnerJoin(_Operator):
    """The combinations of one row of each input that meet all conditions."""

    inputs: tuple[Plan, ...]
    conditions: tuple[exp.Expression, ...]

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        return tuple(column for child in self.inputs for column in child.columns)


OuterKind: TypeAlias = Literal["left", "right", "full"]
JoinKind: TypeAlias = Literal["inner"] | OuterKind


@dataclass(frozen=True, eq=False)
class Join(_Operator):
    """An outer join."""

    kind: OuterKind
    left: Plan
    right: Plan
    condition: exp.Expression

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.left.columns + self.right.columns


@dataclass(frozen=True, eq=False)
class Exists(_Operator):
    """The rows of `left`, each with a boolean mark: whether `right` has a row that meets the condition."""

    left: Plan
    right: Plan
    condition: exp.Expression
    mark: Column

    @property
    def columns(self) -> tuple[Column, ...]:
        return (*self.left.columns, self.mark)


@dataclass(frozen=True, eq=False)
class Aggregate(_Operator):
    """Groups by columns of the input. Without aggregates it is DISTINCT; without keys it has exactly one row."""

    input: Plan
    keys: tuple[Column, ...]
    calls: tuple[tuple[Column, exp.Expression], ...]

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.keys + tuple(column for column, _ in self.calls)


@dataclass(frozen=True, eq=False)
class UnionAll(_Operator):
    """The rows of all inputs, with columns matched by position; `columns` are the union's own."""

    inputs: tuple[Plan, ...]
    columns: tuple[Column, ...]


@dataclass(frozen=True, eq=False)
class Negate(_Operator):
    input: Plan

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.input.columns


@dataclass(frozen=True, eq=False)
class Flip(_Operator):
    """The change of an `Exists` that comes from its right side: the rows of `left` whose mark has changed.

    `left` and `right` are at the new state, `left_delta` and `right_delta` are their changes. Rows of `left` are taken
    at the old state, which is new minus change.
    """

    left: Plan
    left_delta: Plan
    right: Plan
    right_delta: Plan
    condition: exp.Expression
    mark: Column

    @property
    def columns(self) -> tuple[Column, ...]:
        return (*self.left.columns, self.mark)


@dataclass(frozen=True, eq=False)
class Regroup(_Operator):
    """The change of an aggregation: it recomputes the groups affected by `trigger`, the change of its input."""

    new: Plan
    old: Plan
    trigger: Plan

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.new.columns


@dataclass(frozen=True, eq=False)
class Fragment(_Operator):
    """A part of the plan that PostgreSQL computes; everything above it runs on Spark."""

    plan: Plan
    why: str

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.plan.columns

    @cached_property
    def operators(self) -> int:
        return 1


@dataclass(frozen=True, eq=False)
class KeyFilter(_Operator):
    """Keeps at least the rows whose column has a value that occurs in `origin_column` of `origin`.

    It only bounds what is fetched. The operators above test their conditions again, so extra rows do no harm.
    """

    input: Plan
    column: Column
    origin: Plan
    origin_column: Column
    nulls: bool  # NULL is a value like any other (groups); otherwise it matches nothing (joins)

    @property
    def columns(self) -> tuple[Column, ...]:
        return self.input.columns


Plan: TypeAlias = (
    Scan
    | Values
    | Filter
    | Project
    | InnerJoin
    | Join
    | Exists
    | Aggregate
    | UnionAll
    | Negate
    | Flip
    | Regroup
    | Fragment
    | KeyFilter
)


# Callbacks for rewrites: one creates a column, the other returns the types of expressions over columns.
NewColumn = Callable[[str, PgType], Column]
TypesOf = Callable[[Iterable[Column], list[exp.Expression]], list[PgType]]


def inputs_of(plan: Plan) -> tuple[Plan, ...]:
    """The plans that a node reads. The origin of a key filter is not among them: it only bounds the input."""
    count_step()
    match plan:
        case Scan() | Values():
            return ()
        case Filter(input=child) | Project(input=child) | Aggregate(input=child) | Negate(input=child):
            return (child,)
        case KeyFilter(input=child) | Fragment(plan=child):
            return (child,)
        case Regroup(new=new, old=old, trigger=trigger):
            return (new, old, trigger)
        case Join(left=left, right=right) | Exists(left=left, right=right):
            return (left, right)
        case UnionAll(inputs=inputs) | InnerJoin(inputs=inputs):
            return inputs
        case Flip(left=left, left_delta=left_delta, right=right, right_delta=right_delta):
            return (left, left_delta, right, right_delta)


def walk(plan: Plan) -> Iterator[Plan]:
    """Every node of the plan, from left to right. A node that occurs several times comes once."""
    seen: set[int] = set()
    waiting = [plan]
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            waiting += reversed(inputs_of(node))


def scans_of(plan: Plan) -> list[Scan]:
    """Every scan of the plan, from left to right."""
    return [node for node in walk(plan) if isinstance(node, Scan)]


def _reads_member(plan: Plan) -> bool:
    """Whether the plan only reads the table of one member of a set, possibly at its old state."""
    match plan:
        case Scan(relation=relation):
            return relation.shard
        case Filter(input=child) | Project(input=child) | KeyFilter(input=child) | Negate(input=child):
            return _reads_member(child)
        case Fragment(plan=child):
            return _reads_member(child)
        case UnionAll(inputs=inputs):
            return all(map(_reads_member, inputs))
        case _:
            return False


def databases_of(plan: Plan) -> frozenset[str]:
    """The databases whose tables the plan reads."""
    return plan.databases


def used_ids(expression: exp.Expression) -> set[str]:
    """The ids of the columns that an expression reads."""
    return {column.name for column in expression.find_all(exp.Column)}


def at_version(plan: Plan, version: Version) -> Plan:
    """The same plan over another version of its tables. A node that occurs several times stays one node."""
    done: dict[int, Plan] = {}

    def moved(plan: Plan) -> Plan:
        if id(plan) not in done:
            done[id(plan)] = move(plan)
        return done[id(plan)]

    def move(plan: Plan) -> Plan:
        match plan:
            case Scan():
                return replace(plan, version=version)
            case Filter(input=child) | Project(input=child) | Aggregate(input=child):
                return replace(plan, input=moved(child))
            case KeyFilter(input=child, origin=origin):
                # Keys that come from a change stay; keys that come from a state must come from the same version.
                return replace(plan, input=moved(child), origin=origin if origin.reads_changes else moved(origin))
            case Join(left=left, right=right) | Exists(left=left, right=right):
                return replace(plan, left=moved(left), right=moved(right))
            case UnionAll(inputs=inputs) | InnerJoin(inputs=inputs):
                return replace(plan, inputs=tuple(map(moved, inputs)))
            case Values():
                return plan
            case _:
                raise AssertionError(f"{type(plan).__name__} is a change, it has no state")

    return moved(plan)


@dataclass(frozen=True)
class Equality:
    """A condition that a column of one input equals a column of another one; inputs are given by their position."""

    sides: tuple[int, int]
    columns: tuple[Column, Column]


def equalities(inputs: Sequence[Plan], conditions: Iterable[exp.Expression]) -> list[Equality]:
    """The conditions that require columns of two inputs to be equal."""
    home = {column.id: (i, column) for i, child in enumerate(inputs) for column in child.columns}
    found = []
    for part in conditions:
        if isinstance(part, exp.EQ) and isinstance(part.this, exp.Column) and isinstance(part.expression, exp.Column):
            if part.this.name not in home or part.expression.name not in home:
                continue
            (i, one), (j, other) = sorted(
                (home[part.this.name], home[part.expression.name]), key=lambda place: place[0]
            )
            if i != j:
                found.append(Equality((i, j), (one, other)))
    return found


def equi_keys(node: Join | Exists | Flip) -> list[tuple[Column, Column]]:
    """Pairs of a left and a right column that the condition requires to be equal."""
    return [found.columns for found in equalities((node.left, node.right), conjuncts(node.condition))]


def scanning(chain: Plan, version: Version) -> Plan:
    """The chain over one table, reading another version of it, bounded by the same keys."""
    match chain:
        case Scan():
            return replace(chain, version=version)
        case Filter(input=child) | Project(input=child) | KeyFilter(input=child):
            return replace(chain, input=scanning(child, version))
        case _:
            raise AssertionError(f"{type(chain).__name__} is no chain over one table")


def join_of(kind: JoinKind, left: Plan, right: Plan, condition: exp.Expression) -> InnerJoin | Join:
    """The join of two plans."""
    if kind == "inner":
        return InnerJoin((left, right), tuple(conjuncts(condition)))
    return Join(kind, left, right, condition)


def rebuild(plan: Plan, change: Callable[[Plan], Plan]) -> Plan:
    """The same node with `change` applied to its inputs; for plans that are not differentiated yet."""
    match plan:
        case Filter(input=child) | Project(input=child) | Aggregate(input=child):
            return replace(plan, input=change(child))
        case Join(left=left, right=right) | Exists(left=left, right=right):
            return replace(plan, left=change(left), right=change(right))
        case UnionAll(inputs=inputs) | InnerJoin(inputs=inputs):
            return replace(plan, inputs=tuple(change(child) for child in inputs))
        case _:
            return plan
