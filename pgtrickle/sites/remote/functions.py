"""Functions, operators and types of users in queries over several databases: compared at every cut, before they are used.

Expressions are evaluated where their columns are, so what they name must mean the same everywhere, and must not let anybody
run code with the reader's rights. Nothing tells us when something is replaced elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import psycopg

from pgtrickle.catalog.gate import pass_gate
from pgtrickle.errors import PgtrickleError, SourceChangedError
from pgtrickle.sites.remote.cut import RemoteCut

if TYPE_CHECKING:
    from pgtrickle.refresh.work import Work

_DESCRIBE = "SELECT function, definition, version, problem FROM pgtrickle._describe_functions(%s)"


class Databases(Protocol):
    """What is needed of RemoteDatabases, which looks here for functions that were replaced."""

    home: psycopg.Connection[Any]

    def ask(self, name: str, query: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]: ...
    def note(self, error: Exception, works: Sequence[Work]) -> None: ...


def describe_functions(remote: Databases, view: int) -> dict[str, list[tuple[Any, ...]]]:
    """What each of the databases that a view reads says of the functions that it calls."""
    home = remote.home
    rows = home.execute("SELECT pgtrickle._own_functions(%s::oid::regclass)", (view,)).fetchall()
    if not rows:
        return {}
    names = [name for (name,) in rows]
    databases = home.execute("SELECT pgtrickle._databases_behind(%s::oid::regclass)", (view,)).fetchall()
    return {database: remote.ask(database, _DESCRIBE, (names,)) for (database,) in databases}


def note_functions(home: psycopg.Connection[Any], described: Mapping[str, Sequence[tuple[Any, ...]]]) -> None:
    """Keep that for the check at creation."""
    for database, found in described.items():
        names, definitions, _, problems = (list(column) for column in zip(*found, strict=True))
        pass_gate(
            home, "note_functions", database=database, functions=names, definitions=definitions, problems=problems
        )


def compare_functions(remote: Databases, cuts: Mapping[str, RemoteCut], works: Sequence[Work]) -> None:
    """Who calls a function that is not the same in a database of the cut as here gets an error that says so."""
    for work in works:
        work.functions = {}
        if not work.calls or work.error is not None:
            continue
        here = {name: one for name, one, _, _ in remote.home.execute(_DESCRIBE, (list(work.calls),)).fetchall()}
        for database in set(work.row.databases) & cuts.keys():
            found = cuts[database].conn.execute(_DESCRIBE, (list(work.calls),)).fetchall()
            for name, definition, _, problem in found:
                if problem is not None or definition != here.get(name):
                    work.error = SourceChangedError(
                        f"{_label(name)} cannot be relied on in database {database}:"
                        f" {problem or 'it is not the same as here'}",
                        "Make it the same in both; the next refresh goes on.",
                    )
            work.functions[database] = {name: version for name, _, version, _ in found}


def _label(name: str) -> str:
    return name if name.startswith(("operator ", "type ")) else f"function {name}"


def replaced_functions(remote: Databases, works: Sequence[Work]) -> list[Work]:
    """Those that called functions elsewhere which were replaced since the cut."""
    found = []
    for work in works:
        for database, versions in work.functions.items():
            try:
                rows = remote.ask(database, _DESCRIBE, (list(versions),))
            except (psycopg.Error, PgtrickleError) as error:
                remote.note(error, [work])
                break
            if {name: version for name, _, version, _ in rows} != versions:
                found.append(work)
                break
    return found
