"""Install, upgrade and remove the catalog: each in one transaction, repeatable, as an ordinary role."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from pgtrickle._version import __version__
from pgtrickle.catalog.query_files import load_query
from pgtrickle.catalog.scripts import FINAL, FUNCTIONS, MIGRATIONS, TEMPLATES, read_script
from pgtrickle.catalog.trust import SCHEMAS
from pgtrickle.errors import (
    ExtensionPresentError,
    InstallError,
    NotInstalledError,
    PrivilegeError,
    UnsupportedServerError,
)

Connection = psycopg.Connection[Any]
Result = TypeVar("Result")

OLDEST_SERVER = 15

LOCK_SECONDS = 30
LOCK_TIMEOUT = f"{LOCK_SECONDS}s"
DEADLOCKS = 5  # retries: the catalog is locked in order, but a service also holds tables whose triggers are replaced

# An arbitrary constant, but the same one in every release.
_INSTALL_LOCK = 7_165_342_811


def install(conn: Connection, *, service_role: str | None = None, target: int | None = None) -> int:
    """Create the catalog, or upgrade an older one, and return its version.

    `service_role` is the login of the service: it may write the catalog and read the change buffers. Without it, the
    previous one is kept; the first default is the installing role. `target` stops at an earlier version, for tests of
    upgrades.
    """
    _check_server(conn)

    def run() -> int:
        with _one_transaction(conn, "install"):
            if installed_version(conn) is None:
                _create_schemas(conn)
            return _bring_up_to_date(conn, service_role, target)

    return _despite_deadlocks(conn, run)


def upgrade(conn: Connection) -> int:
    """Upgrade the catalog to this release's version and return that."""
    _check_server(conn)

    def run() -> int:
        with _one_transaction(conn, "upgrade"):
            require_installed(conn)
            return _bring_up_to_date(conn, None, None)

    return _despite_deadlocks(conn, run)


def uninstall(conn: Connection, *, drop_tables: bool = False) -> list[str]:
    """Remove everything that pgtrickle created; stream tables stay as plain tables unless `drop_tables` is set.

    Returns the statements that remain to be run, each by the owner of the table it names.
    """
    return _despite_deadlocks(conn, lambda: _uninstall(conn, drop_tables))


def _uninstall(conn: Connection, drop_tables: bool) -> list[str]:
    with _one_transaction(conn, "uninstall"):
        require_installed(conn)
        _refuse_dependents(conn)
        tables = _rows(
            conn,
            "SELECT n.nspname, c.relname, pg_has_role(c.relowner, 'USAGE')"
            " FROM pgtrickle.pgt_stream_tables s JOIN pg_class c ON c.oid = s.pgt_relid"
            " JOIN pg_namespace n ON n.oid = c.relnamespace ORDER BY s.pgt_id DESC",
        )
        stand_ins = _rows(
            conn,
            "SELECT n.nspname, c.relname FROM pg_class c"
            " JOIN (SELECT relid FROM pgtrickle.pgt_foreign_tables WHERE resolved_by IS NULL"
            " UNION SELECT relid FROM pgtrickle.pgt_sharded_tables WHERE database_set <> '@cluster') f"
            " ON c.oid = f.relid"
            " JOIN pg_namespace n ON n.oid = c.relnamespace",
        )
        # Dropping a function also drops the triggers that call it, even on tables of other roles.
        ours = sql.SQL(", ").join(sql.Identifier(name) for name in SCHEMAS)
        conn.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(ours))
        for schema, name in stand_ins:
            conn.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(schema, name)))
        for schema in {schema for schema, _ in stand_ins}:
            conn.execute(sql.SQL("DROP SCHEMA {}").format(sql.Identifier(schema)))
        remaining = []
        for schema, name, may_drop in tables if drop_tables else []:
            statement = sql.SQL("DROP TABLE {};").format(sql.Identifier(schema, name))
            if may_drop:
                conn.execute(statement)
            else:
                remaining.append(statement.as_string(conn))
        return remaining


