"""Jobs: what a refresh reads for one stream table, the Spark SQL over it, and the delta that the apply receives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from sqlglot import exp

from pgtrickle.compile.placement import AcrossDatabases, Placement, Placer
from pgtrickle.compile.postgres import form_name
from pgtrickle.compile.spark.compiler import FormSet, Tables, compile_spark, forms_of, fragment_forms
from pgtrickle.compile.spark.expressions import NotOnSpark
from pgtrickle.ivm.additive import AdditiveForm
from pgtrickle.ivm.key_bounds import is_chain
from pgtrickle.ivm.program import Program
from pgtrickle.query.budget import OverBudget
from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Fragment,
    Negate,
    Plan,
    Relation,
    Scan,
    UnionAll,
)
from pgtrickle.query.types import INT8, PgType
from pgtrickle.refresh.fetch.fetcher import Fetcher
from pgtrickle.refresh.fetch.medium import T

if TYPE_CHECKING:
    from pgtrickle.refresh.planning.compiled import Compiled

MOST_ON_SPARK = 1000  # operators of one stream table; Spark plans a change of that size within seconds
ZERO = "^-?0([.]0*)?$"  # matches a zero in every way that it is printed


@dataclass(frozen=True)
class Output:
    """The delta in Spark SQL: its weight, its values as strings, the rows below it, and what groups these, if anything.

    It includes rows that change nothing: filtering them with HAVING takes a quarter of Spark's whole cost, and costs
    nothing in Arrow.
    """

    weight: str
    values: tuple[str, ...]
    rows: str
    group: tuple[str, ...] | None = None

    def select(self, names: Sequence[str], more: str = "", shared: tuple[str, ...] = ()) -> str:
        items = [*shared, f"CAST({self.weight} AS BIGINT) AS w"]
        items += [f"{value} AS {name}" for value, name in zip(self.values, names, strict=True)]
        group = (*shared, *self.group) if self.group is not None else ()
        grouped = f" GROUP BY {', '.join(group)}" if group else ""
        return f"SELECT {more}{', '.join(items)} FROM ({self.rows}){grouped}"


@dataclass(frozen=True)
class SharedText:
    """What a job's Spark text depends on; jobs for which it is equal can share one text."""

    output: Output | None  # None if the result is certainly empty
    schemas: tuple[tuple[tuple[str, str], ...], ...] = ()  # of the tables, with columns sorted by name


@dataclass(frozen=True)
class Job:
    """A placed plan and how its rows become the columns of the delta."""

    plan: Plan
    forms: FormSet
    columns: tuple[str, ...]  # of the delta after the weight, in order
    shape: Callable[[str], Output]  # makes the delta from the plan's rows
    stored: Fragment | None = None  # the stored rows that the result of the query is compared with
    plain: Callable[[str], Output] | None = None  # used in place of `shape` if `stored` is empty
    adds_up: bool = True  # equal rows are summed above, so the job's input need not be consolidated
    sums: tuple[str, ...] = ("w",)  # columns that are all zero in rows that change nothing
    texts: dict[frozenset[Fragment], SharedText] = field(default_factory=dict, compare=False)  # by non-empty fragments

    @cached_property
    def fragments(self) -> dict[Fragment, FormSet]:
        return fragment_forms(self.plan, self.forms)

    def announce(self, fetcher: Fetcher[T]) -> None:
        """Announce everything that the job will read to the fetcher."""
        for fragment, forms in self.fragments.items():
            fetcher.want(fragment.plan, forms)

    def fetch(self, fetcher: Fetcher[T]) -> dict[Fragment, T]:
        return {fragment: fetcher.table(fragment.plan) for fragment in self.fragments}

    def output(self, tables: Tables, shared: tuple[str, ...] = ()) -> Output | None:
        """The delta over these tables, or None if it is certainly empty."""
        rows = compile_spark(self.plan, self.forms, tables, shared)
        if rows is None:
            return None
        if self.plain is not None and self.stored is not None and tables(self.stored) is None:
            return self.plain(rows)
        return self.shape(rows)


def rows_job(plan: Plan, columns: Sequence[Column], placement: Placement) -> Job:
    """The job for a change of rows: each distinct row with its weight."""
    placed = Placer(placement).place(plan)
    return _rows(placed, columns)


def _rows(placed: Plan, columns: Sequence[Column]) -> Job:
    forms = forms_of(columns)
    values = tuple(form_name(column, "text") for column in columns)

    def net(rows: str) -> Output:
        return Output("w", values, rows)

    def summed(rows: str) -> Output:
        return Output("sum(w)", values, rows, values)

    passed_on = isinstance(placed, Fragment)
    names = tuple(column.id for column in columns)
    return Job(placed, forms, names, net if passed_on else summed, adds_up=not passed_on)


