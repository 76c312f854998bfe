"""The scaling guide's sizes and profiles, and what they cost in connections and memory on a given server."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pgtrickle.errors import UntrustedCatalogError

if TYPE_CHECKING:  # --help shows the profile names and must not have to load the driver
    import psycopg

DEFAULT_WORKERS = 4
DEFAULT_MERGE_MB = 64
# The guide prints the value of this setting in quotes, those of other switches without.
_QUOTED = {"parallel_refresh_mode"}


@dataclass(frozen=True)
class Profile:
    """A named set of settings, in the guide's order."""

    name: str
    purpose: str
    settings: dict[str, str]

    def as_configuration(self) -> list[str]:
        """Lines for postgresql.conf, as the guide prints them."""
        return [
            f"pg_trickle.{name} = '{value}'" if name in _QUOTED else f"pg_trickle.{name} = {value}"
            for name, value in self.settings.items()
        ]

    def as_sql(self) -> list[str]:
        """Equivalent SQL statements, which need no rights on the server's configuration."""
        return [f"SELECT pgtrickle.set('pg_trickle.{name}', '{value}');" for name, value in self.settings.items()]


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            "low-latency",
            "changes show up soon",
            {
                "scheduler_interval_ms": "200",
                "event_driven_wake": "on",
                "parallel_refresh_mode": "on",
                "max_dynamic_refresh_workers": "8",
                "tiered_scheduling": "on",
            },
        ),
        Profile(
            "high-throughput",
            "200 stream tables and more",
            {
                "scheduler_interval_ms": "500",
                "parallel_refresh_mode": "on",
                "max_dynamic_refresh_workers": "16",
                "max_concurrent_refreshes": "8",
                "per_database_worker_quota": "8",
                "tiered_scheduling": "on",
                "merge_work_mem_mb": "128",
            },
        ),
        Profile(
            "resource-constrained",
            "4 CPU and 8 GB",
            {
                "scheduler_interval_ms": "2000",
                "parallel_refresh_mode": "on",
                "max_dynamic_refresh_workers": "2",
                "max_concurrent_refreshes": "2",
                "tiered_scheduling": "on",
                "delta_work_mem_cap_mb": "256",
                "merge_work_mem_mb": "32",
            },
        ),
    )
}


@dataclass(frozen=True)
class Size:
    """A row of the guide's sizing table."""

    name: str
    stream_tables: str
    fewest_tables: int
    most_tables: int
    fewest_workers: int
    most_workers: int
    note: str


# The last one has no upper bound; the guide's practical limit for a database is used instead.
SIZES = (
    Size("Small", "1–20", 1, 20, 2, 4, "default (4) is usually sufficient"),
    Size("Medium", "20–100", 20, 100, 4, 8, "monitor worker saturation"),
    Size("Large", "100–200", 100, 200, 8, 16, "enable tiered scheduling"),
    Size("Very Large", "200+", 200, 500, 16, 32, "tune per-database quotas"),
)


def size_of(stream_tables: int) -> Size:
    """The row of the sizing table that applies. The guide's ranges overlap at their ends; the larger size wins."""
    return next((size for size in SIZES if stream_tables < size.most_tables), SIZES[-1])


def recommended_workers(stream_tables: int) -> int:
    """The recommended max_dynamic_refresh_workers from the sizing table, interpolated within a row."""
    size = size_of(stream_tables)
    within = min(max(stream_tables, size.fewest_tables), size.most_tables) - size.fewest_tables
    span = size.most_workers - size.fewest_workers
    return size.fewest_workers + round(span * within / (size.most_tables - size.fewest_tables))


@dataclass(frozen=True)
class DatabaseAtHand:
    """A database of a server. It is served if it has the catalog and is enabled."""

    name: str
    stream_tables: int | None  # None without a catalog
    enabled: bool = False
    workers: int = DEFAULT_WORKERS  # max_dynamic_refresh_workers
    at_once: int = DEFAULT_WORKERS  # how many of them may work for this database concurrently
    merge_mb: int = DEFAULT_MERGE_MB
    problem: str | None = None  # why it could not be examined

    @property
    def served(self) -> bool:
        return self.stream_tables is not None and self.enabled


