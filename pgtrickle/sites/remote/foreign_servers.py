"""Foreign tables of postgres_fdw: the registered databases that they point to, where their changes are captured."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgtrickle.catalog.gate import pass_gate
from pgtrickle.errors import DatabaseFailedError, InvalidQueryError, SourceChangedError
from pgtrickle.sites.remote.connections import Connections, check_catalog, errors_naming

_HERE = frozenset({"here"})  # stands for the machine that this process runs on


@dataclass(frozen=True)
class ForeignServers:
    """Finds the tables that the foreign tables of one database stand for."""

    home: psycopg.Connection[Any]
    connections: Connections

    def resolve(self, relation: int, database: str | None = None) -> str | None:
        """Make a foreign table stand for the table that it points to, and return the name of that table's database.

        That is the given registered database, or the one at the foreign server's address; None if there is none.
        """
        row = self.home.execute("SELECT pgtrickle._foreign_table_target(%s::oid::regclass)", (relation,)).fetchone()
        target = row[0] if row is not None else None
        if target is None:
            return None
        usable = dict(
            self.home.execute(
                "SELECT name, dsn FROM pgtrickle.pgt_usable_databases WHERE name NOT LIKE '@%'"
            ).fetchall()
        )
        if database is not None and database not in usable:
            raise InvalidQueryError(
                f"there is no registered database {database} that this role may read",
                "`pgtrickle database list` shows them, `pgtrickle database add NAME DSN` registers one.",
            )
        found = database or next(
            (name for name, dsn in usable.items() if self._is_it(name, dsn, target["address"])), None
        )
        if found is not None:
            self._note(relation, found, usable[found], target)
        return found

    def _is_it(self, name: str, dsn: str, address: Mapping[str, str]) -> bool:
        """Whether a registered database is the one at a foreign server's address."""
        known = conninfo_to_dict(dsn)
        if "dbname" not in address or known.get("dbname", address["dbname"]) != address["dbname"]:
            return False
        try:
            # What a service file or the environment adds to the DSN is known only after connecting.
            with self.connections.open(name, dsn) as conn:
                host, port, dbname = conn.info.hostaddr or conn.info.host, conn.info.port, conn.info.dbname
        except DatabaseFailedError:
            return False
        if dbname != address["dbname"] or str(port) != address.get("port", "5432"):
            return False
        server_machine = _machine(self.home.info.hostaddr or self.home.info.host, _HERE)
        there = _machine(address.get("hostaddr") or address.get("host", ""), server_machine)
        return not there.isdisjoint(_machine(host, _HERE))

    def _note(self, relation: int, database: str, dsn: str, target: Mapping[str, str]) -> None:
        with self.connections.open(database, dsn) as conn, errors_naming(database):
            check_catalog(conn, database)
            row = conn.execute(
                "SELECT pgtrickle._describe_table(to_regclass(format('%%I.%%I', %s::text, %s::text)))"
                " WHERE to_regclass(format('%%I.%%I', %s::text, %s::text)) IS NOT NULL",
                (target["schema"], target["name"]) * 2,
            ).fetchone()
        if row is None:
            raise InvalidQueryError(
                f"database {database} has no table {target['schema']}.{target['name']}, to which a foreign table points",
                "See the options of the foreign table; mind who may see the table there.",
            )
        try:
            pass_gate(self.home, "resolve_foreign_table", source=relation, database=database, definition=row[0])
        except psycopg.errors.DatatypeMismatch as error:
            raise SourceChangedError(error.diag.message_primary or "", error.diag.message_hint) from None


def _machine(host: str, own: frozenset[str]) -> frozenset[str]:
    """The addresses of a host. `own` is returned for a local one: the machine from whose point of view it is local."""
    if not host or host.startswith("/") or _is_loopback(host):
        return own
    try:
        return frozenset({host, *(str(found[4][0]) for found in socket.getaddrinfo(host, None))})
    except OSError:
        return frozenset({host})


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
