"""The tables that golden cases read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sqlglot import exp

from pgtrickle.ivm.program import Program, build_program
from pgtrickle.query.binder import Binder
from pgtrickle.query.plan import NewColumn, Plan, Relation, RelationColumn, TypesOf, inputs_of
from pgtrickle.query.rewrites.normalise import normalise
from pgtrickle.query.types import (
    BPCHAR,
    DATE,
    FLOAT8,
    INET,
    INT2,
    INT4,
    INT8,
    INTERVAL,
    NUMERIC,
    RECORD,
    TIMESTAMPTZ,
    UUID,
    VARCHAR,
    PgType,
)
from tests.support.planning import (
    BIGINT,
    BOOLEAN,
    INTEGER,
    MONEY,
    NUMBER,
    RELATIONS,
    STRING,
    WrittenTypes,
    table,
)

NOCASE = replace(STRING, collation="shop.nocase", deterministic=False)


def _decimal(precision: int, scale: int) -> PgType:
    return PgType(NUMERIC, (precision << 16 | scale) + 4, f"numeric({precision},{scale})")


# One column of each type that is treated in its own way.
TYPES = {
    "id": INTEGER,
    "small": PgType(INT2, -1, "smallint"),
    "big": BIGINT,
    "flag": BOOLEAN,
    "exact": NUMBER,
    "money": MONEY,
    "real": PgType(FLOAT8, -1, "double precision"),
    "title": PgType(VARCHAR, -1, "character varying"),
    "code": PgType(BPCHAR, 7, "character(3)"),
    "day": PgType(DATE, -1, "date"),
    "moment": PgType(TIMESTAMPTZ, -1, "timestamp with time zone"),
    "span": PgType(INTERVAL, -1, "interval"),
    "token": PgType(UUID, -1, "uuid"),
    "host": PgType(INET, -1, "inet"),
    "doc": PgType(3802, -1, "jsonb"),
    "raw": PgType(114, -1, "json", groupable=False),
    "tags": PgType(1009, -1, "text[]"),
    "mood": PgType(20001, -1, "shop.mood", is_enum=True),
    "shape": PgType(20002, -1, "shop.shape", equals="OPERATOR(shop.=)"),
    "nocase": NOCASE,
}


def _generated() -> Relation:
    """A table with a virtual generated column."""
    lines = table(5, "lines", {"id": INTEGER, "price": MONEY, "qty": INTEGER}, ("id",))
    return replace(lines, columns=(*lines.columns, RelationColumn("total", 4, NUMBER, generated="price * qty")))


def _view() -> Relation:
    columns = (RelationColumn("id", 1, INTEGER), RelationColumn("customer", 2, INTEGER))
    definition = "SELECT orders.id, orders.customer FROM shop.orders WHERE (orders.kind = 'b'::text)"
    return Relation(6, "shop", "b_orders", "v", columns, definition=definition)


def _remote(oid: int, name: str, columns: dict[str, PgType], key: tuple[str, ...] = ()) -> Relation:
    """A table of the registered database `crm`."""
    return replace(table(oid, name, columns, key), schema="public", database="crm")


def _set() -> Relation:
    """A table of a database set with two members."""
    rows = {"id": INTEGER, "who": STRING, "cents": BIGINT}
    members = tuple(
        replace(table(oid, "visits", rows, ("id",)), database=database, shard=True)
        for oid, database in ((21, "east"), (22, "west"))
    )
    return replace(table(20, "visits", {"pgt_database": STRING, **rows}), members=members)


def _distributed() -> Relation:
    """A distributed table of a Citus cluster with one other node."""
    events = table(30, "events", {"id": INTEGER, "tenant": INTEGER, "kind": STRING}, ("id", "tenant"))
    here = replace(events, spread=True)
    there = replace(events, oid=31, buffer="changes_events_1", database="@1", shard=True, spread=True)
    return replace(events, members=(here, there))


SCHEMA = [
    *RELATIONS,
    table(4, "kinds", TYPES, ("id",)),
    _generated(),
    _view(),
    replace(table(8, "totals", {"kind": STRING}), kind="m"),
    table(7, "words", {"word": STRING, "nocase": NOCASE, "c": replace(STRING, collation='"C"')}),
    _remote(10, "people", {"id": INTEGER, "name": STRING, "age": INTEGER, "score": _decimal(5, 2)}, ("id",)),
    _set(),
    _distributed(),
]
OIDS = {relation.label: relation.oid for relation in SCHEMA}


class GoldenTypes(WrittenTypes):
    """Types as PostgreSQL gives them to the expressions in golden cases."""

    def _type(self, known: dict[str, PgType], node: exp.Expression) -> PgType:
        match node:
            case exp.Add() | exp.Sub() | exp.Mul() | exp.Mod() | exp.Div():
                return _widest([self._type(known, side) for side in (node.this, node.expression)])
            case exp.Cast() if node.to.is_type("decimal") and node.to.expressions:
                return _decimal(*(int(size.name) for size in node.to.expressions))
            case exp.Cast() if (name := node.to.sql("postgres").lower()) in NAMED:
                return NAMED[name]
            case exp.Abs():
                return self._type(known, node.this)
            case exp.Tuple() | exp.Struct():
                return PgType(RECORD, -1, "record")
            case exp.Anonymous() if node.name.lower() in {"row", "every"}:
                return PgType(RECORD, -1, "record") if node.name.lower() == "row" else BOOLEAN
            case exp.Sum() | exp.Avg() if isinstance(node.this, exp.Column) and known[node.this.name].is_float:
                return known[node.this.name]
            case exp.LogicalAnd() | exp.LogicalOr():
                return BOOLEAN
            case exp.Literal() if not node.is_string and "." in node.name:
                return NUMBER
            case _:
                return super()._type(known, node)


def _widest(types: Sequence[PgType]) -> PgType:
    """The type of arithmetic over these types; it has no digits of its own."""
    order = [INT2, INT4, INT8, NUMERIC, FLOAT8]
    widest = max(types, key=lambda type_: order.index(type_.oid))
    return NUMBER if widest.oid == NUMERIC else widest


NAMED = {type_.name: type_ for type_ in TYPES.values() if type_.deterministic}
# As sqlglot writes them.
NAMED |= {"varchar": TYPES["title"]}


def _binder() -> Binder:
    relations = {(relation.database or relation.schema, relation.name): relation for relation in SCHEMA}
    return Binder(relations, GoldenTypes(), frozenset({"string_agg", "every"}))


def bind_golden(text: str) -> tuple[Plan, NewColumn, TypesOf]:
    """The plan of a query as it is bound, and what rewrites of it need."""
    binder = _binder()
    return binder.bind_text(text).plan, binder.column, lambda *args: binder.typing.types_of(list(args[0]), args[1])


def normalise_golden(text: str) -> Plan:
    return normalise(*bind_golden(text))


def program_of(text: str) -> Program:
    return build_program(text, _binder())


def nodes(plan: Plan) -> Iterator[Plan]:
    """Every node of a plan, from the top."""
    yield plan
    for child in inputs_of(plan):
        yield from nodes(child)