@dataclass(frozen=True)
class ServerAtHand:
    """A server's limits on connections and processes, and how much of them is in use."""

    where: str
    version: int
    max_connections: int
    superuser_reserved: int
    reserved: int  # reserved_connections, since PostgreSQL 16
    in_use: int  # by clients other than pgtrickle
    own: int  # by pgtrickle
    role: str
    role_limit: int | None
    role_in_use: int  # by sessions of that role other than pgtrickle's
    max_worker_processes: int
    autovacuum_max_workers: int
    max_parallel_workers: int
    databases: tuple[DatabaseAtHand, ...]

    @property
    def served(self) -> list[DatabaseAtHand]:
        return [database for database in self.databases if database.served]


@dataclass(frozen=True)
class Budget:
    """The connections and memory that pgtrickle needs at most on one server, for all services together."""

    services: int
    launchers: int
    schedulers: int
    workers: int
    kept_idle: int  # by workers that moved on to another database less than a minute ago
    needed: int
    available: int  # in addition to what other clients use now
    apply_mb: int
    worker_processes_by_guide: int  # required by the guide's formula, without other extensions
    worker_processes: int  # required by pgtrickle

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


def pool_size(servers: Sequence[ServerAtHand]) -> int:
    """The size of a service's pool, which all its databases share: the largest number that any of them has set."""
    wanted = [database.workers for server in servers for database in server.served]
    return max(wanted, default=DEFAULT_WORKERS)


def compute_budget(server: ServerAtHand, workers: int, services: int = 1) -> Budget:
    """The budget for a server: each service needs a launcher, a scheduler per served database, and all its workers."""
    served = server.served
    kept_idle = max(0, sum(min(workers, database.at_once) for database in served) - workers)
    available = server.max_connections - server.superuser_reserved - server.reserved - server.in_use
    if server.role_limit is not None:
        available = min(available, server.role_limit - server.role_in_use)
    return Budget(
        services=services,
        launchers=services,
        schedulers=services * len(served),
        workers=services * workers,
        kept_idle=services * kept_idle,
        needed=services * (1 + len(served) + workers + kept_idle),
        available=max(0, available),
        apply_mb=services * workers * max((database.merge_mb for database in served), default=DEFAULT_MERGE_MB),
        worker_processes_by_guide=1
        + len(served)
        + workers
        + server.autovacuum_max_workers
        + server.max_parallel_workers,
        worker_processes=0,
    )


def largest_pool(server: ServerAtHand, services: int = 1) -> int:
    """The largest pool per service for which there are enough connections; 0 if there are not enough for one worker."""
    return max((n for n in range(1, 65) if compute_budget(server, n, services).fits), default=0)


# Most columns are hidden from an ordinary role for sessions of other roles, but not database, role name and
# application.
_SERVER = """
WITH client AS (
    SELECT usename, application_name LIKE 'pgtrickle%' AS own FROM pg_catalog.pg_stat_activity
    WHERE pid <> pg_catalog.pg_backend_pid() AND datid IS NOT NULL AND usesysid IS NOT NULL
      AND coalesce(backend_type, 'client backend') = 'client backend'
)
SELECT current_setting('max_connections')::int AS max_connections,
       current_setting('superuser_reserved_connections')::int AS superuser_reserved,
       coalesce(current_setting('reserved_connections', true), '0')::int AS reserved,
       (SELECT count(*) FROM client WHERE NOT own) AS in_use,
       (SELECT count(*) FROM client WHERE own) AS own,
       current_user::text AS role,
       (SELECT nullif(rolconnlimit, -1) FROM pg_catalog.pg_roles WHERE rolname = current_user AND NOT rolsuper) AS role_limit,
       (SELECT count(*) FROM client WHERE NOT own AND usename = current_user) AS role_in_use,
       current_setting('max_worker_processes')::int AS max_worker_processes,
       current_setting('autovacuum_max_workers')::int AS autovacuum_max_workers,
       current_setting('max_parallel_workers')::int AS max_parallel_workers
"""
_DATABASES = (
    "SELECT datname FROM pg_catalog.pg_database WHERE datallowconn AND NOT datistemplate"
    " AND pg_catalog.has_database_privilege(oid, 'CONNECT') ORDER BY datname"
)


