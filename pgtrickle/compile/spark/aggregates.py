"""Aggregates over rows with weights that Spark computes exactly as PostgreSQL does."""

from __future__ import annotations

from sqlglot import exp

from pgtrickle.compile.postgres import decimal_nan, form_name
from pgtrickle.compile.spark.expressions import NotOnSpark
from pgtrickle.query.conditions import unwrap
from pgtrickle.query.plan import Aggregate, Column
from pgtrickle.query.types import BOOL, INT8, Form


def forms_needed(plan: Aggregate) -> list[tuple[Column, Form]]:
    """The forms of the input's columns that an aggregation on Spark reads; raises NotOnSpark if Spark cannot run it."""
    forms: list[tuple[Column, Form]] = []
    for key in plan.keys:
        if not key.type.has_key:
            raise NotOnSpark(f"equal values of {key.type.name} can print differently, PostgreSQL groups them")
        forms += [(key, "key"), (key, "text")]
    for _, call in plan.calls:
        forms += _call(plan, call)[1]
    return forms


def call_sql(plan: Aggregate, call: exp.Expression, column: Column, form: Form) -> str:
    """Spark SQL for the aggregate's value in the given form."""
    text, _ = _call(plan, call)
    if form == "native":
        if isinstance(call, exp.Min | exp.Max):
            argument = next(item for item in plan.input.columns if item.id == unwrap(call.this).name)
            return f"{call.key}({form_name(argument, 'native')})"
        return f"CAST({text} AS {'BOOLEAN' if column.type.oid == BOOL else 'BIGINT'})"
    if form == "key" and not column.type.text_is_identity:
        # The same text as from PostgreSQL's trim_scale().
        return f"IF(instr({text}, '.') > 0, TRIM(TRAILING '.' FROM TRIM(TRAILING '0' FROM {text})), {text})"
    return text


def _call(plan: Aggregate, call: exp.Expression) -> tuple[str, list[tuple[Column, Form]]]:
    columns = {column.id: column for column in plan.input.columns}
    if any(value and name not in {"this", "big_int"} for name, value in call.args.items()):
        raise NotOnSpark(f"{call.sql(dialect='postgres')} is computed by PostgreSQL")
    if isinstance(call, exp.Count) and isinstance(call.this, exp.Star):
        return "CAST(coalesce(sum(w), 0) AS STRING)", []
    argument = unwrap(call.this) if isinstance(call.this, exp.Expression) else None
    if isinstance(argument, exp.Distinct) and isinstance(call, exp.Count) and len(argument.expressions) == 1:
        inner = unwrap(argument.expressions[0])
        if isinstance(inner, exp.Column) and columns[inner.name].type.has_key:
            column = columns[inner.name]
            return f"CAST(count(DISTINCT {form_name(column, 'key')}) AS STRING)", [(column, "key")]
    if not isinstance(argument, exp.Column) or len(call.args.get("expressions") or []) > 0:
        raise NotOnSpark(f"{call.sql(dialect='postgres')} is computed by PostgreSQL")
    column = columns[argument.name]
    type_ = column.type
    text, native = form_name(column, "text"), form_name(column, "native")
    both: list[tuple[Column, Form]] = [(column, "text"), (column, "native")]
    if isinstance(call, exp.Count):
        return f"CAST(coalesce(sum(IF({text} IS NULL, 0, w)), 0) AS STRING)", [(column, "text")]
    if isinstance(call, exp.Sum) and (type_.is_integer or type_.is_decimal):
        total = f"CAST(sum(CAST({native} AS DECIMAL(38,{type_.scale})) * CAST(w AS DECIMAL(10,0))) AS STRING)"
        if type_.is_integer:
            wide = "DECIMAL(38,0)" if type_.oid == INT8 else "BIGINT"
            return f"CAST(sum(CAST({native} AS {wide}) * w) AS STRING)", [(column, "native")]
        return f"IF(max({native}) >= {decimal_nan(type_)}, 'NaN', {total})", [(column, "native")]
    if isinstance(call, exp.Min | exp.Max) and type_.has_native and type_.oid != BOOL:
        word = "min_by" if isinstance(call, exp.Min) else "max_by"
        return f"{word}({text}, {native})", both
    if isinstance(call, exp.LogicalAnd | exp.LogicalOr) and type_.oid == BOOL:
        word = "bool_and" if isinstance(call, exp.LogicalAnd) else "bool_or"
        return f"CAST({word}({native}) AS STRING)", [(column, "native")]
    raise NotOnSpark(f"{call.sql(dialect='postgres')} is computed by PostgreSQL")
