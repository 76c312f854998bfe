"""The delta plan of a stream table as text: a tree that shows what runs where, and why."""

from __future__ import annotations

from sqlglot import exp

from pgtrickle.catalog.stream_table import StreamTableRow
from pgtrickle.compile.placement import Placer
from pgtrickle.compile.postgres import compile_fragment
from pgtrickle.compile.sql_text import readable
from pgtrickle.query.conditions import conjunction
from pgtrickle.query.plan import (
    Aggregate,
    Exists,
    Filter,
    Flip,
    Fragment,
    InnerJoin,
    Join,
    KeyFilter,
    Negate,
    Plan,
    Project,
    Regroup,
    Scan,
    UnionAll,
    Values,
    Version,
    inputs_of,
)
from pgtrickle.refresh.planning.compiled import Compiled

_VERSIONS = {Version.NEW: "at the cut", Version.OLD: "at the frontier", Version.DELTA: "changes"}


def explain_program(row: StreamTableRow, compiled: Compiled) -> str:
    """How the stream table is refreshed, and its delta plan, as text for users."""
    lines = [f"stream table {row.label}", f"refresh mode: {row.refresh_mode}"]
    program = compiled.program
    if program is None:
        part = f": {compiled.fragment}" if compiled.fragment else ""
        return "\n".join([*lines, f"runs as: FULL, because {compiled.reason}{part}"])
    lines.append(f"runs as: {'FULL, because refresh_mode is FULL' if row.refresh_mode == 'FULL' else 'DIFFERENTIAL'}")
    key = ", ".join(row.key_columns) if row.key_columns else ("one row" if row.key_columns == [] else None)
    lines.append(f"rows are found by: {key or '__pgt_row_id, a hash of the row'}")
    if program.additive is not None:
        lines.append("groups: added up from the changes and the stored state")
    if program.finish:
        lines.append(f"finished by PostgreSQL in the apply: {len(program.finish)} step(s)")
    lines.append(f"placement: {row.placement}")
    assert program.change is not None
    placed = Placer("spark" if row.placement == "spark" else "auto").place(program.change)
    lines.append("delta plan:")
    _draw(placed, "  ", lines)
    return "\n".join(lines)


def _draw(plan: Plan, indent: str, lines: list[str]) -> None:
    if isinstance(plan, Fragment):
        lines.append(f"{indent}PostgreSQL: {_describe(plan.plan)}  [{plan.why}]")
        lines.append(f"{indent}  {_short(compile_fragment(plan.plan, ()).text)}")
        return
    if isinstance(plan, Project) and all(isinstance(value, exp.Column) for _, value in plan.items):
        _draw(plan.input, indent, lines)
        return
    lines.append(f"{indent}Spark: {_describe(plan)}")
    for child in inputs_of(plan)[: 2 if isinstance(plan, Regroup) else None]:
        _draw(child, indent + "  ", lines)


def _short(text: str, width: int = 140) -> str:
    text = readable(text)
    return text if len(text) <= width else text[: width - 1] + "…"


def _describe(plan: Plan) -> str:
    match plan:
        case Scan(relation=relation, version=version):
            return f"{relation.label} {_VERSIONS[version]}"
        case Values():
            return "constant rows"
        case KeyFilter(input=child, column=column):
            return f"{_describe(child)}, looked up by {column.name}"
        case Filter(input=child) | Project(input=child):
            return f"{_describe(child)}"
        case InnerJoin(conditions=conditions):
            return f"inner join on {conjunction(conditions).sql(dialect='postgres')}"
        case Join(kind=kind, condition=condition):
            return f"{kind} join on {condition.sql(dialect='postgres')}"
        case Exists():
            return "existence test"
        case Flip():
            return "rows whose existence test turned"
        case Aggregate(keys=keys):
            return f"group by {', '.join(key.name for key in keys) or 'nothing'}"
        case Regroup(new=new):
            return f"recompute touched groups: {_describe(new)}"
        case UnionAll():
            return "all of"
        case Negate():
            return "taken away"
        case Fragment(plan=inner):
            return _describe(inner)
