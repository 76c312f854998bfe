"""The checks of `pgtrickle doctor`: one function per kind of problem, collected in one list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

from pgtrickle.catalog.install import OLDEST_SERVER, installed_version, latest_version
from pgtrickle.catalog.problems import problem_remedy
from pgtrickle.cli.common import failures
from pgtrickle.errors import JavaMissingError
from pgtrickle.postgres.connection import another, is_pooled
from pgtrickle.spark.session import check_java

Connection = psycopg.Connection[Any]


@dataclass(frozen=True)
class Finding:
    """A problem, the object that it concerns, and the remedy."""

    check: str
    subject: str
    problem: str
    remedy: str


def find_problems(conn: Connection, held_seconds: float) -> list[Finding]:
    """Run all checks. Without a usable catalog, only those that do not need one."""
    found = [*_java(), *_server(conn), *_catalog(conn), *_held_back(conn, held_seconds)]
    if not any(finding.check == "catalog" for finding in found):
        found += [finding for check in CATALOG_CHECKS for finding in check(conn)]
    return found


def _java() -> Iterator[Finding]:
    try:
        check_java()
    except JavaMissingError as error:
        yield Finding("java", "this machine", error.message, error.hint or "")


def _server(conn: Connection) -> Iterator[Finding]:
    major = conn.info.server_version // 10000
    if major < OLDEST_SERVER:
        yield Finding("server", f"PostgreSQL {major}", "is too old", f"Use PostgreSQL {OLDEST_SERVER} or newer.")
    if _rows(conn, "SELECT FROM pg_extension WHERE extname = 'pg_trickle'"):
        yield Finding(
            "extension",
            conn.info.dbname,
            "has the extension pg_trickle, which owns the names that pgtrickle would use",
            "Run DROP EXTENSION pg_trickle, or use another database.",
        )
    if _rows(conn, "SELECT WHERE pg_is_in_recovery()"):
        yield Finding("standby", conn.info.host, "is a standby: nothing can be refreshed", "Connect to the primary.")


def _catalog(conn: Connection) -> Iterator[Finding]:
    version, latest = installed_version(conn), latest_version()
    if version is None:
        yield Finding("catalog", conn.info.dbname, "has no pgtrickle catalog", "Run `pgtrickle install`.")
    elif version < latest:
        problem = f"has catalog version {version}, and this release needs {latest}"
        yield Finding("catalog", conn.info.dbname, problem, "Run `pgtrickle upgrade` as the catalog's owner.")
    elif version > latest:
        problem = f"has catalog version {version}, and this release knows only {latest}"
        yield Finding("catalog", conn.info.dbname, problem, "Use a newer release of pgtrickle.")


def _held_back(conn: Connection, seconds: float) -> Iterator[Finding]:
    """Long transactions that prevent old rows from being vacuumed and old changes from being purged."""
    # Without pg_read_all_stats the start of another role's transaction is hidden, its xmin is not.
    sessions = _rows(
        conn,
        "SELECT pid, usename, coalesce(state, 'unknown'), extract(epoch FROM clock_timestamp() - xact_start)::bigint,"
        " age(backend_xmin) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()"
        " AND coalesce(backend_type, 'client backend') = 'client backend'"
        " AND (xact_start < clock_timestamp() - make_interval(secs => %(limit)s)"
        " OR (xact_start IS NULL AND age(backend_xmin) > 1000000)) ORDER BY xact_start",
        {"limit": seconds},
    )
    for pid, role, state, age, transactions in sessions:
        since = f"for {age} s" if age is not None else f"for {transactions} transactions"
        yield Finding(
            "held-back",
            f"process {pid} (role {role}, {state})",
            f"has had a transaction open {since}: changes accumulate until it ends",
            f"End it, or run SELECT pg_terminate_backend({pid}).",
        )
    prepared = _rows(
        conn,
        "SELECT gid, owner, extract(epoch FROM clock_timestamp() - prepared)::bigint FROM pg_prepared_xacts"
        " WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => %(limit)s)",
        {"limit": seconds},
    )
    for gid, role, age in prepared:
        yield Finding(
            "held-back",
            f"prepared transaction {gid} (role {role})",
            f"was prepared {age} s ago and not ended: changes accumulate until it ends",
            f"Run COMMIT PREPARED or ROLLBACK PREPARED '{gid}' as {role}.",
        )


def _stream_tables(conn: Connection) -> Iterator[Finding]:
    rows = _rows(
        conn,
        "SELECT format('%I.%I', pgt_schema, pgt_name), status, status_reason, consecutive_errors, last_error,"
        " CASE WHEN frontier IS NOT NULL THEN reinit_reason END, pgtrickle._ownership_problem(pgt_id),"
        " CASE WHEN pgtrickle._ownership_problem(pgt_id) IS NULL THEN pgtrickle._privilege_problem(pgt_id) END,"
        " pgtrickle._error_remedy(error_kind, format('%I.%I', pgt_schema, pgt_name), status = 'SUSPENDED')"
        " FROM pgtrickle.pgt_stream_tables ORDER BY pgt_schema, pgt_name",
    )
    for name, status, why, errors, last_error, again, ownership, privilege, remedy in rows:
        if ownership or privilege:
            # Any other problems are consequences of this one.
            yield Finding("stream-table", name, ownership or privilege, problem_remedy(name, ownership or privilege))
            continue
        if last_error or errors:
            yield Finding("stream-table", name, failures(errors, last_error or why), remedy)
        if again:
            problem = f"will be re-initialized: {again}"
            yield Finding("stream-table", name, problem, f"Run `pgtrickle refresh {name}` at a convenient time.")
        if status == "SUSPENDED":
            stopped = why == "emergency stop"
            resume = "SELECT pgtrickle.resume_capture()" if stopped else f"`pgtrickle alter {name} --status ACTIVE`"
            yield Finding("stream-table", name, f"is suspended ({why})", f"Resume it with {resume}.")


def _copy(conn: Connection) -> Iterator[Finding]:
    """A copy of a database, which keeps changes for the readers of the original until the copy is detected."""
    rows = _rows(
        conn,
        "SELECT i.database, (SELECT count(*) FROM pgtrickle.pgt_consumers) FROM pgtrickle.pgt_identity AS i"
        " WHERE i.node <> pgtrickle._database_identity()",
    )
    for original, consumers in rows:
        yield Finding(
            "copy",
            conn.info.dbname,
            f"is a copy of database {original}, and keeps changes for {consumers} readers of that one",
            "Run `pgtrickle upgrade`; a service that starts here does the same.",
        )


def _capture(conn: Connection) -> Iterator[Finding]:
    """Sources whose changes may be missed."""
    rows = _rows(
        conn,
        "SELECT t.source_relid::regclass::text, count(g.oid) FILTER (WHERE g.tgenabled IN ('O', 'A')),"
        " count(g.oid) FILTER (WHERE g.tgenabled NOT IN ('O', 'A')), count(*) FILTER (WHERE g.oid IS NULL),"
        " EXISTS (SELECT FROM pgtrickle.pgt_dependencies AS d WHERE d.source_relid = t.source_relid"
        "  AND d.capture_signature <> pgtrickle._capture_signature(t.source_relid))"
        " FROM pgtrickle.pgt_change_tracking AS t JOIN pg_class AS c ON c.oid = t.source_relid"
        " CROSS JOIN LATERAL pgtrickle._partition_tree(t.source_relid) AS member"
        " CROSS JOIN unnest('{insert,update,delete,truncate}'::text[]) AS operation"
        " LEFT JOIN pg_trigger AS g ON g.tgrelid = member"
        "  AND g.tgname = format('pgtrickle_capture_%s_%s', operation, t.source_stable_name)"
        " GROUP BY t.source_relid ORDER BY 1",
    )
    for name, _, disabled, missing, changed in rows:
        broken = [f"{number} {state}" for number, state in ((missing, "missing"), (disabled, "disabled")) if number]
        if broken:
            problem = f"has capture triggers that are {' and '.join(broken)}: its changes are missed"
            remedy = (
                f"Run SELECT pgtrickle._retrack('{name}') as its owner; the next refresh re-initializes its readers."
            )
            yield Finding("capture", name, problem, remedy)
        elif changed:
            problem = "was captured differently since the last refresh (triggers or partitions changed)"
            yield Finding("capture", name, problem, "Nothing to do: the next refresh re-initializes its readers.")


def _requests(conn: Connection) -> Iterator[Finding]:
    if not _rows(conn, "SELECT WHERE has_table_privilege('pgtrickle.pgt_requests', 'SELECT')"):
        return  # other roles can see only the outcome of their own requests
    rows = _rows(
        conn,
        "SELECT count(*), extract(epoch FROM clock_timestamp() - min(requested_at))::bigint FROM pgtrickle.pgt_requests"
        " WHERE status IN ('PENDING', 'RUNNING') HAVING count(*) > 0 AND NOT EXISTS (SELECT FROM pgtrickle.pgt_services"
        "  WHERE kind = 'service' AND lease_expires > clock_timestamp())",
    )
    for number, seconds in rows:
        yield Finding(
            "requests",
            conn.info.dbname,
            f"has {number} refresh requests waiting, the oldest for {seconds} s, and no service",
            "Run `pgtrickle run --once`, or `pgtrickle run` to keep serving.",
        )


def _service(conn: Connection) -> Iterator[Finding]:
    """The results of health_check() about the service and its work; the other checks are more detailed on the rest."""
    rows = _rows(
        conn,
        "SELECT check_name, detail, remedy FROM pgtrickle.health_check() WHERE severity <> 'OK'"
        " AND check_name IN ('service', 'scheduler', 'settings', 'stale', 'fuses', 'change_buffers')"
        " AND EXISTS (SELECT FROM pgtrickle.pgt_stream_tables)",
    )
    for check, detail, remedy in rows:
        yield Finding(check.replace("_", "-"), conn.info.dbname, detail, remedy)


def _trust(conn: Connection) -> Iterator[Finding]:
    """A missing service, perhaps because it does not trust the role that owns the catalog (see catalog/trust.py)."""
    rows = _rows(
        conn,
        "SELECT o.rolname, s.rolname FROM pg_namespace n JOIN pg_roles o ON o.oid = n.nspowner"
        " JOIN pg_roles s ON s.rolname = pgtrickle._service_role() WHERE n.nspname = 'pgtrickle'"
        " AND NOT (o.rolsuper OR o.oid = s.oid OR pg_has_role(o.oid, s.oid, 'MEMBER')) AND NOT EXISTS"
        " (SELECT FROM pgtrickle.pgt_services WHERE kind = 'service' AND lease_expires > clock_timestamp())",
    )
    for owner, service in rows:
        yield Finding(
            "trust",
            conn.info.dbname,
            f"has no service, and its catalog belongs to role {owner}, which login {service} does not trust by default",
            f"Add {owner} to trusted_owners in the service's configuration, or run GRANT {service} TO {owner}.",
        )


def _pooler(conn: Connection) -> Iterator[Finding]:
    """A pooler in transaction mode that is not set in connection_pooler_mode."""
    if not is_pooled(conn) or _rows(conn, "SELECT WHERE pgtrickle._setting('connection_pooler_mode') <> 'off'"):
        return
    with another(conn) as second:
        pids = [_rows(one, "SELECT pg_backend_pid()") for one in (conn, second, conn, second)]
    if len({pid for ((pid,),) in pids}) == 1:  # one backend for two open connections
        yield Finding(
            "pooler",
            conn.info.dbname,
            "is behind a pooler in transaction mode: nobody receives the notifications that SQL functions send",
            "Everything works without a change."
            " SELECT pgtrickle.set('pg_trickle.connection_pooler_mode', 'transaction') stops them.",
        )


def _databases(conn: Connection) -> Iterator[Finding]:
    """Remote databases that the service could not poll, and database sets with members that could not join."""
    if not _rows(conn, "SELECT WHERE has_table_privilege('pgtrickle.pgt_databases', 'SELECT')"):
        return
    for name, problem in _rows(conn, "SELECT name, problem FROM pgtrickle.pgt_databases WHERE problem IS NOT NULL"):
        yield Finding(
            "database",
            name,
            f"is not polled: {problem}",
            f"`pgtrickle database check {name}` tells when it can be read, `pgtrickle database add {name} DSN` where it is.",
        )
    for name, problem in _rows(conn, "SELECT name, problem FROM pgtrickle.pgt_database_sets WHERE problem IS NOT NULL"):
        yield Finding(
            "database",
            name,
            f"has a member that could not join: {problem}",
            "Fix this in the member; it then joins automatically. `pgtrickle database list` shows the members.",
        )


def _citus(conn: Connection) -> Iterator[Finding]:
    """Citus nodes whose changes are not captured or not followed, or that cannot be included in a cut."""
    if not _rows(conn, "SELECT WHERE pgtrickle._has_citus()"):
        return
    if not _rows(conn, "SELECT WHERE has_table_privilege('pg_dist_transaction', 'UPDATE')"):
        yield Finding(
            "citus",
            conn.info.dbname,
            f"does not let role {conn.info.user} keep transactions of several nodes from ending while all are cut",
            f"As superuser, on every node: GRANT UPDATE ON pg_catalog.pg_dist_transaction TO {conn.info.user};",
        )
    rows = _rows(conn, "SELECT node, source, triggers_missing, problem FROM pgtrickle.citus_status")
    for node, source, missing, _ in rows:
        if missing:
            remedy = "Nothing to do: the next refresh creates them, and re-initializes its readers."
            yield Finding("citus", f"{node}: {source}", f"lacks {missing} capture triggers", remedy)
    for node, problem in sorted({(node, problem) for node, _, _, problem in rows if problem is not None}):
        yield Finding(
            "citus", node, problem, "Make sure that the node runs and that the service's role may connect to it."
        )


def _differences(conn: Connection) -> Iterator[Finding]:
    """Stream tables that differed from their queries at the last comparison."""
    for name, at in _rows(
        conn,
        "SELECT format('%I.%I', pgt_schema, pgt_name), to_char(verified_at, 'YYYY-MM-DD HH24:MI:SSOF')"
        " FROM pgtrickle.pgt_status() WHERE verified = 'different' ORDER BY 1",
    ):
        yield Finding(
            "difference",
            name,
            f"did not hold the rows of its query at {at}",
            f"Run `pgtrickle verify {name} --evidence FILE --repair`, and please report it with that file.",
        )


CATALOG_CHECKS: tuple[Callable[[Connection], Iterator[Finding]], ...] = (
    _stream_tables,
    _differences,
    _copy,
    _capture,
    _requests,
    _service,
    _trust,
    _pooler,
    _databases,
    _citus,
)


def _rows(conn: Connection, query: str, parameters: dict[str, object] | None = None) -> list[tuple[Any, ...]]:
    return conn.execute(query.encode(), parameters).fetchall()
