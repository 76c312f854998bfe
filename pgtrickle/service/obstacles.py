"""The reasons why a database cannot be served."""

from __future__ import annotations

from typing import Any

import psycopg

from pgtrickle.catalog.install import installed_version, latest_version
from pgtrickle.catalog.trust import Trust, require_trusted
from pgtrickle.errors import UntrustedCatalogError
from pgtrickle.service.connection_budget import Budget
from pgtrickle.service.settings import read_settings

NOT_INSTALLED = "it has no pgtrickle catalog"
DISABLED = "pg_trickle.enabled is off"

# Errors of the service's statements after the catalog was removed or replaced.
_MISSING = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.UndefinedObject,
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.InsufficientPrivilege,
)


def find_obstacle(conn: psycopg.Connection[Any], budget: Budget) -> str | None:
    """The reason why the database of this connection cannot be served; None if it can."""
    try:
        version = installed_version(conn) if require_trusted(conn, budget.trust or Trust()) else None
    except UntrustedCatalogError as error:
        return f"{error.message}. {error.hint}"
    if version is None:
        return NOT_INSTALLED
    if version != latest_version():
        which = "older" if version < latest_version() else "newer"
        return f"its catalog has version {version}, {which} than this release's {latest_version()}: run `pgtrickle upgrade`"
    if conn.execute("SELECT has_table_privilege('pgtrickle.pgt_stream_tables', 'UPDATE')").fetchone() != (True,):
        return f"role {conn.info.user} is not the service's: `pgtrickle install --service-role {conn.info.user}`"
    if not read_settings(conn).enabled:
        return DISABLED
    return None


def is_explained(error: BaseException, budget: Budget, database: str) -> bool:
    """Whether an error is not a fault of the service: the connection was lost, or the catalog removed or replaced."""
    if isinstance(error, psycopg.OperationalError):
        return True
    if not isinstance(error, _MISSING):
        return False
    try:
        with budget.using("launcher", database) as conn:
            return find_obstacle(conn, budget) is not None
    except (psycopg.Error, UntrustedCatalogError):
        return True  # the database is gone, or its catalog now belongs to an untrusted role
