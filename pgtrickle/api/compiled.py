"""What a compiled query must satisfy to become a stream table."""

from __future__ import annotations

from collections.abc import Iterable

from pgtrickle.compile.placement import AcrossDatabases
from pgtrickle.errors import NotDifferentiableError
from pgtrickle.ivm.program import Program
from pgtrickle.refresh.planning.compiled import Compiled
from pgtrickle.refresh.planning.jobs import require_placeable


def require_differential(name: str, compiled: Compiled) -> None:
    if compiled.program is None:
        part = f": {compiled.fragment}" if compiled.fragment else ""
        raise NotDifferentiableError(
            f"{name} cannot be maintained differentially: {compiled.reason}{part}",
            "Use refresh_mode AUTO or FULL, or change that part of the query.",
        )


def require_placement(name: str, compiled: Compiled) -> None:
    """Refuse a query over several databases that Spark cannot compute: no database could compute it alone."""
    reason, part = compiled.reason, compiled.fragment
    if compiled.program is not None:
        try:
            require_placeable(compiled.program)
        except AcrossDatabases as error:
            reason, part = str(error), None
        else:
            return
    raise NotDifferentiableError(
        f"{name} reads other databases, and no database can compute it alone: {reason}{f': {part}' if part else ''}",
        "Change that part of the query, or compute it in one of them: a stream table there can be read here."
        " In a Citus cluster, refresh_mode FULL has the coordinator compute it, at no moment common to all nodes.",
    )


def storable_key(program: Program | None) -> Iterable[str] | None:
    """The query's key if an index can hold it, otherwise None."""
    if program is None or program.key is None:
        return None
    types = {column.name: column.type for column in program.output}
    return program.key if all(types[name].groupable for name in program.key) else None
