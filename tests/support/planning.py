"""Plans without a server: relations and types are given in code instead of being read from PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence

from sqlglot import exp

from pgtrickle.ivm.program import Program, build_program
from pgtrickle.query.binder import Binder
from pgtrickle.query.plan import Column, Relation, RelationColumn
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
    """A `Typing` that knows columns, and PostgreSQL's types of aggregates, constants and sums; the rest is text."""

    def types_of(self, columns: Sequence[Column], expressions: Sequence[exp.Expression]) -> list[PgType]:
        known = {column.id: column.type for column in columns}
        return [self._type(known, expression) for expression in expressions]

    def _type(self, known: dict[str, PgType], node: exp.Expression) -> PgType:
        if isinstance(node, exp.Paren):
            return self._type(known, node.this)
        if isinstance(node, exp.Column):
            return known[node.name]
        if isinstance(node, exp.Count):
            return BIGINT
        if isinstance(node, exp.Predicate | exp.Connector | exp.Not):
            return BOOLEAN
        if isinstance(node, exp.Add | exp.Mul):
            sides = {self._type(known, side).oid for side in (node.this, node.expression)}
            return NUMBER if NUMERIC in sides else INTEGER
        if isinstance(node, exp.Cast) and node.to.is_type("decimal"):
            return NUMBER
        return INTEGER if isinstance(node, exp.Literal) and not node.is_string else STRING

    def union_types(self, branches: Sequence[Sequence[PgType]]) -> list[PgType]:
        return list(branches[0])

    def casts_for_equality(self, left: PgType, right: PgType) -> tuple[str | None, str | None]:
        return None, None


def plan_query(text: str, tables: Sequence[Relation] = RELATIONS) -> Program:
    """The program of a query over RELATIONS, or over other relations."""
    relations = {(relation.schema, relation.name): relation for relation in tables}
    return build_program(text, Binder(relations, WrittenTypes(), frozenset({"string_agg"})))
