"""Compile a placed plan to one Spark SQL text over the fetched fragments.

Rows have their weight in `w`; columns have only the forms that something above reads. Operators that return nothing
because a fragment is empty are left out with it, so that the text contains only what can contribute rows.

Stream tables whose plans differ only in their fragments can **share** a text: the rows of all of them are in the same
tables, each row with the number of its stream table in `st`, and no operator combines rows with different numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sqlglot import exp

from pgtrickle.compile.postgres import form_name
from pgtrickle.compile.spark.aggregates import call_sql, forms_needed
from pgtrickle.compile.spark.arithmetic import number_sql
from pgtrickle.compile.spark.expressions import SparkExpressions
from pgtrickle.query.budget import check_text
from pgtrickle.query.constants import constant
from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Exists,
    Filter,
    Flip,
    Fragment,
    InnerJoin,
    Negate,
    Plan,
    Project,
    Regroup,
    UnionAll,
    used_ids,
)
from pgtrickle.query.types import BOOL, Form, PgType

FormSet = frozenset[tuple[Column, Form]]
Tables = Callable[[Fragment], str | None]


def forms_of(columns: Iterable[Column], form: Form = "text") -> FormSet:
    return frozenset((column, form) for column in columns)


def fragment_forms(plan: Plan, wanted: FormSet) -> dict[Fragment, FormSet]:
    """The forms to fetch for each fragment of a placed plan, so that the whole plan can return `wanted`."""
    found: dict[Fragment, FormSet] = {}
    _SparkCompiler(None, found).rows(plan, wanted)
    return found


SHARED = ("st",)  # additional columns of the rows of a shared text


class NotShareableError(Exception):
    """A plan returns a row even for empty input."""


def compile_spark(plan: Plan, wanted: FormSet, tables: Tables, shared: tuple[str, ...] = ()) -> str | None:
    """Spark SQL for the plan's rows: `wanted` and `w`, not consolidated. None if there can be no rows.

    `tables` returns a query for a fragment's rows, or None if the fragment is empty.
    """
    return _SparkCompiler(tables, {}, shared).rows(plan, wanted)


def _consolidated(rows: str, forms: FormSet, shared: tuple[str, ...]) -> str:
    """Spark SQL that merges equal rows, adds up their weights and drops rows with weight 0."""
    names = [*shared, *_names(forms)]
    group = f" GROUP BY {', '.join(names)}" if names else ""
    return f"SELECT {', '.join([*names, 'sum(w) AS w'])} FROM ({rows}){group} HAVING sum(w) <> 0"


def _names(forms: Iterable[tuple[Column, Form]]) -> list[str]:
    return sorted({form_name(column, form) for column, form in forms})


@dataclass
class _SparkCompiler:
    tables: Tables | None
    found: dict[Fragment, FormSet]
    shared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._left = [f"l.{name} AS {name}" for name in self.shared]
        self._left_group = [f"l.{name}" for name in self.shared]
        self._same = "".join(f" AND l.{name} = r.{name}" for name in self.shared)

    def rows(self, plan: Plan, wanted: FormSet) -> str | None:
        rows = self._rows(plan, wanted)
        return None if rows is None else check_text(rows)

    def _rows(self, plan: Plan, wanted: FormSet) -> str | None:
        match plan:
            case Fragment():
                self.found[plan] = self.found.get(plan, frozenset()) | wanted
                return "" if self.tables is None else self.tables(plan)
            case Filter(input=child, condition=condition):
                text, needed = _condition(child.columns, condition)
                rows = self.rows(child, wanted | needed)
                return None if rows is None else f"{self._select(wanted)} FROM ({rows}) WHERE {text}"
            case Project():
                return self._project(plan, wanted)
            case UnionAll(inputs=inputs, columns=columns):
                return self._union([(child, 1) for child in inputs], columns, wanted)
            case Negate(input=child):
                return self._union([(child, -1)], child.columns, wanted)
            case Regroup(new=new, old=old):
                return self._union([(new, 1), (old, -1)], plan.columns, wanted)
            case InnerJoin():
                return self._inner_join(plan, wanted)
            case Exists():
                return self._exists(plan, wanted)
            case Flip():
                return self._flip(plan, wanted)
            case Aggregate():
                return self._aggregate(plan, wanted)
            case _:
                raise AssertionError(f"{type(plan).__name__} on Spark")

    def _project(self, plan: Project, wanted: FormSet) -> str | None:
        items: dict[str, str] = {}
        below: set[tuple[Column, Form]] = set()
        by_id = {column.id: column for column in plan.input.columns}
        values = {column.id: value for column, value in plan.items}
        names = SparkExpressions(by_id)
        for column, form in wanted:
            value = values[column.id]
            if isinstance(value, exp.Column):
                source = by_id[value.name]
                below.add((source, form))
                items[form_name(column, form)] = form_name(source, form)
            elif (text := constant(value)) is not None:
                items[form_name(column, form)] = f"CAST({text} AS {spark_type(column.type, form)})"
            else:
                items[form_name(column, form)] = number_sql(value, column.type, form, names)
        below |= names.needed
        rows = self.rows(plan.input, frozenset(below))
        if rows is None or all(name == value for name, value in items.items()):
            return rows
        parts = [f"{value} AS {name}" for name, value in sorted(items.items())]
        return f"SELECT {', '.join([*self.shared, *parts, 'w'])} FROM ({rows})"

    def _union(self, terms: Sequence[tuple[Plan, int]], columns: tuple[Column, ...], wanted: FormSet) -> str | None:
        position = {column.id: i for i, column in enumerate(columns)}
        selects = []
        for child, sign in terms:
            pairs = [(column, form, child.columns[position[column.id]]) for column, form in wanted]
            rows = self.rows(child, frozenset((theirs, form) for _, form, theirs in pairs))
            if rows is None:
                continue
            named = sorted({(form_name(ours, form), form_name(theirs, form)) for ours, form, theirs in pairs})
            if len(terms) == 1 and sign > 0 and all(mine == theirs for mine, theirs in named):
                return rows
            items = [f"{theirs} AS {mine}" for mine, theirs in named]
            weight = "-w AS w" if sign < 0 else "w"
            selects.append(f"SELECT {', '.join([*self.shared, *items, weight])} FROM ({rows})")
        return " UNION ALL ".join(selects) if selects else None

    def _inner_join(self, plan: InnerJoin, wanted: FormSet) -> str | None:
        """Each input with the conditions that it completes."""
        conditions = [(used_ids(part), *_condition(plan.columns, part)) for part in plan.conditions]
        needed = wanted.union(*(forms for *_, forms in conditions))
        joined = ""
        known: set[str] = set()
        for i, child in enumerate(plan.inputs):
            rows = self.rows(child, _of(child, needed))
            if rows is None:
                return None
            before, known = known, known | {column.id for column in child.columns}
            if not i:
                joined = f"({rows}) j0"
                continue
            complete = [f"({text})" for ids, text, _ in conditions if ids <= known and not (i > 1 and ids <= before)]
            complete += [f"j0.{name} = j{i}.{name}" for name in self.shared]
            joined += f" JOIN ({rows}) j{i} ON {' AND '.join(complete) or 'true'}"
        weight = " * ".join(f"j{i}.w" for i in range(len(plan.inputs)))
        items = [*(f"j0.{name} AS {name}" for name in self.shared), *_names(wanted), f"{weight} AS w"]
        return f"SELECT {', '.join(items)} FROM {joined}"

    def _exists(self, plan: Exists, wanted: FormSet) -> str | None:
        text, needed = _condition((*plan.left.columns, *plan.right.columns), plan.condition)
        mine = _of(plan.left, wanted | needed)
        rows = self.rows(plan.left, mine)
        others = self.rows(plan.right, _of(plan.right, needed))
        if rows is None:
            return None
        kept = _names(_of(plan.left, wanted))
        if others is None:
            items = [*self.shared, *kept, *_marks("false", plan.mark, wanted), "w"]
            return f"SELECT {', '.join(items)} FROM ({rows})"
        grouped = [*self._left_group, *_names(mine), "l.w"]
        marks = _marks("coalesce(sum(r.w), 0) > 0", plan.mark, wanted)
        return (
            f"SELECT {', '.join([*self._left, *kept, *marks, 'l.w AS w'])}"
            f" FROM ({_consolidated(rows, mine, self.shared)}) l LEFT JOIN ({others}) r ON ({text}){self._same}"
            f" GROUP BY {', '.join(grouped)}"
        )

    def _flip(self, plan: Flip, wanted: FormSet) -> str | None:
        text, needed = _condition((*plan.left.columns, *plan.right.columns), plan.condition)
        mine, theirs = _of(plan.left, wanted | needed), _of(plan.right, needed)
        old = self._union([(plan.left, 1), (plan.left_delta, -1)], plan.left.columns, mine)
        change = self._union([(plan.right_delta, 1)], plan.right.columns, theirs)
        now = self.rows(plan.right, theirs)
        if old is None or change is None:
            return None
        names = [*self.shared, *_names(theirs), "w"]
        tagged = f"SELECT {', '.join(names)}, true AS changed FROM ({change})"
        if now is not None:
            tagged += f" UNION ALL SELECT {', '.join(names)}, false AS changed FROM ({now})"
        grouped = [*self._left_group, *_names(mine), "l.w"]
        counts = (
            f"SELECT {', '.join([*self._left, *_names(mine), 'l.w AS w'])}, sum(IF(r.changed, 0, r.w)) AS pgt_now,"
            f" sum(IF(r.changed, r.w, 0)) AS pgt_moved FROM ({_consolidated(old, mine, self.shared)}) l"
            f" JOIN ({tagged}) r ON ({text}){self._same} GROUP BY {', '.join(grouped)}"
        )
        kept = [*self.shared, *_names(_of(plan.left, wanted))]
        marks = _marks("IF(pgt_sign = 1, pgt_now > 0, pgt_now - pgt_moved > 0)", plan.mark, wanted)
        return (
            f"SELECT {', '.join([*kept, *marks, 'w * pgt_sign AS w'])} FROM ({counts})"
            f" CROSS JOIN (VALUES (1), (-1)) AS s(pgt_sign) WHERE (pgt_now > 0) <> (pgt_now - pgt_moved > 0)"
        )

    def _aggregate(self, plan: Aggregate, wanted: FormSet) -> str | None:
        keys = {key.id for key in plan.keys}
        needed = frozenset(forms_needed(plan)) | {pair for pair in wanted if pair[0].id in keys}
        rows = self.rows(plan.input, needed)
        if rows is None and plan.keys:
            return None
        if self.shared and not plan.keys:
            raise NotShareableError
        calls = {column.id: call for column, call in plan.calls}
        values = {}
        for column, form in wanted:
            name = form_name(column, form)
            if column.id not in keys:
                values[name] = call_sql(plan, calls[column.id], column, form)
            else:
                # Of equal values that print differently, choose the same one every time the group is computed.
                values[name] = name if name == form_name(column, "key") else f"min({name})"
        parts = [f"{value} AS {name}" for name, value in sorted(values.items())]
        grouped = [*self.shared, *(form_name(key, "key") for key in plan.keys)]
        group = f" GROUP BY {', '.join(grouped)}" if grouped else ""
        if rows is None:
            # Two forms of a column can have one name.
            nothing = {form_name(column, form): spark_type(column.type, form) for column, form in needed}
            nulls = "".join(f"CAST(NULL AS {type_}) AS {name}, " for name, type_ in sorted(nothing.items()))
            rows = f"SELECT {nulls}CAST(0 AS BIGINT) AS w WHERE false"
        # Without keys, an aggregate function ensures that there is one row, even if nothing above reads any call.
        weight = "CAST(1 AS BIGINT)" if grouped else "CAST(1 + 0 * count(*) AS BIGINT)"
        items = ", ".join([*self.shared, *parts, f"{weight} AS w"])
        return f"SELECT {items} FROM ({_consolidated(rows, needed, self.shared)}){group}"

    def _select(self, wanted: FormSet) -> str:
        return f"SELECT {', '.join([*self.shared, *_names(wanted), 'w'])}"


def _marks(value: str, mark: Column, wanted: FormSet) -> list[str]:
    """The mark in every requested form."""
    items = []
    for column, form in wanted:
        if column.id == mark.id:
            items.append(f"{value if form == 'native' else f'CAST({value} AS STRING)'} AS {form_name(mark, form)}")
    return sorted(set(items))


def spark_type(type_: PgType, form: Form) -> str:
    """The Spark type of a form in flight."""
    if form != "native":
        return "STRING"
    if type_.oid == BOOL:
        return "BOOLEAN"
    if type_.is_decimal:
        return f"DECIMAL({(type_.precision or 0) + 1},{type_.scale})"
    return "BIGINT"


def _condition(columns: Sequence[Column], condition: exp.Expression) -> tuple[str, FormSet]:
    translator = SparkExpressions({column.id: column for column in columns})
    text = translator.condition(condition)
    return text, frozenset(translator.needed)


def _of(plan: Plan, forms: FormSet) -> FormSet:
    own = {column.id for column in plan.columns}
    return frozenset(pair for pair in forms if pair[0].id in own)
