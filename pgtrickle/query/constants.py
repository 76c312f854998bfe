"""Constants whose text is known without asking PostgreSQL."""

from __future__ import annotations

import re

from sqlglot import exp

from pgtrickle.query.conditions import unwrap


def constant(value: exp.Expression) -> str | None:
    """What a constant prints, in Spark's SQL; None where PostgreSQL must be asked."""
    value = unwrap(value)
    if is_null(value):
        return "NULL"
    text = value.this if isinstance(value, exp.Cast) and value.to.is_type("text") else None
    # Spark replaces ${…} in a text and has escapes of its own: only what needs neither.
    if isinstance(text, exp.Literal) and text.is_string and re.fullmatch(r"[\w .,:/+-]*", text.name, re.ASCII):
        return f"'{text.name}'"
    return None


def is_null(value: exp.Expression) -> bool:
    """A NULL with a type, as the padded side of an outer join has."""
    return isinstance(value, exp.Cast) and isinstance(unwrap(value.this), exp.Null)