def installed_version(conn: Connection) -> int | None:
    """The version of the catalog in this database; None if there is no catalog."""
    if _value(conn, "SELECT pg_catalog.to_regclass('pgtrickle.pgt_schema_version') IS NULL"):
        return None
    version: int | None = _value(conn, "SELECT pg_catalog.max(version) FROM pgtrickle.pgt_schema_version")
    return version


def latest_version() -> int:
    """The catalog version that this release works with."""
    return len(MIGRATIONS)


def require_installed(conn: Connection) -> int:
    """The installed version; raises an error that says how to install if there is none."""
    version = installed_version(conn)
    if version is None:
        raise NotInstalledError(f"Database {_database(conn)} has no pgtrickle catalog", "Run `pgtrickle install`.")
    return version


def _bring_up_to_date(conn: Connection, service_role: str | None, target: int | None) -> int:
    latest = latest_version()
    version = installed_version(conn) or 0
    if version > latest:
        raise NotInstalledError(
            f"The catalog in database {_database(conn)} has version {version}, and this release knows only {latest}",
            "Use the release that installed it, or a newer one.",
        )
    for number, script in enumerate(MIGRATIONS, start=1):
        if version < number <= (target or latest):
            _run(conn, script)
            conn.execute("INSERT INTO pgtrickle.pgt_schema_version (version) VALUES (%s)", [number])
            version = number
    if version == latest:
        # Function bodies may refer to functions of later scripts.
        _set_local(conn, "check_function_bodies", "off")
        former = set(conn.execute(_FUNCTIONS).fetchall())
        _write_templates(conn)
        for script in FUNCTIONS:
            _replace_functions(conn, script)
        # A function that none of the scripts has replaced does not belong to this release.
        for function, _ in former.intersection(conn.execute(_FUNCTIONS).fetchall()):
            conn.execute(sql.SQL("DROP ROUTINE {}").format(sql.SQL(function)))
        for script in FINAL:
            _replace_functions(conn, script)
        _set_local(conn, "check_function_bodies", "on")
        _set_service_role(conn, service_role)
    return version


_FUNCTIONS = """
SELECT p.oid::regprocedure::text, p.xmin::text FROM pg_catalog.pg_proc AS p
WHERE p.pronamespace = 'pgtrickle'::regnamespace AND p.prokind <> 'a'
"""


def _write_templates(conn: Connection) -> None:
    """Create the function that returns the templates of generated functions by name."""
    cases = [
        sql.SQL("WHEN {} THEN {}").format(template.removeprefix("templates/"), read_script(template))
        for template in TEMPLATES
    ]
    body = sql.SQL("SELECT CASE name {} END").format(sql.SQL(" ").join(cases))
    conn.execute(
        sql.SQL(
            "CREATE OR REPLACE FUNCTION pgtrickle._template(name text) RETURNS text"
            " LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS {}"
        ).format(body.as_string(conn))
    )


def _replace_functions(conn: Connection, script: str) -> None:
    """Create or replace functions. One whose result type or parameters have changed is dropped first.

    All others are replaced in place, so that sessions can continue calling them.
    """
    while True:
        try:
            with conn.transaction():
                _run(conn, script)
        except psycopg.errors.InvalidFunctionDefinition as error:
            # The hint contains the function in every language: "Use DROP FUNCTION pgtrickle.f(text) first."
            named = re.search(r"DROP \w+ (pgtrickle\..+\))", error.diag.message_hint or "")
            if named is None:
                raise
            former = _value(conn, "SELECT to_regprocedure(%s)::text", [named[1]])
            conn.execute(sql.SQL("DROP ROUTINE {}").format(sql.SQL(former)))
        else:
            return


def _set_service_role(conn: Connection, service_role: str | None) -> None:
    role = service_role or _value(conn, "SELECT coalesce(pgtrickle._service_role(), current_user)")
    if _value(conn, "SELECT to_regrole(quote_ident(%s)) IS NULL", [role]):
        raise InstallError(f"There is no role {role} to be the service's", "Create it first, as a login role.")
    conn.execute("SELECT pgtrickle._grant_to_service(%s)", [role])
    conn.execute(
        "INSERT INTO pgtrickle.pgt_settings (name, value) VALUES ('release', %s)"
        " ON CONFLICT (name) DO UPDATE SET value = excluded.value, set_at = now()",
        [__version__],
    )


