"""The registry of other databases whose tables queries may name. It stores where secrets are, but no secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import class_row

from pgtrickle.catalog.gate import require_administrator
from pgtrickle.errors import ConnectionFailedError

SECRETS = ("password", "sslpassword")
# Options for files on this machine, and hostaddr: it can receive a password that a password file has for another host.
FILE_OPTIONS = ("service", "passfile", "sslcert", "sslkey", "hostaddr")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
# An unresponsive server is detected within half a minute, not after the kernel's two hours.
_LIMITS = {"connect_timeout": "10", "keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3"}


@dataclass(frozen=True)
class RegisteredDatabase:
    """A database that queries may name, as stored in the catalog."""

    name: str
    dsn: str
    node: str | None
    roles: list[str]
    tables: list[str]  # those imported into this database


def registered(conn: psycopg.Connection[Any]) -> list[RegisteredDatabase]:
    with conn.cursor(row_factory=class_row(RegisteredDatabase)) as cursor:
        return cursor.execute(
            "SELECT d.name, d.dsn, d.node, d.roles, ARRAY(SELECT DISTINCT format('%I.%I', f.source_schema, f.source_name)"
            " FROM pgtrickle.pgt_foreign_tables AS f WHERE f.database = d.name ORDER BY 1) AS tables"
            " FROM pgtrickle.pgt_databases AS d WHERE d.citus_group IS NULL ORDER BY d.name"
        ).fetchall()


@dataclass(frozen=True)
class DatabaseSet:
    """A set of registered databases, as stored in the catalog."""

    name: str
    pattern: str | None
    server: str | None
    members: list[str]
    roles: list[str]
    tables: list[str]  # those that represent one table of every member
    problem: str | None  # why a database could not join the set


def registered_sets(conn: psycopg.Connection[Any]) -> list[DatabaseSet]:
    with conn.cursor(row_factory=class_row(DatabaseSet)) as cursor:
        return cursor.execute(
            "SELECT s.name, s.pattern, s.server_dsn AS server, ARRAY(SELECT pgtrickle._set_members(s.name)) AS members,"
            " s.roles,"
            " ARRAY(SELECT DISTINCT format('%I.%I', t.source_schema, t.source_name) FROM pgtrickle.pgt_sharded_tables AS t"
            " WHERE t.database_set = s.name ORDER BY 1) AS tables, s.problem"
            " FROM pgtrickle.pgt_database_sets AS s WHERE s.name <> '@cluster' ORDER BY s.name"
        ).fetchall()


def register_set(
    conn: psycopg.Connection[Any],
    name: str,
    pattern: str | None,
    members: Sequence[str],
    server: str | None,
    roles: Sequence[str],
) -> None:
    """Store a set of databases, or change its members."""
    require_administrator(conn, "register sets of databases")
    conn.execute(
        "SELECT pgtrickle._register_set(%s, %s, %s, %s, %s)", (name, pattern, list(members), server, list(roles))
    )


def register(conn: psycopg.Connection[Any], name: str, dsn: str, node: str | None, roles: Sequence[str]) -> None:
    """Store a database, or change how to connect to it."""
    require_administrator(conn, "register databases")
    conn.execute("SELECT pgtrickle._register_database(%s, %s, %s, %s)", (name, dsn, node, list(roles)))


def remove(conn: psycopg.Connection[Any], name: str) -> None:
    require_administrator(conn, "remove registered databases")
    conn.execute("SELECT pgtrickle._remove_database(%s)", (name,))


def storable(dsn: str) -> str:
    """The DSN in a form that may be stored; raises an error if it contains a secret."""
    try:
        known = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # libpq's message repeats the text, which may contain a password.
        raise ConnectionFailedError(
            "PostgreSQL cannot parse the DSN", "Such as postgresql://user@host/database."
        ) from None
    for name in SECRETS:
        value = known.get(name)
        if value is not None and not _VARIABLE.fullmatch(str(value)):
            raise ConnectionFailedError(
                f"the DSN has a {name} in it, which would be stored where others can read it",
                f"Name a variable of the service's environment instead, {name}=${{PGTRICKLE_CRM_PASSWORD}},"
                " or keep it in a password file (~/.pgpass, passfile=…) or a service file (service=…).",
            )
    return make_conninfo("", **known)


@dataclass(frozen=True)
class DsnPolicy:
    """What the DSN of a registered database may use from a machine that also has secrets of others.

    An administrator of one database writes the DSN, and so chooses the host that receives the secret. Such a DSN
    never uses PGPASSWORD.
    """

    variables: tuple[str, ...] = ("PGTRICKLE_*",)  # patterns for names of environment variables
    options: tuple[str, ...] = ()  # those of FILE_OPTIONS that are allowed

    def apply(self, name: str, known: dict[str, Any]) -> None:
        """Raise an error if a DSN uses anything else, and keep PGPASSWORD from it."""
        for option in FILE_OPTIONS:
            if option in known and option not in self.options:
                raise ConnectionFailedError(
                    f"the DSN of database {name} has the option {option}, which the service's configuration does not allow",
                    f"Add {option} to dsn_options in [service], if all administrators of served databases may use it.",
                )
        for key in SECRETS:
            variable = _VARIABLE.fullmatch(str(known.get(key, "")))
            if variable is not None and not any(fnmatchcase(variable[1], pattern) for pattern in self.variables):
                raise ConnectionFailedError(
                    f"the {key} of database {name} is in the variable {variable[1]},"
                    " which the service's configuration does not allow",
                    f"Add {variable[1]} to dsn_variables in [service], or name another variable in the DSN.",
                )
        known.setdefault("password", "")


def reachable(name: str, dsn: str, environ: Mapping[str, str] = os.environ, policy: DsnPolicy | None = None) -> str:
    """The DSN to connect with: secrets are filled in from the environment."""
    known: dict[str, Any] = conninfo_to_dict(dsn)
    if policy is not None:
        policy.apply(name, known)
    for key in SECRETS:
        variable = _VARIABLE.fullmatch(str(known.get(key, "")))
        if variable is None:
            continue
        if variable[1] not in environ:
            raise ConnectionFailedError(
                f"the {key} of database {name} is in the variable {variable[1]}, which is not set",
                f"Set {variable[1]} in the environment of the process that connects: this command, and the service.",
            )
        known[key] = environ[variable[1]]
    return make_conninfo("", **(_LIMITS | known))


def is_node(database: str) -> bool:
    """Whether a name is one that pgtrickle gives to a node of the Citus cluster."""
    return database.startswith("@")
