"""PostgreSQL's types as the planner needs them: what a value may become on Spark, and what it may not."""

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
# Equal values of these types have one text (settings fixed), so their text can stand for them as a key.
_IDENTITY = INTEGERS | _STRINGS | {BOOL, DATE, TIMESTAMP, TIMESTAMPTZ, UUID, BYTEA, XID8, OID, MACADDR, TIME}

# These print alike too, though a cast to text is not how they are compared.
_ONE_TEXT = frozenset({INET})
_PLAIN_ARRAYS = frozenset(
    {"smallint[]", "integer[]", "bigint[]", "text[]", "boolean[]", "date[]", "uuid[]", "character varying[]"}
)

# Values in flight: `text` is what PostgreSQL prints; `key` is a text equal for equal values; `native` is a number.
Form = Literal["text", "key", "native"]


@dataclass(frozen=True)
class PgType:
    """A column's type. Domains are given as their base type; `name` is what a cast to the type is written with."""

    oid: int
    typmod: int
    name: str
    is_enum: bool = False
    collation: str = ""  # as SQL names it, where it is not the type's own
    deterministic: bool = True  # the collation's equality is identity of bytes
    groupable: bool = True  # GROUP BY accepts it
    equals: str = "="  # the operator that groups and unique indexes compare by

    def cast(self, value: str) -> str:
        """The SQL that makes a value of this type, with its collation."""
        return f"{value}::{self.name}{self._collate}"

    def from_text(self, value: str) -> str:
        """The SQL that makes the value of this type that prints as a text."""
        if self.is_built_in or self.is_array:
            return self.cast(value)
        # A user may have defined a cast from text. The elements of an array are read as the type itself reads them.
        quoted = f"""replace(replace({value}, E'\\\\', E'\\\\\\\\'), '"', E'\\\\"')"""
        return f"""(('{{"' || {quoted} || '"}}')::{self.name}[])[1]{self._collate}"""

    @property
    def declaration(self) -> str:
        """The type of a column in DDL."""
        return f"{self.name}{self._collate}"

    @property
    def _collate(self) -> str:
        return f" COLLATE {self.collation}" if self.collation else ""

    @property
    def is_built_in(self) -> bool:
        return self.oid < FIRST_USER_OID

    def equality_is_shared(self, other: PgType) -> bool:
        """Whether comparing with the other type by `=` takes the same values for equal as this type itself does."""
        same = self.oid == other.oid or (self.is_integer and other.is_integer)
        return same and (self.collation == other.collation or (self.deterministic and other.deterministic))

    def tells_apart(self, other: PgType) -> bool:
        """Whether no two different values of this type equal the same value of the other."""
        if self.collation != other.collation and not (self.deterministic and other.deterministic):
            return False
        families = ({*INTEGERS, NUMERIC}, {FLOAT4, FLOAT8}, _STRINGS, {DATE, TIMESTAMP})
        return self.oid == other.oid or any({self.oid, other.oid} <= family for family in families)

    def is_kept_apart_by(self, target: PgType) -> bool:
        """Whether values that differ still do after a cast to the other type."""
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
        """Digits behind the point of a numeric(p,s), or 0 for integers; None where values differ in scale."""
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
        """A numeric(p,s) that fits Spark's 38 digits, sums of it included."""
        precision, scale = self.precision, self.scale
        return self.oid == NUMERIC and precision is not None and scale is not None and precision <= 27 and scale >= 0

    @property
    def text_is_identity(self) -> bool:
        """Equal values have equal texts, and different values different ones."""
        if self.oid in _STRINGS:
            return self.deterministic
        return self.is_enum or self.oid in _IDENTITY

    @property
    def prints_alike(self) -> bool:
        """Equal values have equal texts; other than with an identity, the text alone need not tell values apart."""
        fixed = self.typmod >= 0 and self.oid in {NUMERIC, BPCHAR}
        return self.text_is_identity or fixed or self.oid in _ONE_TEXT or (self.is_array and self.name in _PLAIN_ARRAYS)

    @property
    def has_key(self) -> bool:
        """A text can be computed in PostgreSQL that is equal exactly for equal values."""
        return (
            self.text_is_identity
            or self.oid in {NUMERIC, FLOAT4, FLOAT8, INTERVAL}
            or (self.oid == BPCHAR and self.deterministic)
        )

    @property
    def has_native(self) -> bool:
        """A number or boolean can stand for the value on Spark, in order and equality."""
        return self.oid in _COMPARABLE or self.is_decimal

    @property
    def is_array(self) -> bool:
        return self.name.endswith("[]")

    @property
    def is_float(self) -> bool:
        return self.oid in {FLOAT4, FLOAT8}

    def key_family(self) -> str:
        """Keys of two columns may be compared on Spark only within one family."""
        if self.is_integer or self.oid == NUMERIC:
            return "number"
        if self.oid in _STRINGS:
            return "string"
        return str(self.oid)
