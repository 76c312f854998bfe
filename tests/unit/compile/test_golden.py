"""Golden cases of placement and of the compilers to PostgreSQL's and Spark's SQL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import pytest
from psycopg import sql

from pgtrickle import compile as compilers
from pgtrickle.compile.apply import (
    Target,
    additive_statement,
    new_row_ids_statement,
    replace_statement,
    resync_statement,
    rows_statement,
)
from pgtrickle.compile.citus_apply import citus_key, citus_statements, stage_ddl
from pgtrickle.compile.placement import AcrossDatabases, Placer
from pgtrickle.compile.postgres import compile_fragment
from pgtrickle.compile.pushdown import push_down
from pgtrickle.compile.shared_scan import SharedScan, change_scan
from pgtrickle.compile.spark.aggregates import call_sql, forms_needed
from pgtrickle.compile.spark.arithmetic import number_sql
from pgtrickle.compile.spark.compiler import SHARED, NotShareableError, compile_spark, forms_of, fragment_forms
from pgtrickle.compile.spark.expressions import NotOnSpark, SparkExpressions
from pgtrickle.compile.sql_text import SqlText
from pgtrickle.ivm.differentiate import differentiate
from pgtrickle.query.plan import (
    Aggregate,
    Column,
    Filter,
    Fragment,
    Negate,
    Plan,
    Project,
    UnionAll,
    Values,
    Version,
    at_version,
    scans_of,
)
from pgtrickle.query.types import Form
from tests.support.golden import GoldenCase, golden_cases
from tests.support.golden_schema import bind_golden, nodes, normalise_golden, program_of
from tests.support.plan_text import plan_text
from tests.support.sql_layout import sql_layout

Sections = dict[str, str]


def plan_of(case: GoldenCase) -> Plan:
    """What `plan` says: the query as it is bound, the query after rewrites, its old state, its change (default), what
    a program computes of its change (for groups that add up, the rows to add), or the query minus no rows.
    """
    kind = case.option("plan", "change")
    if kind == "bound":
        return bind_golden(case.sql)[0]
    plan = normalise_golden(case.sql)
    match kind:
        case "query":
            return plan
        case "old":
            return at_version(plan, Version.OLD)
        case "change":
            change = differentiate(plan)
            assert change is not None
            return change
        case "program":
            change = program_of(case.sql).change
            assert change is not None
            return change
        case "minus":
            return UnionAll((plan, Negate(Values(plan.columns, ()))), plan.columns)
        case _:
            raise AssertionError(f"{case.id}: there is no plan {kind!r}")


def placed_plan(case: GoldenCase) -> Plan:
    return Placer("spark" if case.flag("spark") else "auto").place(plan_of(case))


def filled(text: SqlText) -> str:
    """The statement with the names of its holes in braces."""
    return text.fill(lambda name: sql.SQL("{" + name + "}")).as_string(None)


def form_texts(forms: Sequence[tuple[Column, Form]]) -> str:
    return ", ".join(sorted(f"{column.id} {form}" for column, form in set(forms))) or "none"


def forms_option(case: GoldenCase, columns: Sequence[Column]) -> tuple[tuple[Column, Form], ...]:
    names = case.option("forms", "text").split(", ")
    found: list[tuple[Column, Form]] = []
    for column in columns:
        if "text" in names:
            found.append((column, "text"))
        if "key" in names and column.type.has_key:
            found.append((column, "key"))
        if "native" in names and column.type.has_native:
            found.append((column, "native"))
    return tuple(found)


def postgres(case: GoldenCase) -> Sections:
    plan = plan_of(case)
    text = compile_fragment(plan, forms_option(case, plan.columns), in_parts=case.flag("in_parts"))
    found = {"sql": sql_layout(filled(text))}
    if text.keys:
        origins = [f"key{i}: {key.column.id} in {key.origin_column.id} of" for i, key in enumerate(text.keys)]
        found["keys"] = "\n".join(
            f"{line}\n  {plan_text(key.origin).replace(chr(10), chr(10) + '  ')}"
            for line, key in zip(origins, text.keys, strict=True)
        )
    return found


def placement(case: GoldenCase) -> Sections:
    return {"placed": plan_text(placed_plan(case))}


def pushdown(case: GoldenCase) -> Sections:
    before = next(node for node in nodes(plan_of(case)) if isinstance(node, Project))
    after = push_down(before)
    return {"before": plan_text(before), "after": "not possible" if after is None else plan_text(after)}


def shared_scan(case: GoldenCase) -> Sections:
    """Several queries, which `;` separates."""
    shared, slices = None, []
    for text in case.sql.split(";"):
        plan = differentiate(normalise_golden(text))
        assert plan is not None
        scan = change_scan(plan)
        if scan is None:
            return {"refused": plan_text(plan)}
        shared = shared or SharedScan(scan.relation)
        slices.append(shared.add(plan, forms_option(case, plan.columns)))
    assert shared is not None
    columns = [", ".join(f"{name}: {wide}" for name, wide in one.columns.items()) for one in slices]
    return {
        "sql": sql_layout(filled(shared.statement())),
        "slices": "\n".join(f"{text}, if {one.flag}" for text, one in zip(columns, slices, strict=True)),
    }


def target_of(case: GoldenCase, columns: tuple[Column, ...], key: tuple[str, ...] | None) -> Target:
    return Target(
        "shop.st",
        columns,
        key,
        null_keys=case.flag("null_keys"),
        empty=case.flag("empty"),
        stage="stage" if case.flag("staged") else None,
        former_row_ids=case.flag("former_row_ids"),
    )


def apply(case: GoldenCase) -> Sections:
    program = program_of(case.sql)
    target = target_of(case, program.output, program.key)
    relation = "loaded" if case.flag("loaded") else None
    kind = case.option("statement")
    if kind in {"additive", "resync"}:
        assert program.additive is not None
        text = (
            additive_statement(target, program.additive, program.finish, "state", relation)
            if kind == "additive"
            else resync_statement(target, program.additive, program.finish, "state")
        )
    elif kind == "replace":
        text = replace_statement(target, program.core.columns, program.finish, relation)
    elif kind == "row_ids":
        text = new_row_ids_statement(target)
    else:
        assert kind == "rows"
        text = rows_statement(target, program.core.columns, program.finish, relation)
    return {"sql": sql_layout(text)}


def citus_apply(case: GoldenCase) -> Sections:
    program = program_of(case.sql)
    distribution_column = case.option("distributed_by") or None
    key = citus_key(program.output, program.key, distribution_column)
    target = Target("shop.st", program.output, key, stage="stage")
    statements = citus_statements(target, distribution_column)
    found = {"key": "the whole row" if key is None else ", ".join(key), "stage": stage_ddl("stage", target)}
    return found | {f"sql {i + 1}": sql_layout(text) for i, text in enumerate(statements)}


def spark_expressions(case: GoldenCase) -> Sections:
    """The condition of the query's one filter."""
    condition = next(node for node in nodes(bind_golden(case.sql)[0]) if isinstance(node, Filter))
    names = SparkExpressions({column.id: column for column in condition.input.columns})
    return {"spark": names.condition(condition.condition), "forms": form_texts([*names.needed])}


