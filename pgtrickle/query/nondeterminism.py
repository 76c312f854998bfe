"""Detection of results that may vary although no data changed, because they depend on the order of rows."""

from __future__ import annotations

from sqlglot import exp
from sqlglot.errors import SqlglotError

from pgtrickle.query.budget import Budget, count_step, planning_within
from pgtrickle.query.dialect import parse
from pgtrickle.query.unsupported import Unsupported

_LISTS = frozenset(
    {"array_agg", "string_agg", "json_agg", "jsonb_agg", "json_object_agg", "jsonb_object_agg", "xmlagg"}
)
_RANKS = frozenset({"row_number", "lag", "lead", "first_value", "last_value", "nth_value", "ntile"})


# Functions that sqlglot has classes for. To print a node takes as long as all that is below it.
_NAMES: dict[type, str] = {
    exp.ArrayAgg: "array_agg",
    exp.FirstValue: "first_value",
    exp.GroupConcat: "string_agg",
    exp.JSONArrayAgg: "json_agg",
    exp.JSONBObjectAgg: "jsonb_object_agg",
    exp.JSONObjectAgg: "json_object_agg",
    exp.Lag: "lag",
    exp.LastValue: "last_value",
    exp.Lead: "lead",
    exp.Mode: "mode",
    exp.NthValue: "nth_value",
    exp.Ntile: "ntile",
    exp.RowNumber: "row_number",
}


def nondeterministic_part(definition: str) -> str | None:
    """Describe the first part of a query whose result its rows do not determine; None if there is none.

    Also None for a query that is too large to be looked through.
    """
    try:
        with planning_within(Budget()):
            return _first_part(parse(definition))
    except (SqlglotError, Unsupported):
        return None


def _first_part(tree: exp.Expression) -> str | None:
    for node in tree.walk():
        count_step()
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
    return _NAMES.get(type(node), "")
