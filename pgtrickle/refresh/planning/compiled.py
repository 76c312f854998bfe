"""The result of compiling a query."""

from __future__ import annotations

from dataclasses import dataclass

from pgtrickle.ivm.program import Program
from pgtrickle.query.plan import Relation


@dataclass(frozen=True)
class Compiled:
    """The result of compiling a query: its view, and its program or the reason why it has none."""

    shape: str  # changes when a relation or column that the query reads is renamed or retyped
    view: Relation
    program: Program | None
    reason: str | None
    fragment: str | None = None
    functions: tuple[str, ...] = ()  # user-defined functions, operators and types that it uses
    time_dependent: bool = False  # the result may change although the sources do not
    own_code: bool = True  # it may run user-defined code
