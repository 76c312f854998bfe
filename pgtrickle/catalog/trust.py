"""Check who owns a catalog right after connecting: its code runs with the rights of the role that uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from pgtrickle.errors import UntrustedCatalogError

SCHEMAS = ("pgtrickle", "pgtrickle_changes", "pgtrickle_views")

# Behind a pooler the search path may be any, so every name and every operator is schema-qualified.
_OWNERS = """
SELECT n.nspname, o.rolname,
       o.rolsuper OR o.oid OPERATOR(pg_catalog.=) me.oid OR pg_catalog.pg_has_role(o.oid, me.oid, 'MEMBER'),
       d.datdba OPERATOR(pg_catalog.=) o.oid
FROM pg_catalog.pg_namespace AS n
JOIN pg_catalog.pg_roles AS o ON o.oid OPERATOR(pg_catalog.=) n.nspowner
JOIN pg_catalog.pg_roles AS me ON me.rolname OPERATOR(pg_catalog.=) current_user
JOIN pg_catalog.pg_database AS d ON d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database()
WHERE n.nspname OPERATOR(pg_catalog.=) ANY (%s::pg_catalog.text[])
"""
_WRITABLE = """
SELECT n.nspname FROM pg_catalog.pg_namespace AS n CROSS JOIN LATERAL pg_catalog.aclexplode(n.nspacl) AS a
WHERE a.grantee OPERATOR(pg_catalog.=) 0::pg_catalog.oid AND a.privilege_type OPERATOR(pg_catalog.=) 'CREATE'
AND n.nspname OPERATOR(pg_catalog.=) ANY (pg_catalog.current_schemas(true))
"""


@dataclass(frozen=True)
class Trust:
    """The owners whose catalogs a login uses, in addition to itself, superusers and members of its role."""

    owners: frozenset[str] = frozenset()
    database_owner: bool = False  # the user named this very database, and so trusts its owner


def require_trusted(conn: psycopg.Connection[Any], trust: Trust) -> bool:
    """Whether the database has a catalog; raises an error if a role that is not trusted owns it."""
    rows = conn.cursor(row_factory=tuple_row).execute(_OWNERS, [list(SCHEMAS)], prepare=False).fetchall()
    if not any(schema == "pgtrickle" for schema, *_ in rows):
        return False
    for schema, owner, trusted, owns_database in rows:
        if not (trusted or owner in trust.owners or (owns_database and trust.database_owner)):
            raise UntrustedCatalogError(
                f"schema {schema} in database {conn.info.dbname} belongs to role {owner},"
                f" which {conn.info.user} does not trust",
                f"If {owner} may act with the rights of {conn.info.user}, add it to trusted_owners in the service's"
                f" configuration, or run GRANT {conn.info.user} TO {owner}.",
            )
    return True


def require_private_path(conn: psycopg.Connection[Any]) -> None:
    """Raise an error if everybody may create objects in a schema of the search path.

    For connections that cannot set the search path for the whole session.
    """
    row = conn.cursor(row_factory=tuple_row).execute(_WRITABLE, prepare=False).fetchone()
    if row is not None:
        raise UntrustedCatalogError(
            f"everybody may create objects in schema {row[0]} of database {conn.info.dbname}, which is in the search path"
            f" of {conn.info.user}, and a pooler is in between",
            f"Run ALTER ROLE {conn.info.user} SET search_path = pg_catalog, pg_temp, or"
            f" REVOKE CREATE ON SCHEMA {row[0]} FROM PUBLIC.",
        )