def additive_job(additive: AdditiveForm, change: Plan, placement: Placement) -> Job:
    """The job for a change of groups: numbers of rows and sums to add to the state."""
    keys = forms_of(additive.keys)
    values: set[tuple[Column, str]] = set()
    group = tuple(form_name(key, "text") for key in additive.keys)
    sums = ["sum(w)"]
    for argument in additive.arguments:
        value, nan = form_name(argument.value, "native"), form_name(argument.nan, "native")
        values.add((argument.value, "native"))
        if argument.value.type.is_integer:  # never NaN
            count, count_nan = f"sum(IF({value} IS NULL, 0, w))", "0"
        else:
            values.add((argument.nan, "native"))
            count = f"sum(IF({value} IS NULL AND {nan} IS NULL, 0, w))"
            count_nan = f"sum(IF({nan} IS NULL, 0, w))"
        product = f"CAST({value} AS DECIMAL(38,{argument.value.type.scale or 0})) * CAST(w AS DECIMAL(10,0))"
        if argument.value.type.is_integer and argument.value.type.oid != INT8:
            product = f"{value} * w"  # sums of these types always fit into a bigint
        sums += [count, f"coalesce(sum({product}), 0)", count_nan]
    columns = [*(f"k{i}" for i in range(len(additive.keys))), *(name for name, _ in additive.state_columns)]
    strings = (*(form_name(key, "text") for key in additive.keys), *(f"CAST({item} AS STRING)" for item in sums))

    def shape(rows: str) -> Output:
        return Output("1", strings, rows, group)

    forms = frozenset({*keys, *((column, "native") for column, _ in values)})
    counted = tuple(name for name, _ in additive.state_columns)
    return Job(Placer(placement).place(change), forms, tuple(columns), shape, sums=counted)


def change_job(program: Program, change: Plan, placement: Placement) -> Job:
    """The job for a plan of the change of a program's result."""
    if program.additive is not None:
        return additive_job(program.additive, change, placement)
    return rows_job(change, program.core.columns, placement)


def _largest_jobs(program: Program, placement: Placement) -> Iterator[Job]:
    """The job for a change of all sources and, if Spark computes full refreshes, the job for the whole query."""
    assert program.change is not None
    yield change_job(program, program.change, placement)
    if placement == "spark":
        yield change_job(program, program.additive.input if program.additive is not None else program.core, placement)


def require_placeable(program: Program) -> None:
    """Raise AcrossDatabases if some part of the change or of the whole query can be computed nowhere."""
    try:
        for job in _largest_jobs(program, "spark"):
            _ = job.fragments  # raises if Spark lacks a form of a column that the plan needs
    except NotOnSpark as error:
        raise AcrossDatabases(str(error)) from error


def check_cost(program: Program, placement: Placement) -> None:
    """Raise OverBudget if planning a refresh may exceed its budget."""
    with suppress(AcrossDatabases, NotOnSpark):  # not a matter of cost; these have reasons of their own
        for job in _largest_jobs(program, placement):
            check_job(job)


def check_job(job: Job) -> None:
    """Raise OverBudget if the job's Spark text is too long, or has too many operators for Spark to plan."""
    if job.plan.operators > MOST_ON_SPARK:
        raise OverBudget(f"Spark would have to plan more than {MOST_ON_SPARK} operators")
    _ = job.fragments
    job.output(lambda fragment: "")


def full_job(compiled: Compiled, storage: Relation, placement: Placement) -> Job:
    """The job for a full refresh: the delta is the difference between the query's result and the stored rows."""
    new, columns = full_query(compiled, placement)
    is_view = isinstance(new, Scan) and new.relation is compiled.view
    placed = Fragment(new, "the whole query runs where its tables are") if is_view else Placer(placement).place(new)
    names = [column.name for column in columns]
    fields = {item.name: item for item in storage.columns}
    stored = Scan(
        storage, tuple((Column(f"s{i}", name, fields[name].type), fields[name]) for i, name in enumerate(names))
    )
    kept = Fragment(stored, "what is stored")
    difference = _rows(UnionAll((placed, Negate(kept)), tuple(columns)), columns)
    return replace(
        difference, stored=kept, plain=_rows(placed, columns).shape if isinstance(placed, Fragment) else None
    )


def full_query(compiled: Compiled, placement: str) -> tuple[Plan, tuple[Column, ...]]:
    """A plan of the whole query, and its columns.

    It is a scan of the query's view, except for `placement = spark` and for queries of one table, which can be read in
    parts.
    """
    program = compiled.program
    if program is not None and (placement == "spark" or is_chain(program.plan)):
        return program.plan, program.output
    return _whole_view(compiled.view)


def _whole_view(view: Relation) -> tuple[Plan, tuple[Column, ...]]:
    fields = tuple((Column(f"v{i}", item.name, item.type), item) for i, item in enumerate(view.columns))
    return Scan(view, fields), tuple(column for column, _ in fields)


def state_job(additive: AdditiveForm, placement: Placement) -> Job:
    """The job that recomputes the state of all groups."""
    if placement == "spark":
        return additive_job(additive, additive.input, placement)
    big = PgType(20, -1, "bigint")
    calls: list[tuple[Column, exp.Expression]] = [(Column("n", "n", big), exp.Count(this=exp.Star()))]
    for i, argument in enumerate(additive.arguments):
        value, nan = argument.value.ref(), argument.nan.ref()
        count = exp.Add(this=exp.Count(this=value.copy()), expression=exp.Count(this=nan.copy()))
        total = exp.Coalesce(this=exp.Sum(this=value.copy()), expressions=[exp.Literal.number(0)])
        calls += [
            (Column(f"count{i}", "count", big), count),
            (Column(f"sum{i}", "sum", PgType(1700, -1, "numeric")), total),
            (Column(f"nan{i}", "nan", big), exp.Count(this=nan.copy())),
        ]
    state = Aggregate(additive.input, additive.keys, tuple(calls))
    fragment = Fragment(state, "the whole query runs where its tables are")
    columns = state.columns
    names = [*(f"k{i}" for i in range(len(additive.keys))), *(column.id for column, _ in calls)]
    values = tuple(form_name(column, "text") for column in columns)
    return Job(fragment, forms_of(columns), tuple(names), lambda rows: Output("w", values, rows), adds_up=False)
