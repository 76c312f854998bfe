"""What is known of a query, once it is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from pgtrickle.ivm.program import Program
from pgtrickle.query.plan import Relation


@dataclass(frozen=True)
class Compiled:
    """What is known of a query: its relations, and its program or the reason why it has none."""

    shape: str  # changes when a relation or column it reads is renamed or retyped
    view: Relation
    program: Program | None
    reason: str | None
    fragment: str | None = None
    functions: tuple[str, ...] = ()  # that it calls and that are not PostgreSQL's own
    own_code: bool = True  # it may run code that is not PostgreSQL's own