def spark_arithmetic(case: GoldenCase) -> Sections:
    """The query's output columns, each in every form."""
    plan = bind_golden(case.sql)[0]
    assert isinstance(plan, Project)
    found = {}
    for column, value in plan.items:
        texts = []
        forms: list[Form] = ["text", "key", "native"]
        for form in forms:
            names = SparkExpressions({one.id: one for one in plan.input.columns})
            try:
                texts.append(f"{form}: {number_sql(value, column.type, form, names)}")
            except NotOnSpark as error:
                texts.append(f"{form}: refused, {error}")
        found[f"{column.name} {column.type.name}"] = "\n".join(texts)
    return found


def spark_aggregates(case: GoldenCase) -> Sections:
    """Every aggregate of the query in every form of its type."""
    plan = next(node for node in nodes(normalise_golden(case.sql)) if isinstance(node, Aggregate))
    found = {"aggregation": plan_text(plan), "forms": form_texts(forms_needed(plan))}
    for column, call in plan.calls:
        forms: list[Form] = ["text"]
        forms += ["key"] if column.type.has_key else []
        forms += ["native"] if column.type.has_native else []
        found[column.id] = "\n".join(f"{form}: {call_sql(plan, call, column, form)}" for form in forms)
    return found


def spark_compiler(case: GoldenCase) -> Sections:
    """The text over tables named `f0` and so on. Fragments that read only the tables of `empty` are empty."""
    placed = placed_plan(case)
    wanted = forms_of(placed.columns)
    fragments = list(fragment_forms(placed, wanted).items())
    none = set(filter(None, case.option("empty").split(", ")))
    tables = {
        fragment: None if {scan.relation.name for scan in scans_of(fragment.plan)} <= none else f"SELECT * FROM f{i}"
        for i, (fragment, _) in enumerate(fragments)
    }
    found = {
        f"f{i}: {form_texts([*forms])}": plan_text(fragment.plan)
        for i, (fragment, forms) in enumerate(fragments)
        if tables[fragment] is not None
    }
    text = compile_spark(placed, wanted, tables.__getitem__, SHARED if case.flag("shared") else ())
    return found | {"sql": "(no rows)" if text is None else sql_layout(text)}


# By module; those of the package `spark` have its name before theirs.
SUBJECTS: dict[str, Callable[[GoldenCase], Sections]] = {
    "apply": apply,
    "citus_apply": citus_apply,
    "placement": placement,
    "postgres": postgres,
    "pushdown": pushdown,
    "shared_scan": shared_scan,
    "spark_aggregates": spark_aggregates,
    "spark_arithmetic": spark_arithmetic,
    "spark_compiler": spark_compiler,
    "spark_expressions": spark_expressions,
}
HELPERS = {"__init__", "spark___init__", "sql_text"}


@pytest.mark.parametrize("case", golden_cases("compile"), ids=lambda case: case.id)
def test_golden(case: GoldenCase, update_golden: bool) -> None:
    try:
        found = SUBJECTS[case.subject](case)
    except (NotOnSpark, AcrossDatabases) as error:
        found = {"refused": str(error)}
    except NotShareableError:
        found = {"refused": "not shareable"}
    case.check(found, update=update_golden)


def test_every_compiler_has_golden_cases() -> None:
    root = Path(compilers.__path__[0])
    modules = {"_".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("*.py")} - HELPERS
    assert modules == SUBJECTS.keys()
    assert {case.subject for case in golden_cases("compile")} == modules


def test_every_kind_of_node_is_compiled_for_postgresql() -> None:
    compiled = {
        type(node) for case in golden_cases("compile") if case.subject == "postgres" for node in nodes(plan_of(case))
    }
    assert compiled == set(get_args(Plan)) - {Fragment}
