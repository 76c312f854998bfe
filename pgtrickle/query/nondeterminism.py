"""Detection of results that may vary although no data changed, because they depend on the order of rows."""

from __future__ import annotations

from sqlglot import exp
from sqlglot.errors import ParseError

from pgtrickle.query.dialect import parse

_LISTS = frozenset(
    {"array_agg", "string_agg", "json_agg", "jsonb_agg", "json_object_agg", "jsonb_object_agg", "xmlagg"}
)
_RANKS = frozenset({"row_number", "lag", "lead", "first_value", "last_value", "nth_value", "ntile"})


def nondeterministic_part(definition: str) -> str | None:
    """Describe the first part of a query whose result its rows do not determine; None if there is none."""
    try:
        tree = parse(definition)
    except ParseError:
        return None
    for node in tree.walk():
        match node:
            case exp.Limit() | exp.Offset() | exp.Fetch():
                return "LIMIT or OFFSET"
            case exp.Distinct() if node.args.get("on") is not None:
                return "DISTINCT ON"
            case exp.Window() if (name := _name(node.this)) in _RANKS:
                return f"{name}() among rows that it orders alike"
            case exp.Func() if (name := _name(node)) in _LISTS and node.find(exp.Order) is None:
                return f"{name}() without ORDER BY"
            case exp.Func() if _name(node) == "mode":
                return "mode() among values that are as frequent"
    return None


def _name(node: object) -> str:
    if isinstance(node, exp.Anonymous):
        return str(node.this).lower().rpartition(".")[2]
    if isinstance(node, exp.Func):
        return str(node.sql(dialect="postgres").partition("(")[0]).lower()
    return ""
