"""Arithmetic that Spark does exactly as PostgreSQL: adding and multiplying integers and numeric(p,s) of known digits.

It is needed if the factors of a product come from different databases, so that no single server has both. NaN is
tracked as a separate condition, because among Spark's decimals a number represents it (see `decimal_nan`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from sqlglot import exp

from pgtrickle.compile.postgres import decimal_nan
from pgtrickle.compile.spark.expressions import NotOnSpark, SparkExpressions
from pgtrickle.query.conditions import unwrap
from pgtrickle.query.types import Form, PgType

_MOST_DIGITS = 38
_BIGINT_DIGITS = 19
_DECIMAL = re.compile(r"(?:decimal|numeric)\((\d+)(?:, ?(\d+))?\)")


@dataclass(frozen=True)
class _Number:
    """A value on Spark: NULL, a decimal with these digits, or NaN if the condition `nan` is true."""

    text: str
    precision: int  # of its values
    scale: int
    nan: str | None = None
    wide: int = 0  # the precision of its Spark type, which has room for the number that represents NaN

    @property
    def whole(self) -> int:
        """Digits before the decimal point."""
        return self.precision - self.scale


def number_sql(node: exp.Expression, type_: PgType, form: Form, names: SparkExpressions) -> str:
    """Spark SQL for an expression of that type in the given form; raises NotOnSpark if it is not supported."""
    number = _number(node, names)
    if not (type_.is_integer or type_.is_decimal):
        raise NotOnSpark(f"{node.sql(dialect='postgres')} is evaluated by PostgreSQL only")
    assert type_.precision is not None
    assert type_.scale is not None
    # Integers need no such check: PostgreSQL rejects one that does not fit its type.
    if type_.is_decimal and (number.scale > type_.scale or number.whole > type_.precision - type_.scale):
        raise NotOnSpark(f"{node.sql(dialect='postgres')} is rounded by PostgreSQL only")
    if form != "native":
        text = f"CAST(CAST({number.text} AS DECIMAL({type_.precision},{type_.scale})) AS STRING)"
        if form == "key" and not type_.text_is_identity:
            raise NotOnSpark(f"{node.sql(dialect='postgres')} as a key is PostgreSQL's")
        return text if number.nan is None else f"IF({number.nan}, 'NaN', {text})"
    if type_.is_integer:
        return f"CAST({number.text} AS BIGINT)"
    wide = f"DECIMAL({type_.precision + 1},{type_.scale})"
    value = f"CAST({number.text} AS {wide})"
    return value if number.nan is None else f"IF({number.nan}, CAST({decimal_nan(type_)} AS {wide}), {value})"


def _number(node: exp.Expression, names: SparkExpressions) -> _Number:
    node = unwrap(node)
    match node:
        case exp.Column():
            return _column(node, names)
        case exp.Literal() if not node.is_string and node.name.replace(".", "", 1).isdigit():
            scale, precision = len(node.name.partition(".")[2]), len(node.name.replace(".", ""))
            return _Number(f"CAST({node.name} AS DECIMAL({precision},{scale}))", precision, scale, None, precision)
        case exp.Cast():
            return _cast(node, names)
        case exp.Neg():
            inner = _number(node.this, names)
            return replace(inner, text=f"(-{inner.text})")
        case exp.Mul() | exp.Add() | exp.Sub():
            return _combine(node, _number(node.this, names), _number(node.expression, names))
        case exp.Nullif() | exp.Anonymous() if _is_nan(_second(node)):
            inner = _number(_first(node), names)
            return inner if inner.nan is None else replace(inner, text=f"IF({inner.nan}, NULL, {inner.text})", nan=None)
        case exp.Case() if node.this is None and node.args.get("default") is None and len(node.args["ifs"]) == 1:
            return _case(node.args["ifs"][0], names)
    raise NotOnSpark(f"{node.sql(dialect='postgres')} is evaluated by PostgreSQL only")


def _column(node: exp.Column, names: SparkExpressions) -> _Number:
    type_ = names.column(node).type
    if not (type_.is_integer or type_.is_decimal):
        raise NotOnSpark(f"PostgreSQL calculates with {type_.name}")
    assert type_.precision is not None
    assert type_.scale is not None
    native = names.form(node, "native")
    if type_.is_integer:
        return _Number(f"CAST({native} AS DECIMAL({type_.precision},0))", type_.precision, 0, None, type_.precision)
    return _Number(native, type_.precision, type_.scale, f"{native} >= {decimal_nan(type_)}", type_.precision + 1)


def _cast(node: exp.Cast, names: SparkExpressions) -> _Number:
    """A cast to a type that holds the number unchanged."""
    inner = _number(node.this, names)
    to = node.to.sql(dialect="postgres").lower()
    if to in {"decimal", "numeric"}:
        return inner
    if (found := _DECIMAL.fullmatch(to)) is not None:
        precision, scale = int(found[1]), int(found[2] or 0)
        if inner.scale <= scale and inner.whole <= precision - scale:
            return _Number(
                f"CAST({inner.text} AS DECIMAL({precision + 1},{scale}))", precision, scale, inner.nan, precision + 1
            )
    elif to in {"bigint", "int8"} and inner.scale == 0 and inner.precision <= _BIGINT_DIGITS and inner.nan is None:
        return inner
    raise NotOnSpark(f"{node.sql(dialect='postgres')} is evaluated by PostgreSQL only")


def _combine(node: exp.Expression, left: _Number, right: _Number) -> _Number:
    nans = [side.nan for side in (left, right) if side.nan is not None]
    # NULL combined with NaN is NULL.
    nan = f"({left.text} IS NOT NULL AND {right.text} IS NOT NULL AND ({' OR '.join(nans)}))" if nans else None
    if isinstance(node, exp.Mul):
        scale = left.scale + right.scale
        precision, wide, word = left.precision + right.precision, left.wide + right.wide + 1, "*"
    else:
        scale = max(left.scale, right.scale)
        precision = max(left.whole, right.whole) + 1 + scale
        wide = max(left.wide - left.scale, right.wide - right.scale) + 1 + scale
        word = "+" if isinstance(node, exp.Add) else "-"
    if wide > _MOST_DIGITS:
        raise NotOnSpark(f"{node.sql(dialect='postgres')} may have more than {_MOST_DIGITS} digits")
    return _Number(f"({left.text} {word} {right.text})", precision, scale, nan, wide)


def _case(branch: exp.Expression, names: SparkExpressions) -> _Number:
    """CASE WHEN … THEN … END with a condition that Spark supports, or a test whether a number is NaN."""
    condition = unwrap(branch.this)
    if isinstance(condition, exp.EQ) and _is_nan(condition.expression):
        text = _number(condition.this, names).nan or "false"
    else:
        text = names.condition(condition)
    inner = _number(branch.args["true"], names)
    nan = None if inner.nan is None else f"({text} AND {inner.nan})"
    return replace(inner, text=f"IF({text}, {inner.text}, NULL)", nan=nan)


def _first(node: exp.Expression) -> exp.Expression:
    found: exp.Expression = node.this if isinstance(node, exp.Nullif) else node.expressions[0]
    return found


def _second(node: exp.Expression) -> exp.Expression | None:
    if isinstance(node, exp.Nullif):
        return node.expression  # type: ignore[no-any-return]
    if isinstance(node, exp.Anonymous) and node.name.lower() == "nullif" and len(node.expressions) == 2:
        return node.expressions[1]  # type: ignore[no-any-return]
    return None


def _is_nan(node: exp.Expression | None) -> bool:
    node = unwrap(node) if node is not None else None
    return (
        isinstance(node, exp.Cast)
        and isinstance(node.this, exp.Literal)
        and node.this.is_string
        and node.this.name == "NaN"
    )
