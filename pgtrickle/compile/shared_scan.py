"""Several fragments over the changes of one table as one statement: the buffer is read once for all of them.

Every expression is a column of the wide rows, and every filter is a flag. An expression is evaluated only for the rows
of the fragment that uses it: on other rows it might fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlglot import exp

from pgtrickle.compile.postgres import buffered, expression_sql, form_name, form_sql
from pgtrickle.compile.sql_text import SqlText, hole
from pgtrickle.query.plan import Column, Filter, Plan, Project, Relation, Scan, Version
from pgtrickle.query.types import Form, PgType


@dataclass(frozen=True)
class Slice:
    """Where to find a fragment's rows among the wide ones: its columns, and the flag of its rows."""

    columns: dict[str, str]  # the fragment's name of each form -> the wide column
    flag: str | None


@dataclass
class SharedScan:
    """Builds one statement for several fragments over the changes of one relation."""

    relation: Relation
    columns: dict[str, tuple[str, PgType, Form]] = field(default_factory=dict)  # by expression
    flags: dict[str, str] = field(default_factory=dict)  # by condition
    _all_filtered: bool = True

    def add(self, plan: Plan, forms: Sequence[tuple[Column, Form]]) -> Slice:
        """Add a fragment to the statement; return where to find its rows."""
        values, conditions = _over_buffer(plan)
        flag = None
        condition = " AND ".join(f"({expression_sql(item)})" for item in conditions)
        if condition:
            flag = self.flags.setdefault(condition, f"f{len(self.flags)}")
        else:
            self._all_filtered = False
        columns = {}
        for column, form in forms:
            value = values[column.id]
            text = form_sql(f"({expression_sql(value)})", column.type, form)
            if condition and not isinstance(value, exp.Column):
                text = f"CASE WHEN {condition} THEN {text} END"
            columns[form_name(column, form)] = self.columns.setdefault(
                text, (f"x{len(self.columns)}", column.type, form)
            )[0]
        return Slice(columns, flag)

    def statement(self) -> SqlText:
        """The statement that returns the wide rows: columns, flags, weight."""
        items = [f"{text} AS {name}" for text, (name, _, _) in self.columns.items()]
        items += [f"coalesce({condition}, false) AS {name}" for condition, name in self.flags.items()]
        items.append("__pgt_w::bigint AS w")
        assert self.relation.buffer is not None
        where = f" WHERE {' OR '.join(self.flags)}" if self._all_filtered else ""
        return SqlText(f"SELECT {', '.join(items)} FROM (SELECT * FROM {hole(self.relation.buffer)}) AS c{where}")


def change_scan(plan: Plan) -> Scan | None:
    """The scan of changes below a plan of filters and projections; None for any other plan."""
    while isinstance(plan, Filter | Project):
        plan = plan.input
    return plan if isinstance(plan, Scan) and plan.version is Version.DELTA else None


def _over_buffer(plan: Plan) -> tuple[dict[str, exp.Expression], list[exp.Expression]]:
    """The plan's columns and conditions as expressions over the buffer's columns."""
    match plan:
        case Scan(relation=relation, fields=fields):
            return {column.id: buffered(item, relation.columns) for column, item in fields}, []
        case Filter(input=child, condition=condition):
            values, conditions = _over_buffer(child)
            return values, [*conditions, _replaced(condition, values)]
        case Project(input=child, items=items):
            values, conditions = _over_buffer(child)
            return {column.id: _replaced(value, values) for column, value in items}, conditions
        case _:
            raise AssertionError(f"{type(plan).__name__} over changes")


def _replaced(node: exp.Expression, values: dict[str, exp.Expression]) -> exp.Expression:
    def swap(found: exp.Expression) -> exp.Expression:
        if not isinstance(found, exp.Column):
            return found
        value = values[found.name].copy()
        return value if isinstance(value, exp.Column) else exp.Paren(this=value)

    return node.copy().transform(swap)
