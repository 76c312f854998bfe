"""Database sets: their members, and the stand-in tables for tables that all members have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psycopg

from pgtrickle.catalog.databases import DatabaseSet, register, registered, registered_sets, remove
from pgtrickle.catalog.gate import pass_gate
from pgtrickle.errors import PgtrickleError, PrivilegeError
from pgtrickle.sites.remote.connections import check_catalog, discovered, errors_naming
from pgtrickle.sites.remote.databases import NotThereError, RemoteDatabases


@dataclass
class Sets:
    """The database sets that are registered in one database."""

    remote: RemoteDatabases

    def import_table(self, name: str, table: str) -> None:
        """Create the stand-in for a table of a registered database, or of all members of a set."""
        row = self.remote.home.execute(
            "SELECT pgtrickle._is_database_set(%s), ARRAY(SELECT pgtrickle._set_members(%s))", (name, name)
        ).fetchone()
        assert row is not None
        is_set, members = row
        for member in members if is_set else (name,):
            self.remote.import_table(member, table)
        if is_set:
            self._stand_in(name, table, members)

    def update_members(self) -> None:
        """Let databases join the sets that they belong to and leave the others; record why a database cannot join."""
        for known in registered_sets(self.remote.home):
            problems: list[str] = []
            if known.server is not None:
                problems += self._discover(known)
                known = self._set(known.name) or known
            for table in known.tables:
                able = []
                for member in known.members:
                    try:
                        self._require_table(member, table)
                        able.append(member)
                    except (psycopg.Error, PgtrickleError, NotThereError) as error:
                        if self.remote.home.broken or self.remote.home.closed:
                            raise
                        problems.append(_message_of(error))
                problems += self._let_join(known, table, able)
            self.remote.home.execute(
                "SELECT pgtrickle._record_set_problem(%s, %s)", (known.name, "; ".join(problems) if problems else None)
            )

    def _set(self, name: str) -> DatabaseSet | None:
        return next((one for one in registered_sets(self.remote.home) if one.name == name), None)

    def _require_table(self, member: str, table: str) -> None:
        """Import the member's table, and raise an error if it cannot be read or captured.

        Does nothing if it is already imported: the member then stays one, even if it cannot be reached.
        """
        row = self.remote.home.execute(
            "SELECT FROM pgtrickle.pgt_foreign_tables"
            " WHERE database = %s AND format('%%I.%%I', source_schema, source_name) = %s",
            (member, table),
        ).fetchone()
        if row is not None:
            return
        self.remote.import_table(member, table)
        ((may,),) = self.remote.ask(
            member,
            "SELECT has_table_privilege(%s, 'SELECT') AND (has_table_privilege(%s, 'TRIGGER') OR EXISTS"
            " (SELECT FROM pgtrickle.pgt_change_tracking WHERE source_relid = %s::regclass))",
            (table, table, table),
        )
        if not may:
            raise PrivilegeError(
                f"the registered role may not read or capture {table} of database {member}",
                f"Grant it SELECT and TRIGGER on {table} there; the database then joins by itself.",
            )

    def _let_join(self, known: DatabaseSet, table: str, able: list[str]) -> list[str]:
        """Set which members have a part in a table of the set; return why others cannot.

        They are the present members that are able, and each new one whose table fits.
        """
        behind = self.remote.home.execute(
            "SELECT m.database FROM pgtrickle.pgt_shards m JOIN pgtrickle.pgt_sharded_tables t USING (relid)"
            " WHERE t.database_set = %s AND format('%%I.%%I', t.source_schema, t.source_name) = %s",
            (known.name, table),
        ).fetchall()
        present = {row[0] for row in behind}
        if set(able) == present:
            return []
        joined = [member for member in able if member in present]
        problems = []
        for member in [member for member in able if member not in present]:
            try:
                self._stand_in(known.name, table, [*joined, member])
                joined.append(member)
            except psycopg.Error as error:
                problems.append(_message_of(error))
        if set(joined) != present and not set(joined) - present:
            try:
                self._stand_in(known.name, table, joined)
            except psycopg.Error as error:
                problems.append(_message_of(error))
        return problems

    def _stand_in(self, name: str, table: str, members: Iterable[str]) -> None:
        home = self.remote.home
        row = home.execute("SELECT parse_ident(%s)", (table,)).fetchone()
        assert row is not None
        schema, relation = row[0]
        pass_gate(home, "import_set_table", database_set=name, schema=schema, name=relation, members=list(members))

    def _discover(self, known: DatabaseSet) -> list[str]:
        """Register the databases on the set's server that match its pattern, and remove those that no longer exist."""
        assert known.server is not None
        problems = []
        pattern = self.remote.home.execute("SELECT pgtrickle._like_pattern(%s)", (known.pattern,)).fetchone()
        try:
            with self.remote.connections.open_server(known.name, known.server) as conn, errors_naming(known.name):
                rows = conn.execute(
                    "SELECT datname, datallowconn AND NOT datistemplate"
                    " AND pg_catalog.has_database_privilege(datname, 'CONNECT')"
                    " FROM pg_catalog.pg_database WHERE datname OPERATOR(pg_catalog.~~) %s::pg_catalog.text",
                    pattern,
                ).fetchall()
        except (psycopg.Error, PgtrickleError) as error:
            return [_message_of(error)]
        there = dict(sorted(rows))
        ours = {one.name for one in registered(self.remote.home) if one.dsn == discovered(known.server, one.name)}
        for name in [*there, *(set(known.members) & ours - there.keys())]:
            try:
                if name not in there:
                    remove(self.remote.home, name)
                elif there[name] and name not in known.members:
                    self._register(name, discovered(known.server, name), known.roles)
            except (psycopg.Error, PgtrickleError) as error:
                if self.remote.home.broken or self.remote.home.closed:
                    raise
                problems.append(_message_of(error))
        return problems

    def _register(self, name: str, dsn: str, roles: list[str]) -> None:
        with self.remote.connections.open(name, dsn) as conn, errors_naming(name):
            check_catalog(conn, name)
            row = conn.execute("SELECT pgtrickle._database_identity()").fetchone()
        assert row is not None
        register(self.remote.home, name, dsn, row[0], roles)


def _message_of(error: Exception) -> str:
    if isinstance(error, NotThereError):
        return f"database {error.database} has no table {error.table}"
    if isinstance(error, PgtrickleError):
        return error.message
    assert isinstance(error, psycopg.Error)
    return error.diag.message_primary or str(error).strip()