def _create_schemas(conn: Connection) -> None:
    # Citus creates the schema on a new node, with the functions that triggers call.
    brought = _value(
        conn,
        "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus') AND to_regnamespace('pgtrickle') IS NULL"
        " AND (SELECT nspowner = quote_ident(current_user)::regrole FROM pg_namespace WHERE nspname = 'pgtrickle_changes')",
    )
    wanted = [name for name in SCHEMAS if not (brought and name == "pgtrickle_changes")]
    _refuse_schemas(conn, [name for name in wanted if _value(conn, "SELECT to_regnamespace(%s) IS NOT NULL", [name])])
    for name in wanted:
        conn.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
    conn.execute(
        "CREATE TABLE pgtrickle.pgt_schema_version ("
        "version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())"
    )


def _check_server(conn: Connection) -> None:
    found = conn.info.server_version // 10000
    if found < OLDEST_SERVER:
        raise UnsupportedServerError(
            f"The server of database {conn.info.dbname} is PostgreSQL {found}",
            f"pgtrickle needs PostgreSQL {OLDEST_SERVER} or newer.",
        )


def _check_extension(conn: Connection) -> None:
    if _value(conn, "SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'pg_trickle')"):
        raise ExtensionPresentError(
            f"Database {_database(conn)} has the extension pg_trickle, which owns the names that pgtrickle would use",
            "Run `DROP EXTENSION pg_trickle` first, or use another database.",
        )


def require_owner(conn: Connection) -> None:
    """Raise an error unless there is no catalog, or the current role itself owns it.

    Objects that another role creates in it would belong to that role, and a catalog that another role created may be a
    trap.
    """
    owners = dict(
        _rows(
            conn,
            "SELECT n.nspname, r.rolname FROM pg_catalog.pg_namespace AS n"
            " JOIN pg_catalog.pg_roles AS r ON r.oid OPERATOR(pg_catalog.=) n.nspowner"
            " WHERE n.nspname OPERATOR(pg_catalog.=) ANY (%(ours)s::pg_catalog.text[])"
            " AND r.rolname OPERATOR(pg_catalog.<>) current_user",
            {"ours": list(SCHEMAS)},
        )
    )
    if "pgtrickle" in owners:
        owner = owners["pgtrickle"]
        raise PrivilegeError(
            f"The catalog in database {_database(conn)} belongs to role {owner}",
            f"If {owner} installed it, connect as {owner}, or SET ROLE {owner}, and run it again."
            " If nobody did, drop the schema.",
        )
    _refuse_schemas(conn, list(owners))


def _refuse_schemas(conn: Connection, taken: list[str]) -> None:
    if taken:
        raise InstallError(
            f"Database {_database(conn)} already has a schema {', '.join(taken)} that pgtrickle did not create",
            "Rename or drop it.",
        )


def _refuse_dependents(conn: Connection) -> None:
    """Raise an error if views of users depend on the catalog: DROP … CASCADE would silently drop them."""
    dependents = _rows(
        conn,
        "SELECT DISTINCT r.ev_class::regclass::text FROM pg_depend d"
        " JOIN pg_rewrite r ON d.classid = 'pg_rewrite'::regclass AND r.oid = d.objid"
        " JOIN pg_class v ON v.oid = r.ev_class"
        " LEFT JOIN pg_class c ON d.refclassid = 'pg_class'::regclass AND c.oid = d.refobjid"
        " LEFT JOIN pg_proc p ON d.refclassid = 'pg_proc'::regclass AND p.oid = d.refobjid"
        " WHERE coalesce(c.relnamespace, p.pronamespace) = ANY (%(ours)s::text[]::regnamespace[])"
        " AND v.relnamespace <> ALL (%(ours)s::text[]::regnamespace[])",
        {"ours": list(SCHEMAS)},
    )
    if dependents:
        raise InstallError(
            f"These views use objects of pgtrickle: {', '.join(sorted(name for (name,) in dependents))}",
            "Drop or change them first.",
        )


