"""Constants whose text is known without asking PostgreSQL."""

from __future__ import annotations

import re

from sqlglot import exp

from pgtrickle.query.conditions import unwrap


def constant(value: exp.Expression) -> str | None:
    """Spark SQL for the text of a constant; None if only PostgreSQL can determine it."""
    value = unwrap(value)
    if is_null(value):
        return "NULL"
    text = value.this if isinstance(value, exp.Cast) and value.to.is_type("text") else None
    # Spark substitutes ${…} in strings and has its own escapes: accept only texts that contain neither.
    if isinstance(text, exp.Literal) and text.is_string and re.fullmatch(r"[\w .,:/+-]*", text.name, re.ASCII):
        return f"'{text.name}'"
    return None


def is_null(value: exp.Expression) -> bool:
    """Whether the value is a typed NULL, as on the padded side of an outer join."""
    return isinstance(value, exp.Cast) and isinstance(unwrap(value.this), exp.Null)
