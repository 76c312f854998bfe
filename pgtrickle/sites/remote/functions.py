"""User-defined functions, operators and types in queries over several databases, which are compared at every cut.

Expressions are evaluated in the database that their columns are in, so the names in them must mean the same everywhere,
and must not let any role run code with the reader's rights. There is no notification if something is replaced in a
remote database.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import psycopg

from pgtrickle.catalog.gate import pass_gate
from pgtrickle.errors import PgtrickleError, SourceChangedError
from pgtrickle.sites.failures import Failures
from pgtrickle.sites.remote.cut import RemoteCut
from pgtrickle.sites.stream_tables import CutStreamTable, PlannedStreamTable, StreamTable

R = TypeVar("R", bound=CutStreamTable)
_DESCRIBE = "SELECT function, definition, version, problem FROM pgtrickle._describe_functions(%s)"


class Databases(Protocol):
    """The part of RemoteDatabases that is needed here. That class imports this module, so this one cannot import it."""

    home: psycopg.Connection[Any]

    def ask(self, name: str, query: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]: ...
    def note(self, error: Exception, readers: Iterable[StreamTable], failed: Failures) -> None: ...


def describe_functions(remote: Databases, view: int) -> dict[str, list[tuple[Any, ...]]]:
    """Descriptions of the functions that a view calls, from each remote database that it reads."""
    home = remote.home
    rows = home.execute("SELECT pgtrickle._user_objects(%s::oid::regclass)", (view,)).fetchall()
    if not rows:
        return {}
    names = [name for (name,) in rows]
    databases = home.execute("SELECT pgtrickle._source_databases(%s::oid::regclass)", (view,)).fetchall()
    return {database: remote.ask(database, _DESCRIBE, (names,)) for (database,) in databases}


def note_functions(home: psycopg.Connection[Any], described: Mapping[str, Sequence[tuple[Any, ...]]]) -> None:
    """Store these descriptions for the check at the creation of a stream table."""
    for database, found in described.items():
        names, definitions, _, problems = (list(column) for column in zip(*found, strict=True))
        pass_gate(
            home, "record_functions", database=database, functions=names, definitions=definitions, problems=problems
        )


def compare_functions(
    remote: Databases, cuts: Mapping[str, RemoteCut], readers: Sequence[PlannedStreamTable], failed: Failures
) -> dict[int, dict[str, dict[str, str]]]:
    """The versions of the functions that stream tables call, by stream table and database.

    A stream table fails if it calls a function which is not the same in a database of the cut as at home.
    """
    versions: dict[int, dict[str, dict[str, str]]] = {}
    for reader in failed.healthy(readers):
        if not reader.functions:
            continue
        names = (list(reader.functions),)
        here = {name: one for name, one, _, _ in remote.home.execute(_DESCRIBE, names).fetchall()}
        for database in set(reader.row.databases) & cuts.keys():
            found = cuts[database].conn.execute(_DESCRIBE, names).fetchall()
            for name, definition, _, problem in found:
                if problem is not None or definition != here.get(name):
                    error = SourceChangedError(
                        f"{_label(name)} cannot be relied on in database {database}:"
                        f" {problem or 'it is not the same as here'}",
                        "Make it the same in both; the next refresh goes on.",
                    )
                    failed.add(error, [reader])
            versions.setdefault(reader.row.pgt_id, {})[database] = {name: version for name, _, version, _ in found}
    return versions


def _label(name: str) -> str:
    return name if name.startswith(("operator ", "type ")) else f"function {name}"


def replaced_functions(remote: Databases, readers: Sequence[R], failed: Failures) -> list[R]:
    """The stream tables that called functions in remote databases which were replaced since the cut."""
    found = []
    for reader in readers:
        for database, versions in reader.remote.functions.items():
            try:
                rows = remote.ask(database, _DESCRIBE, (list(versions),))
            except (psycopg.Error, PgtrickleError) as error:
                remote.note(error, [reader], failed)
                break
            if {name: version for name, _, version, _ in rows} != versions:
                found.append(reader)
                break
    return found
