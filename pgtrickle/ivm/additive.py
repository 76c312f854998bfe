"""Additive aggregates: the change of a group is the sum over the change of its rows.

These are count, and sum and avg over integers and numeric(p,s). The state of a group is its number of rows and, for
each argument, the number of values, their sum and the number of NaNs (a NaN could never be removed from a running sum).
PostgreSQL computes values from the state, so their digits are exactly PostgreSQL's.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlglot import exp

from pgtrickle.query.conditions import cast_to, unwrap
from pgtrickle.query.plan import Aggregate, Column, NewColumn, Plan, Project, TypesOf
from pgtrickle.query.types import INT8, NUMERIC, PgType

BIGINT = PgType(INT8, -1, "bigint")
TOTAL = PgType(NUMERIC, -1, "numeric")


@dataclass(frozen=True)
class Argument:
    """One summed expression: its value without NaN, and a mark for NaN."""

    value: Column
    nan: Column


@dataclass(frozen=True)
class AdditiveForm:
    """How a top-level aggregation is maintained: the rows to add up, and how the state becomes values."""

    input: Plan  # keys and arguments
    keys: tuple[Column, ...]
    arguments: tuple[Argument, ...]
    values: tuple[tuple[Column, exp.Expression], ...]  # each aggregate as an expression over the state's columns

    @property
    def key_columns(self) -> list[tuple[str, PgType]]:
        """Names and types of the keys in the state."""
        return [(f"k{i}", key.type) for i, key in enumerate(self.keys)]

    @property
    def state_columns(self) -> list[tuple[str, PgType]]:
        """Names and types of the columns that follow the keys in the state."""
        columns = [("n", BIGINT)]
        for i in range(len(self.arguments)):
            columns += [(f"count{i}", BIGINT), (f"sum{i}", TOTAL), (f"nan{i}", BIGINT)]
        return columns


def additive_form(plan: Aggregate, new_column: NewColumn, types_of: TypesOf) -> AdditiveForm | None:
    """The aggregation in additive form; None if one of its aggregates is not additive."""
    if not plan.calls:
        return None
    items: list[tuple[Column, exp.Expression]] = [(key, key.ref()) for key in plan.keys]
    arguments: dict[exp.Expression, int] = {}
    found: list[Argument] = []
    values: list[tuple[Column, exp.Expression]] = []
    for column, call in plan.calls:
        value, argument = _take_apart(call)
        if value is None:
            return None
        if argument is None:
            values.append((column, exp.column("n")))
            continue
        type_ = types_of(plan.input.columns, [_without_filter(argument)])[0]
        adds_up = type_.is_integer or type_.is_decimal
        if not adds_up and not isinstance(value, exp.Count):
            return None
        if argument not in arguments:
            arguments[argument] = len(found)
            one_each = exp.Case().when(
                exp.Not(this=exp.Is(this=exp.Paren(this=argument.copy()), expression=exp.null())),
                exp.Literal.number(1),
            )
            counted = (argument, type_) if adds_up else (one_each, BIGINT)
            found.append(_argument(*counted, new_column, items))
        values.append((column, _finish(value, arguments[argument], column.type)))
    return AdditiveForm(Project(plan.input, tuple(items)), plan.keys, tuple(found), tuple(values))


def _take_apart(call: exp.Expression) -> tuple[exp.Expression | None, exp.Expression | None]:
    """The aggregate, and its argument with FILTER folded in.

    There is no argument for count(*), and no aggregate if it is not additive.
    """
    condition = None
    if isinstance(call, exp.Filter):
        condition = call.expression.this
        call = call.this
    if not isinstance(call, exp.Count | exp.Sum | exp.Avg):
        return None, None
    if any(value and name not in {"this", "big_int"} for name, value in call.args.items()):
        return None, None
    argument: exp.Expression = unwrap(call.this)
    if isinstance(argument, exp.Distinct | exp.Order):
        return None, None
    if isinstance(argument, exp.Star):
        if condition is None:
            return call, None
        argument = exp.Literal.number(1)
    if condition is not None:
        argument = exp.Case().when(condition.copy(), argument.copy())
    return call, argument


def _without_filter(argument: exp.Expression) -> exp.Expression:
    """The argument without the CASE that FILTER became: a CASE loses the typmod of its branch."""
    if isinstance(argument, exp.Case) and argument.this is None and argument.args.get("default") is None:
        branches = argument.args["ifs"]
        if len(branches) == 1:
            return branches[0].args["true"]  # type: ignore[no-any-return]
    return argument


def _argument(
    value: exp.Expression, type_: PgType, new_column: NewColumn, items: list[tuple[Column, exp.Expression]]
) -> Argument:
    nan = cast_to(exp.null(), "bigint")
    plain = value
    if type_.oid == NUMERIC:
        is_nan = exp.EQ(this=exp.Paren(this=value.copy()), expression=_nan())
        nan = cast_to(exp.Case().when(is_nan, exp.Literal.number(1)), "bigint")
        plain = exp.Anonymous(this="nullif", expressions=[value.copy(), _nan()])
    argument = Argument(new_column("value", type_), new_column("nan", BIGINT))
    items += [(argument.value, plain), (argument.nan, nan)]
    return argument


def _nan() -> exp.Expression:
    return cast_to(exp.Literal.string("NaN"), "numeric")


def _finish(call: exp.Expression, i: int, type_: PgType) -> exp.Expression:
    count, total, nan = exp.column(f"count{i}"), exp.column(f"sum{i}"), exp.column(f"nan{i}")
    if isinstance(call, exp.Count):
        return count
    value: exp.Expression = total
    if isinstance(call, exp.Avg):
        value = exp.Div(this=total, expression=cast_to(count.copy(), "numeric"), typed=True)
    case = exp.Case().when(exp.EQ(this=count, expression=exp.Literal.number(0)), exp.null())
    case = case.when(exp.GT(this=nan, expression=exp.Literal.number(0)), _nan())
    return cast_to(exp.Paren(this=case.else_(value)), type_.name)
