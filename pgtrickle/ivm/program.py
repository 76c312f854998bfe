"""What a refresh needs to know about a query, computed once: what to add up or recompute, and how rows are stored."""

from __future__ import annotations

from dataclasses import dataclass

from pgtrickle.ivm.additive import AdditiveForm, additive_form
from pgtrickle.ivm.differentiate import differentiate
from pgtrickle.ivm.fingerprint import check_fingerprint
from pgtrickle.ivm.key_bounds import is_chain
from pgtrickle.ivm.unique_key import key_columns
from pgtrickle.query.binder import Binder
from pgtrickle.query.plan import Aggregate, Column, Filter, Plan, Project, Regroup, Scan, scans_of, walk
from pgtrickle.query.rewrites.imply_filters import imply_filters
from pgtrickle.query.rewrites.normalise import normalise
from pgtrickle.query.unsupported import Unsupported

# A finish step: a filter or projection that PostgreSQL evaluates while it applies the delta.
Step = Filter | Project


@dataclass(frozen=True)
class Program:
    """How one query is maintained differentially."""

    output: tuple[Column, ...]  # the stream table's columns
    plan: Plan  # the whole query
    core: Plan  # the part that is maintained; `finish` computes the output from it
    finish: tuple[Step, ...]  # from the first to the last
    key: tuple[str, ...] | None
    additive: AdditiveForm | None
    change: Plan | None  # of the additive form's input if there is one, otherwise of the core

    @property
    def scans(self) -> list[Scan]:
        return scans_of(self.plan)


def build_program(text: str, binder: Binder) -> Program:
    """The program of a query given as PostgreSQL's canonical text; raises Unsupported with the reason."""
    bound = binder.bind_text(text)

    def types_of(columns, expressions):  # type: ignore[no-untyped-def]
        return binder.typing.types_of(list(columns), expressions)

    plan = normalise(imply_filters(bound.plan), binder.column, types_of)
    output = plan.columns
    key = key_columns(plan, output)
    core, finish = _peel(plan)
    additive = additive_form(core, binder.column, types_of) if isinstance(core, Aggregate) else None
    if additive is not None:
        narrowed = normalise(additive.input, binder.column, types_of)
        additive = AdditiveForm(narrowed, additive.keys, additive.arguments, additive.values)
    change = differentiate(additive.input if additive is not None else core)
    if change is None:
        raise Unsupported("the query reads no table")
    if key is None:
        check_fingerprint(plan)
    return Program(output, plan, core, finish, key, additive, change)


def _peel(plan: Plan) -> tuple[Plan, tuple[Step, ...]]:
    """Split off the operators at the top that only work on single rows."""
    steps: list[Step] = []
    while isinstance(plan, Filter | Project) and not is_chain(plan):
        steps.append(plan)
        plan = plan.input
    return plan, tuple(reversed(steps))


def is_recomputed(change: Plan) -> bool:
    """Whether any group of the query is recomputed from its rows."""
    return any(isinstance(node, Regroup) for node in walk(change))
