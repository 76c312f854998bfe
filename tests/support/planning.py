"""Plans without a server: relations and types are given in code instead of being read from PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence

from sqlglot import exp

from pgtrickle.ivm.program import Program, build_program
from pgtrickle.query.binder import Binder
from pgtrickle.query.plan import Column, NewColumn, Plan, Relation, RelationColumn, TypesOf
from pgtrickle.query.types import BOOL, INT4, INT8, NUMERIC, TEXT, PgType

INTEGER = PgType(INT4, -1, "integer")
BIGINT = PgType(INT8, -1, "bigint")
STRING = PgType(TEXT, -1, "text")
MONEY = PgType(NUMERIC, (10 << 16 | 2) + 4, "numeric(10,2)")
NUMBER = PgType(NUMERIC, -1, "numeric")
BOOLEAN = PgType(BOOL, -1, "boolean")


def table(oid: int, name: str, columns: dict[str, PgType], key: tuple[str, ...] = ()) -> Relation:
    fields = tuple(RelationColumn(column, i + 1, type_) for i, (column, type_) in enumerate(columns.items()))
    return Relation(oid, "shop", name, "r", fields, key, buffer=f"changes_{name}")


RELATIONS = [
    table(1, "orders", {"id": INTEGER, "customer": INTEGER, "kind": STRING, "amount": MONEY}, ("id",)),
    table(2, "customers", {"id": INTEGER, "tier": STRING}, ("id",)),
    table(3, "items", {"order_id": INTEGER, "sku": STRING, "qty": INTEGER}),
]


class WrittenTypes:
    """Columns have their own types, expressions over numbers those of PostgreSQL; anything else is text."""

    def types_of(self, columns: Sequence[Column], expressions: Sequence[exp.Expression]) -> list[PgType]:
        known = {column.id: column.type for column in columns}
        return [self._type(known, expression) for expression in expressions]

    def _type(self, known: dict[str, PgType], node: exp.Expression) -> PgType:
        match node:
            case exp.Paren() | exp.Min() | exp.Max() | exp.Filter() | exp.Neg():
                return self._type(known, node.this)
            case exp.Column():
                return known[node.name]
            case exp.Count():
                return BIGINT
            case exp.Sum():
                argument = node.this.expressions[0] if isinstance(node.this, exp.Distinct) else node.this
                return BIGINT if self._type(known, argument).oid == INT4 else NUMBER
            case exp.Avg():
                return NUMBER
            case exp.Predicate() | exp.Connector() | exp.Not() | exp.Boolean():
                return BOOLEAN
            case exp.Add() | exp.Mul():
                return _wider([self._type(known, side) for side in (node.this, node.expression)])
            case exp.Coalesce():
                return _wider([self._type(known, item) for item in (node.this, *node.expressions)])
            case exp.Case():
                default = node.args.get("default")
                values = [branch.args["true"] for branch in node.args["ifs"]] + ([default] if default else [])
                return _wider([self._type(known, value) for value in values])
            case exp.Cast():
                return next((type_ for type_ in _CAST_TO if node.to.sql("postgres").lower() in _CAST_TO[type_]), STRING)
            case exp.Literal() if not node.is_string:
                return INTEGER
            case _:
                return STRING

    def union_types(self, branches: Sequence[Sequence[PgType]]) -> list[PgType]:
        return [_wider(types) for types in zip(*branches, strict=True)]

    def casts_for_equality(self, left: PgType, right: PgType) -> tuple[str | None, str | None]:
        if NUMERIC not in {left.oid, right.oid} or left.oid == right.oid:
            return None, None
        return ("numeric", None) if right.oid == NUMERIC else (None, "numeric")


_CAST_TO = {INTEGER: {"int", "integer"}, BIGINT: {"bigint"}, NUMBER: {"numeric", "decimal"}, BOOLEAN: {"boolean"}}


def _wider(types: Sequence[PgType]) -> PgType:
    """The common type of numbers; the first type where they are none."""
    for oid, type_ in ((NUMERIC, NUMBER), (INT8, BIGINT)):
        if types[0].oid in {INT4, INT8, NUMERIC} and oid in {item.oid for item in types}:
            return types[0] if len(set(types)) == 1 else type_
    return types[0]


def plan_query(text: str, tables: Sequence[Relation] = RELATIONS) -> Program:
    """The program of a query over the relations above, or over others."""
    return build_program(text, _binder(tables))


def bind_query(text: str, tables: Sequence[Relation] = RELATIONS) -> tuple[Plan, NewColumn, TypesOf]:
    """The plan of a query as it is bound, and what rewrites of it need."""
    binder = _binder(tables)
    return binder.bind_text(text).plan, binder.column, lambda *args: binder.typing.types_of(list(args[0]), args[1])


def _binder(tables: Sequence[Relation]) -> Binder:
    relations = {(relation.schema, relation.name): relation for relation in tables}
    return Binder(relations, WrittenTypes(), frozenset({"string_agg"}))
