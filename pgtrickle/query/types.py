"""PostgreSQL's types as the planner needs them: which representations of a value Spark may use, and which not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

INT2, INT4, INT8 = 21, 23, 20
BOOL, TEXT, VARCHAR, BPCHAR, NAME = 16, 25, 1043, 1042, 19
NUMERIC, FLOAT4, FLOAT8 = 1700, 700, 701
DATE, TIMESTAMP, TIMESTAMPTZ, UUID, BYTEA = 1082, 1114, 1184, 2950, 17
XID8, OID, INET, MACADDR, TIME = 5069, 26, 869, 829, 1083
INTERVAL, RECORD = 1186, 2249

FIRST_USER_OID = 16384

INTEGERS = frozenset({INT2, INT4, INT8})
_STRINGS = frozenset({TEXT, VARCHAR, NAME})
_COMPARABLE = INTEGERS | {BOOL, DATE, TIMESTAMP, TIMESTAMPTZ}
# Equal values of these types have the same text (under fixed settings), so the text can serve as their key.
_IDENTITY = INTEGERS | _STRINGS | {BOOL, DATE, TIMESTAMP, TIMESTAMPTZ, UUID, BYTEA, XID8, OID, MACADDR, TIME}

# Equal values of these types have the same text too, but a cast to text is not how they are compared.
_ONE_TEXT = frozenset({INET})
_PLAIN_ARRAYS = frozenset(
    {"smallint[]", "integer[]", "bigint[]", "text[]", "boolean[]", "date[]", "uuid[]", "character varying[]"}
)

# Forms of a value in flight: `text` is what PostgreSQL prints; `key` is a text that is equal exactly for equal values;
# `native` is a number or boolean.
Form = Literal["text", "key", "native"]


@dataclass(frozen=True)
class PgType:
    """A column's type. Domains are represented by their base type; `name` is the type name to use in casts."""

    oid: int
    typmod: int
    name: str
    is_enum: bool = False
    collation: str = ""  # as SQL names it, if it is not the type's default
    deterministic: bool = True  # the collation considers values equal only if their bytes are
    groupable: bool = True  # GROUP BY accepts it
    equals: str = "="  # the operator that grouping and unique indexes use

    def cast(self, value: str) -> str:
        """SQL that casts a value to this type, with its collation."""
        return f"{value}::{self.name}{self._collate}"

    def from_text(self, value: str) -> str:
        """SQL that converts a text, as this type prints it, back to a value of the type."""
        if self.is_built_in or self.is_array:
            return self.cast(value)
        # Not a cast: a user may have defined one from text. Array elements are read by the type's own input function.
        quoted = f"""replace(replace({value}, E'\\\\', E'\\\\\\\\'), '"', E'\\\\"')"""
        return f"""(('{{"' || {quoted} || '"}}')::{self.name}[])[1]{self._collate}"""

    @property
    def declaration(self) -> str:
        """The column type for DDL."""
        return f"{self.name}{self._collate}"

    @property
    def _collate(self) -> str:
        return f" COLLATE {self.collation}" if self.collation else ""

    @property
    def is_built_in(self) -> bool:
        return self.oid < FIRST_USER_OID

    def equality_is_shared(self, other: PgType) -> bool:
        """Whether `=` with the other type considers the same values equal as this type's own equality does."""
        same = self.oid == other.oid or (self.is_integer and other.is_integer)
        return same and (self.collation == other.collation or (self.deterministic and other.deterministic))

    def tells_apart(self, other: PgType) -> bool:
        """Whether no two different values of this type are equal to the same value of the other type."""
        if self.collation != other.collation and not (self.deterministic and other.deterministic):
            return False
        families = ({*INTEGERS, NUMERIC}, {FLOAT4, FLOAT8}, _STRINGS, {DATE, TIMESTAMP})
        return self.oid == other.oid or any({self.oid, other.oid} <= family for family in families)

    def is_kept_apart_by(self, target: PgType) -> bool:
        """Whether different values stay different after a cast to the target type."""
        if not (self.deterministic and target.deterministic) or target.typmod != -1:
            return False
        wider = {INT2: {INT4, INT8, NUMERIC}, INT4: {INT8, NUMERIC}, INT8: {NUMERIC}, FLOAT4: {FLOAT8}}
        strings = {VARCHAR: {TEXT}, BPCHAR: {TEXT}, NAME: {TEXT}}
        return target.oid in (wider | strings).get(self.oid, set())

    @property
    def is_integer(self) -> bool:
        return self.oid in INTEGERS

    @property
    def scale(self) -> int | None:
        """Digits after the decimal point of a numeric(p,s), 0 for integers; None if values differ in scale."""
        if self.is_integer:
            return 0
        if self.oid == NUMERIC and self.typmod >= 4:
            scale = (self.typmod - 4) & 0x7FF
            return (scale ^ 1024) - 1024
        return None

    @property
    def precision(self) -> int | None:
        if self.is_integer:
            return {INT2: 5, INT4: 10, INT8: 19}[self.oid]
        if self.oid == NUMERIC and self.typmod >= 4:
            return ((self.typmod - 4) >> 16) & 0xFFFF
        return None

    @property
    def is_decimal(self) -> bool:
        """Whether this is a numeric(p,s) whose values and their sums fit Spark's 38 digits."""
        precision, scale = self.precision, self.scale
        return self.oid == NUMERIC and precision is not None and scale is not None and precision <= 27 and scale >= 0

    @property
    def text_is_identity(self) -> bool:
        """Whether equal values have equal texts, and different values have different texts."""
        if self.oid in _STRINGS:
            return self.deterministic
        return self.is_enum or self.oid in _IDENTITY

    @property
    def prints_alike(self) -> bool:
        """Whether equal values have equal texts. Unlike with `text_is_identity`, different values may share a text."""
        fixed = self.typmod >= 0 and self.oid in {NUMERIC, BPCHAR}
        return self.text_is_identity or fixed or self.oid in _ONE_TEXT or (self.is_array and self.name in _PLAIN_ARRAYS)

    @property
    def has_key(self) -> bool:
        """Whether PostgreSQL can compute a text that is equal exactly for equal values."""
        return (
            self.text_is_identity
            or self.oid in {NUMERIC, FLOAT4, FLOAT8, INTERVAL}
            or (self.oid == BPCHAR and self.deterministic)
        )

    @property
    def has_native(self) -> bool:
        """Whether a number or boolean with the same order and equality can represent the value on Spark."""
        return self.oid in _COMPARABLE or self.is_decimal

    @property
    def is_array(self) -> bool:
        return self.name.endswith("[]")

    @property
    def is_float(self) -> bool:
        return self.oid in {FLOAT4, FLOAT8}

    def key_family(self) -> str:
        """The family of the type: Spark may compare keys of two columns only within one family."""
        if self.is_integer or self.oid == NUMERIC:
            return "number"
        if self.oid in _STRINGS:
            return "string"
        return str(self.oid)
