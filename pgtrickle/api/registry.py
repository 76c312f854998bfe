"""The part of the Python API that deals with remote databases: the registry, database sets and foreign tables."""

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
from pgtrickle.refresh.engine import Engine
from pgtrickle.sites.remote.connections import check_catalog, errors_naming
from pgtrickle.sites.remote.databases import NotThereError


class OtherDatabases:
    """Methods for remote databases, whose tables queries can name individually or through a database set."""

    conn: psycopg.Connection[Any]
    engine: Engine

    def add_database(self, name: str, dsn: str, *, roles: Sequence[str] = ()) -> RegisteredDatabase:
        """Register a remote database; queries can then name its tables as `name.schema.table`.

        The DSN must not contain a password. Name an environment variable instead: `password=${PGTRICKLE_CRM_PASSWORD}`.
        In addition to administrators, the `roles` may use the database. To change the DSN of a registered database,
        register it again under the same name.
        """
        require_installed(self.conn)
        known = storable(dsn)
        with self.engine.connections.open(name, known) as conn, errors_naming(name):
            check_catalog(conn, name)
            row = conn.execute("SELECT pgtrickle._database_identity()").fetchone()
        assert row is not None
        with plain_errors():
            register(self.conn, name, known, row[0], roles)
            self.engine.sets.update_members()
        return next(one for one in self.databases() if one.name == name)

    def databases(self) -> list[RegisteredDatabase]:
        """The registered databases."""
        require_installed(self.conn)
        return registered(self.conn)

    def check_database(self, name: str) -> str | None:
        """The reason why a registered database cannot be read, or `None` if it can be."""
        require_installed(self.conn)
        try:
            with self.engine.remote.open(name) as conn:
                check_catalog(conn, name)
                row = conn.execute(
                    "SELECT pgtrickle._database_identity(), pg_is_in_recovery(),"
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
        """Remove a registered database or a database set. Drop the stream tables that name it first.

        A database that is a member of a set is taken out of the set.
        """
        require_installed(self.conn)
        with plain_errors():
            remove(self.conn, name)

    def import_table(self, database: str, table: str) -> None:
        """Import a table of a registered database, so that queries in SQL can name it.

        Importing a table again updates its definition here.
        """
        require_installed(self.conn)
        try:
            with plain_errors():
                self.engine.sets.import_table(database, table)
        except NotThereError as error:
            raise InvalidQueryError(
                f"database {error.database} has no table {table}",
                "Name it as schema.table; the user of the DSN must be allowed to see it.",
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
        """Register a database set; queries can then name `name.schema.table` to read that table in all its members.

        The members are the registered databases that you name, and those whose names match `pattern` (`tenant_*`),
        including databases registered later. If you pass the DSN of a `server`, the databases on it that match the
        pattern are registered automatically.
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
        """The registered database sets, with their members."""
        require_installed(self.conn)
        return registered_sets(self.conn)

    def resolve_foreign_table(self, table: str, database: str | None = None) -> str | None:
        """Associate a foreign table of postgres_fdw with the registered database it points to, and return its name.

        Without `database`, the registered database is determined from the address of the foreign server. Returns `None`
        if none is found.
        """
        require_installed(self.conn)
        with plain_errors():
            row = self.conn.execute("SELECT %s::regclass::oid::bigint", (table,)).fetchone()
            assert row is not None
            return self.engine.remote.servers.resolve(row[0], database)