@contextmanager
def _one_transaction(conn: Connection, action: str) -> Iterator[None]:
    """A transaction without concurrent installations; PostgreSQL's errors are re-raised with the action that failed."""
    database = conn.info.dbname
    try:
        with conn.transaction():
            former = _value(conn, "SELECT pg_catalog.current_setting('search_path')")
            waits = _value(conn, "SELECT pg_catalog.current_setting('lock_timeout')")
            conn.execute("SET LOCAL search_path TO pg_catalog, pg_temp")
            _check_extension(conn)
            require_owner(conn)  # before anything in the schemas is read or called
            _come_one_after_the_other(conn)
            yield
            # The caller's own transaction may continue after this.
            _set_local(conn, "search_path", former)
            _set_local(conn, "lock_timeout", waits)
    except psycopg.errors.InsufficientPrivilege as error:
        raise PrivilegeError(
            f"Could not {action} the catalog in database {database}: {_message(error)}",
            f"The role needs the right to create schemas: GRANT CREATE ON DATABASE {database} TO {conn.info.user}.",
        ) from error
    except psycopg.Error as error:
        raise InstallError(
            f"Could not {action} the catalog in database {database}: {_message(error)}",
            "Nothing was changed. Remove the cause and run it again.",
        ) from error


def _despite_deadlocks(conn: Connection, run: Callable[[], Result]) -> Result:
    """Run a transaction, and retry it after deadlocks: a running service takes its locks in another order."""
    for _ in range(DEADLOCKS if conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE else 0):
        try:
            return run()
        except InstallError as error:
            if not isinstance(error.__cause__, psycopg.errors.DeadlockDetected):
                raise
    return run()


def _come_one_after_the_other(conn: Connection) -> None:
    """Wait for a concurrent installation, but not for long, because any role can hold an advisory lock.

    If the wait times out, two first installations may run at once, and one of them fails because names collide.
    """
    try:
        with conn.transaction():
            _set_local(conn, "lock_timeout", "5s")
            conn.execute("SELECT pg_advisory_xact_lock(%s)", [_INSTALL_LOCK])
    except psycopg.errors.LockNotAvailable:
        pass
    _set_local(conn, "lock_timeout", LOCK_TIMEOUT)
    if installed_version(conn) is not None:
        conn.execute("LOCK TABLE pgtrickle.pgt_schema_version IN SHARE ROW EXCLUSIVE MODE")
        _lock_catalog(conn)


def _lock_catalog(conn: Connection) -> None:
    """Lock all views and tables of the catalog, or none.

    Other commands hold some of them while they wait for others, in other orders. Therefore this one never waits long
    while it holds a lock: it releases all locks and starts again.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            with conn.transaction():
                _set_local(conn, "lock_timeout", "50ms")  # much shorter than deadlock_timeout
                conn.execute(load_query("lock_catalog"))
                _set_local(conn, "lock_timeout", LOCK_TIMEOUT)
                return
        except psycopg.errors.LockNotAvailable as error:
            if time.monotonic() > deadline:
                raise InstallError(
                    f"The catalog in database {_database(conn)} is in use: another transaction has not ended",
                    "Nothing was changed. End it, or `pgtrickle drain` the database, and run it again.",
                ) from error
            time.sleep(0.1)  # waiting in PostgreSQL's lock queue would block all sessions behind this one


def _set_local(conn: Connection, name: str, value: str) -> None:
    conn.execute("SELECT pg_catalog.set_config(%s, %s, true)", [name, value])


def _message(error: psycopg.Error) -> str:
    return error.diag.message_primary or str(error)


def _run(conn: Connection, script: str) -> None:
    # The scripts are part of the package, so their text is trusted. Without parameters, a call can have several
    # statements.
    conn.execute(read_script(script))


def _database(conn: Connection) -> str:
    return str(_value(conn, "SELECT current_database()"))


def _rows(conn: Connection, query: str, parameters: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
    return conn.cursor(row_factory=tuple_row).execute(query, parameters).fetchall()


def _value(conn: Connection, query: str, parameters: list[Any] | None = None) -> Any:
    row = conn.cursor(row_factory=tuple_row).execute(query, parameters).fetchone()
    assert row is not None
    return row[0]
