"""The kinds of values in the sources of generated queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The type of each kind. `loose` is numeric and `span` interval, whose equal values can print differently.
TYPES = {
    "int": "integer",
    "big": "bigint",
    "money": "numeric(10,2)",
    "loose": "numeric",
    "float": "double precision",
    "text": "text",
    "bool": "boolean",
    "date": "date",
    "time": "timestamp with time zone",
    "uuid": "uuid",
    "span": "interval",
    "kind": "shop.product_kind",
    "list": "integer[]",
    "small": "smallint",
    "real": "real",
    "char": "character(5)",
    "varchar": "character varying(8)",
    "nocase": "text",
    "stamp": "timestamp",
}
# Kinds that PostgreSQL can compare with each other, mapped to the kind of a UNION's column over two of them.
FAMILIES = {
    **dict.fromkeys(("small", "int", "big", "money", "loose", "real", "float", "any number"), "any number"),
    **dict.fromkeys(("text", "varchar", "char", "nocase", "any word"), "any word"),
    **dict.fromkeys(("date", "stamp", "any day"), "any day"),
}
SHOP_TABLES: dict[str, dict[str, str]] = {
    "customers": {"id": "int", "region": "text", "tier": "text", "credit": "money", "joined": "date", "grade": "text"},
    "orders": {
        "id": "int",
        "customer_id": "int",
        "status": "text",
        "amount": "money",
        "qty": "int",
        "placed": "time",
        "note": "text",
    },
    "items": {"order_id": "int", "sku": "text", "qty": "int", "price": "money", "weight": "float"},
    "regions": {"code": "text", "name": "text", "manager_id": "int", "factor": "loose", "tax": "money"},
    "products": {"sku": "text", "kind": "kind", "ratings": "list"},
    "events": {
        "id": "big",
        "slot": "int",
        "customer_id": "int",
        "ok": "bool",
        "token": "uuid",
        "reading": "loose",
        "ratio": "float",
        "span": "span",
    },
    "open_orders": {"id": "int", "customer_id": "int", "amount": "money", "qty": "int", "placed": "time"},
    "customer_regions": {"customer_id": "int", "tier": "text", "credit": "money", "region_code": "text"},
    "order_pairs": {"customer_id": "int", "status": "text"},
}
SHOP_MEETS = (
    ("customer_id", "id", "manager_id", "order_id"),
    ("region", "code", "region_code"),
    ("sku", "sku"),
    ("qty", "slot", "qty"),
    ("status", "status"),
    ("tier", "tier"),
)
LITERALS: dict[str, Sequence[str]] = {
    "int": ("0", "1", "3", "7", "20", "50"),
    "big": ("2", "10", "60"),
    "money": ("10.00", "99.5", "250"),
    "loose": ("1.5", "1.0", "0.75", "1000"),
    "float": ("0.5::double precision", "25::double precision"),
    "text": ("'new'", "'gold'", "'north'", "'sku-03'", "'A'", "''", "'mid'", "'rush'"),
    "bool": ("true", "false"),
    "date": ("'2024-09-01'::date", "'2025-03-01'::date"),
    "time": ("'2025-06-01 00:00+00'::timestamptz",),
    "span": ("'30 days'::interval", "'1 day'::interval"),
    "kind": ("'toy'::shop.product_kind", "'book'::shop.product_kind"),
    "small": ("0", "1", "2"),
    "real": ("0.1", "2.5"),
    "char": ("'a'", "'ab'"),
    "varchar": ("'a'", "'b'"),
    "nocase": ("'A'", "'b'"),
    "stamp": ("'2026-01-01'::timestamp",),
}
ORDERED = frozenset({"int", "big", "money", "loose", "date", "time", "span", "small", "stamp"})
WORDS = frozenset({"text", "kind", "char", "varchar", "nocase"})
KINDS_OF_OUTPUT = ("int", "int", "text", "text", "money", "bool", "date", "loose", "float", "big")
PATTERNS = ("'n%'", "'%o%'", "'sku-0_'", "'%e'")


@dataclass(frozen=True)
class Value:
    """An expression of a kind.

    A worn value represents several equal ones, or has digits that depend on how it was computed. It must only be used
    in the output.
    """

    sql: str
    kind: str
    worn: bool = False

    @property
    def column(self) -> str:
        """The column name without the table alias."""
        return self.sql.rpartition(".")[2]

    @property
    def is_loose(self) -> bool:
        """Whether equal values can print differently."""
        return self.kind in LOOSE or self.kind in FAMILIES.values()


LOOSE = frozenset({"loose", "span", "float", "real", "nocase"})


def fresh(values: Sequence[Value]) -> list[Value]:
    return [value for value in values if not value.worn]


@dataclass(frozen=True)
class World:
    """The sources of generated queries."""

    schema: str
    tables: dict[str, dict[str, str]]  # table -> column -> kind
    meets: tuple[tuple[str, ...], ...]
    """Names that are about the same thing: joins over them find partners."""
    is_mixed: bool = False
    """Whether values of different types are compared."""

    def are_comparable(self, a: Value, b: Value) -> bool:
        return a.kind == b.kind or (self.is_mixed and a.kind in FAMILIES and FAMILIES[a.kind] == FAMILIES.get(b.kind))

    def pairs(self, left: Sequence[Value], right: Sequence[Value]) -> list[tuple[Value, Value]]:
        """The pairs of values, one from each side, that can be compared."""
        return [(a, b) for a in fresh(left) for b in fresh(right) if self.are_comparable(a, b)]

    def likely(self, found: Sequence[tuple[Value, Value]]) -> list[tuple[Value, Value]]:
        """Those of the pairs whose columns mean the same, so that joins over them find partners."""
        return [(a, b) for a, b in found if any(a.column in names and b.column in names for names in self.meets)]


SHOP = World("shop", SHOP_TABLES, SHOP_MEETS)