def read_server(
    conn: psycopg.Connection[Any], only: Collection[str] | None = None, trusted_owners: Iterable[str] = ()
) -> ServerAtHand:
    """Read the limits of the connected server and examine its databases, or only some, one by one."""
    from psycopg.rows import dict_row

    row = conn.cursor(row_factory=dict_row).execute(_SERVER.encode()).fetchone()
    assert row is not None
    names = [name for (name,) in conn.execute(_DATABASES).fetchall() if only is None or name in only]
    owners = frozenset(trusted_owners)
    databases = tuple(
        look_into(conn) if name == conn.info.dbname else _connect_and_look(conn, name, owners) for name in names
    )
    where = conn.info.host if conn.info.host.startswith("/") else f"{conn.info.host}:{conn.info.port}"
    return ServerAtHand(where=where, version=conn.info.server_version // 10000, databases=databases, **row)


def _connect_and_look(conn: psycopg.Connection[Any], name: str, trusted_owners: frozenset[str]) -> DatabaseAtHand:
    import psycopg

    from pgtrickle.catalog.trust import Trust
    from pgtrickle.postgres.connection import connect_with_rights

    password = conn.info.password or None
    try:
        with connect_with_rights(
            conn.info.dsn, Trust(trusted_owners), dbname=name, password=password, application_name="pgtrickle"
        ) as other:
            return look_into(other)
    except UntrustedCatalogError as error:
        return DatabaseAtHand(name, None, problem=error.message)
    except psycopg.Error as error:
        # A database that refuses the connection or is being dropped must not prevent examining the others.
        return DatabaseAtHand(name, None, problem=(str(error).strip() or type(error).__name__).splitlines()[-1])


def look_into(conn: psycopg.Connection[Any]) -> DatabaseAtHand:
    """Examine the connected database."""
    name = conn.info.dbname
    if conn.execute("SELECT 1 WHERE to_regclass('pgtrickle.pgt_settings') IS NOT NULL").fetchone() is None:
        return DatabaseAtHand(name, None)
    # The catalog of an earlier release may not have all of these settings.
    row = conn.execute(
        "SELECT (SELECT count(*) FROM pgtrickle.pgt_stream_tables), s.enabled IS DISTINCT FROM 'off',"
        " coalesce(s.workers, %(workers)s), CASE s.parallel WHEN 'off' THEN 1 ELSE coalesce(s.at_once, %(workers)s) END,"
        " coalesce(s.merge_mb, %(merge_mb)s) FROM (SELECT pgtrickle._setting('enabled') AS enabled,"
        " pgtrickle._setting('max_dynamic_refresh_workers')::int AS workers,"
        " pgtrickle._setting('max_concurrent_refreshes')::int AS at_once,"
        " pgtrickle._setting('parallel_refresh_mode') AS parallel,"
        " pgtrickle._setting('merge_work_mem_mb')::int AS merge_mb) AS s",
        {"workers": DEFAULT_WORKERS, "merge_mb": DEFAULT_MERGE_MB},
    ).fetchone()
    assert row is not None
    return DatabaseAtHand(name, *row)


@dataclass(frozen=True)
class Setting:
    """The effective value of a setting and its origin."""

    value: str
    origin: str


@dataclass(frozen=True)
class Change:
    """The effect of a profile on one setting."""

    name: str
    wanted: str
    before: Setting
    after: Setting

    @property
    def overruled(self) -> bool:
        """Whether the server's own configuration takes precedence over the value that was set."""
        return self.after.value != self.wanted


def read_setting(conn: psycopg.Connection[Any], name: str) -> Setting | None:
    """The effective value of a setting; None if the catalog's release does not have it."""
    row = conn.execute(
        "SELECT value, origin FROM pgtrickle._setting_sources(%s) WHERE value IS NOT NULL ORDER BY rank LIMIT 1",
        (name,),
    ).fetchone()
    return Setting(*row) if row is not None else None


def apply_profile(conn: psycopg.Connection[Any], profile: Profile) -> list[Change]:
    """Set all settings of a profile in the connected database, in one transaction."""
    changes = []
    with conn.transaction():
        for name, value in profile.settings.items():
            before = read_setting(conn, name)
            conn.execute("SELECT pgtrickle.set(%s, %s)", (f"pg_trickle.{name}", value))
            after = read_setting(conn, name)
            assert before is not None  # set() refuses a name that has no default
            assert after is not None
            changes.append(Change(name, value, before, after))
    return changes


def total_stream_tables(servers: Sequence[ServerAtHand]) -> int:
    """The number of stream tables in all served databases, which share one pool."""
    return sum(d.stream_tables or 0 for server in servers for d in server.served)
