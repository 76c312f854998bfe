"""The part of a database's Python API that is about other databases: the registry, sets of them, foreign tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from pgtrickle.api.errors import plain_errors
from pgtrickle.catalog.databases import (
    DatabaseSet,
    RegisteredDatabase,
    register,
    register_set,
    registered,
    registered_sets,
    remove,
    storable,
)
from pgtrickle.catalog.install import require_installed
from pgtrickle.errors import InvalidQueryError, PgtrickleError
from pgtrickle.refresh.pipeline import Engine
from pgtrickle.sites.remote.connections import check_catalog, errors_naming
from pgtrickle.sites.remote.databases import NotThereError


class OtherDatabases:
    """Other databases whose tables queries may name, alone or as members of a set."""

    conn: psycopg.Connection[Any]
    engine: Engine

    def add_database(self, name: str, dsn: str, *, roles: Sequence[str] = ()) -> RegisteredDatabase:
        """Register another database, whose tables queries may then name as `name.schema.table`.

        A password must not be in the DSN: name a variable instead, as `${PGTRICKLE_CRM_PASSWORD}`. `roles` may use it besides
        administrators. Registered again under the same name it gets another DSN.
        """
        require_installed(self.conn)
        known = storable(dsn)
        with self.engine.connections.open(name, known) as conn, errors_naming(name):
            check_catalog(conn, name)
            row = conn.execute("SELECT pgtrickle._node()").fetchone()
        assert row is not None
        with plain_errors():
            register(self.conn, name, known, row[0], roles)
            self.engine.sets.update_members()
        return next(one for one in self.databases() if one.name == name)

    def databases(self) -> list[RegisteredDatabase]:
        """Other databases whose tables queries may name."""
        require_installed(self.conn)
        return registered(self.conn)

    def check_database(self, name: str) -> str | None:
        """Why a registered database cannot be read; None if it can."""
        require_installed(self.conn)
        try:
            with self.engine.remote.open(name) as conn:
                check_catalog(conn, name)
                row = conn.execute(
                    "SELECT pgtrickle._node(), pg_is_in_recovery(),"
                    " has_table_privilege('pgtrickle.pgt_consumers', 'INSERT, UPDATE, DELETE')"
                ).fetchone()
        except (PgtrickleError, psycopg.Error) as error:
            return error.message if isinstance(error, PgtrickleError) else str(error).strip()
        assert row is not None
        node, in_recovery, may_write = row
        twins = [one.name for one in self.databases() if one.node == node and one.name != name]
        if in_recovery:
            return "it is on a standby: register its primary"
        if not may_write:
            return "its user is not the service role there: `pgtrickle install --service-role` names it"
        if twins:
            return f"it is the same database as {twins[0]}"
        return None

    def remove_database(self, name: str) -> None:
        require_installed(self.conn)
        with plain_errors():
            remove(self.conn, name)

    def import_table(self, database: str, table: str) -> None:
        """Make a table of a registered database known here, so that SQL can name it too; or look at it again."""
        require_installed(self.conn)
        try:
            with plain_errors():
                self.engine.sets.import_table(database, table)
        except NotThereError as error:
            raise InvalidQueryError(
                f"database {error.database} has no table {table}", "Name it as schema.table; mind who may see it there."
            ) from error

    def add_database_set(
        self,
        name: str,
        members: Sequence[str] = (),
        *,
        pattern: str | None = None,
        server: str | None = None,
        roles: Sequence[str] = (),
    ) -> DatabaseSet:
        """Register a set of databases: `name.schema.table` then stands for that table in all of them.

        Members are the registered databases that are named, and those whose names fit the pattern (`tenant_*`), also
        those that are registered later. With the DSN of a server its databases that fit it are registered by themselves.
        """
        require_installed(self.conn)
        if not members and pattern is None:
            raise InvalidQueryError(
                f"set {name} has neither members nor a pattern", "Name databases, or give a pattern."
            )
        if server is not None and pattern is None:
            raise InvalidQueryError(f"set {name} has a server but no pattern", "Give one, such as tenant_*.")
        with plain_errors():
            register_set(self.conn, name, pattern, members, storable(server) if server is not None else None, roles)
            self.engine.sets.update_members()
        return next(one for one in self.database_sets() if one.name == name)

    def database_sets(self) -> list[DatabaseSet]:
        """Sets of databases, with their members."""
        require_installed(self.conn)
        return registered_sets(self.conn)

    def resolve_foreign_table(self, table: str, database: str | None = None) -> str | None:
        """Say which registered database a foreign table of postgres_fdw stands for, or find out; None where that fails."""
        require_installed(self.conn)
        with plain_errors():
            row = self.conn.execute("SELECT %s::regclass::oid::bigint", (table,)).fetchone()
            assert row is not None
            return self.engine.remote.servers.resolve(row[0], database)
