"""The command `tune`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pgtrickle.cli.common import as_json, open_database, print_json, with_dsn
from pgtrickle.observability.tuning import (
    PROFILES,
    SIZES,
    Budget,
    Change,
    Profile,
    ServerAtHand,
    apply_profile,
    compute_budget,
    largest_pool,
    look_into,
    pool_size,
    read_server,
    recommended_workers,
    size_of,
    total_stream_tables,
)
from pgtrickle.spark.session import MEMORY_VARIABLE

if TYPE_CHECKING:
    from pgtrickle.api.database import Database
    from pgtrickle.service.config import ServiceConfig

MEASURE = (
    "Their latency and throughput depend on the machine and the queries: measure them under your load with"
    " `pgtrickle profile`, and in a checkout with `python -m bench steady`."
)


@click.command(
    epilog="""\b
Examples:
  pgtrickle tune
  pgtrickle tune --profile low-latency
  pgtrickle tune --profile high-throughput --apply
  pgtrickle tune --config pgtrickle.toml --services 2 --json"""
)
@click.option(
    "--profile", "profile_name", type=click.Choice(list(PROFILES)), help="Print only the settings of this profile."
)
@click.option("--apply", is_flag=True, help="Apply them to the database, all or none. Requires --profile.")
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="PGTRICKLE_CONFIG",
    help="The service's configuration file, for the budget of all its servers; as for `pgtrickle run`.",
)
@click.option(
    "--services", type=click.IntRange(1), default=1, show_default=True, help="How many services watch the servers."
)
@as_json
@with_dsn
def tune(
    dsn: str | None, profile_name: str | None, apply: bool, path: Path | None, services: int, as_json: bool
) -> None:
    """Print recommended sizes and profiles of settings, and their cost on this server in connections and memory.

    With --profile, print one profile for postgresql.conf and for SQL; --apply sets it with pgtrickle.set() in the
    connected database.
    """
    if profile_name is None:
        from pgtrickle.service.config import load_config

        if apply:
            raise click.UsageError("--apply requires --profile.")
        _overview(load_config(path, dsn), services, as_json)
    elif apply:
        _apply(dsn, PROFILES[profile_name], as_json)
    elif as_json:
        print_json(_described(PROFILES[profile_name]))
    else:
        _print_profile(PROFILES[profile_name])


def _described(profile: Profile) -> dict[str, object]:
    return {**asdict(profile), "configuration": profile.as_configuration(), "sql": profile.as_sql()}


def _print_profile(profile: Profile) -> None:
    click.echo(f"# {profile.name} ({profile.purpose}), as lines of postgresql.conf:")
    click.echo("\n".join(profile.as_configuration()))
    click.echo("\n-- the same in SQL, for one database:")
    click.echo("\n".join(profile.as_sql()))
    click.echo(f"\n-- `pgtrickle tune --profile {profile.name} --apply` runs these.", err=True)


def _apply(dsn: str | None, profile: Profile, as_json: bool) -> None:
    from pgtrickle.observability.sampling import require_pool_functions

    with open_database(dsn) as database:
        require_pool_functions(database.conn)
        changes = apply_profile(database.conn, profile)
        name = database.conn.info.dbname
    if as_json:
        print_json({"profile": profile.name, "database": name, "changes": changes})
        return
    click.echo(f"profile {profile.name} is set in database {name}:")
    for change in changes:
        click.echo(f"  pg_trickle.{change.name}: {_said(change)}")


def _said(change: Change) -> str:
    if change.overruled:
        return (
            f"stays {change.after.value}, set for the {change.after.origin}, which counts before pgtrickle.set();"
            f" {change.wanted} is kept for when that is reset"
        )
    if change.before.value == change.after.value:
        return f"{change.after.value}, as before"
    return f"{change.before.value} ({change.before.origin}) → {change.after.value}"


@dataclass(frozen=True)
class _Advice:
    """The recommended pool size from the sizing table."""

    database: str
    stream_tables: int | None  # None without a catalog
    max_dynamic_refresh_workers: int
    at_once: int  # how many of them may work for this database concurrently
    recommended: int
    stream_tables_of_all: int
    recommended_for_all: int


def _overview(config: ServiceConfig, services: int, as_json: bool) -> None:
    with ExitStack() as stack:
        databases = [stack.enter_context(open_database(each.dsn or None)) for each in config.servers]
        servers = [
            read_server(database.conn, each.databases, {*config.trusted_owners, *each.trusted_owners})
            for database, each in zip(databases, config.servers, strict=True)
        ]
        advice = _advise(databases[0], servers)
    budgets = [compute_budget(server, pool_size(servers), services) for server in servers]
    spark = os.environ.get(MEMORY_VARIABLE, "4g")
    if as_json:
        print_json(
            {
                "sizes": SIZES,
                "profiles": [_described(profile) for profile in PROFILES.values()],
                "advice": advice,
                "servers": [
                    {**asdict(server), "budget": {**asdict(budget), "fits": budget.fits}}
                    for server, budget in zip(servers, budgets, strict=True)
                ],
                "spark_driver_memory": spark,
                "machine_memory_mb": _machine_mb(),
            }
        )
        return
    _print_sizes(advice)
    _print_profiles()
    for server, budget in zip(servers, budgets, strict=True):
        _print_budget(server, budget)
    click.echo("\nMemory of the service")
    click.echo(f"  {spark} for Spark's driver ({MEMORY_VARIABLE}) in each service, in addition to Python's;")
    click.echo(f"  this machine has {_machine_mb() / 1024:.1f} GB")


def _advise(database: Database, servers: Sequence[ServerAtHand]) -> _Advice:
    here, everywhere = look_into(database.conn), total_stream_tables(servers)
    return _Advice(
        here.name,
        here.stream_tables,
        here.workers,
        here.at_once,
        recommended_workers(here.stream_tables or 0),
        everywhere,
        recommended_workers(everywhere),
    )


def _machine_mb() -> int:
    import psutil

    return int(psutil.virtual_memory().total // 2**20)


def _print_sizes(advice: _Advice) -> None:
    click.echo("Size of the worker pool")
    _print_columns(
        [
            ("", "stream tables", "max_dynamic_refresh_workers", ""),
            *(
                (size.name, size.stream_tables, f"{size.fewest_workers}–{size.most_workers}", size.note)
                for size in SIZES
            ),
        ]
    )
    if advice.stream_tables is None:
        click.echo(f"  Database {advice.database} has no pgtrickle catalog; `pgtrickle install` creates one.")
        return
    click.echo(f"  Database {advice.database} has {_count(advice.stream_tables)}: {_recommendation(advice)}.")
    if advice.at_once < advice.max_dynamic_refresh_workers:
        click.echo(f"  At most {advice.at_once} of them work for it at once (max_concurrent_refreshes).")
    if advice.stream_tables_of_all > advice.stream_tables:
        click.echo(
            f"  All served databases have {_count(advice.stream_tables_of_all)}; a service that watches them all has one pool"
            f" for them: {advice.recommended_for_all} workers."
        )


def _count(stream_tables: int) -> str:
    return f"{stream_tables} stream table{'' if stream_tables == 1 else 's'}"


def _recommendation(advice: _Advice) -> str:
    size, now = size_of(advice.stream_tables or 0), advice.max_dynamic_refresh_workers
    if size.fewest_workers <= now <= size.most_workers:
        return f"{advice.recommended} workers; max_dynamic_refresh_workers is {now}, which the table allows"
    verb = "raise" if now < size.fewest_workers else "lower"
    return (
        f"{verb} max_dynamic_refresh_workers from {now} to {advice.recommended}"
        f" (SELECT pgtrickle.set('pg_trickle.max_dynamic_refresh_workers', '{advice.recommended}'))"
    )


def _print_profiles() -> None:
    click.echo("\nProfiles")
    for profile in PROFILES.values():
        click.echo(f"  {profile.name}: {profile.purpose}")
        for line in profile.as_configuration():
            click.echo(f"    {line}")
    click.echo("  `pgtrickle tune --profile NAME` prints one, with --apply it sets it in the connected database.")
    click.echo(f"  {MEASURE}")


def _print_budget(server: ServerAtHand, budget: Budget) -> None:
    served = [database.name for database in server.served]
    click.echo(f"\nConnections to {server.where} (PostgreSQL {server.version}), services: {budget.services}")
    _print_columns(
        [
            ("launcher", budget.launchers, "one per service"),
            (
                "schedulers",
                budget.schedulers,
                f"one per served database: {', '.join(served) or 'none has the catalog'}",
            ),
            ("refresh workers", budget.workers, "at most, max_dynamic_refresh_workers per service"),
            ("kept idle", budget.kept_idle, "at most, for a minute after a worker's last refresh in another database"),
            ("needed", budget.needed, "and while a large refresh runs one per running task of Spark"),
            ("max_connections", server.max_connections, f"of them {_kept_back(server)}"),
            ("in use by others", server.in_use, f"now; {server.own} by pgtrickle"),
            ("available", budget.available, "enough" if budget.fits else "TOO FEW"),
        ]
    )
    for database in server.databases:
        if database.problem is not None:
            click.echo(f"  Could not read database {database.name}: {database.problem}")
    if not budget.fits:
        click.echo(f"  {_remedy(server, budget)}")
    click.echo(f"\nMemory of {server.where}")
    merge_mb = budget.apply_mb // budget.workers
    click.echo(f"  {budget.workers} workers × {merge_mb} MB (merge_work_mem_mb) = {budget.apply_mb} MB;")
    click.echo("  like work_mem, it applies to each sort or hash of a statement")
    click.echo(f"\nWorker processes of {server.where}")
    schedulers = budget.schedulers // budget.services
    click.echo(
        f"  The guide's formula is launcher 1 + schedulers {schedulers} + workers {budget.workers // budget.services}"
        f" + autovacuum {server.autovacuum_max_workers} + parallel {server.max_parallel_workers}"
        f" = {budget.worker_processes_by_guide}, and other extensions'."
    )
    click.echo(
        f"  It does not apply here: launcher, schedulers and workers run outside the server, as connections."
        f" max_worker_processes ({server.max_worker_processes}) need not be raised for pgtrickle."
    )


def _kept_back(server: ServerAtHand) -> str:
    said = f"{server.superuser_reserved} for superusers"
    if server.reserved:
        said += f", {server.reserved} by reserved_connections"
    if server.role_limit is not None:
        said += f"; role {server.role} may have {server.role_limit} and has {server.role_in_use} beside pgtrickle's"
    return said


def _remedy(server: ServerAtHand, budget: Budget) -> str:
    missing = budget.needed - budget.available
    if server.role_limit is not None and budget.available == max(0, server.role_limit - server.role_in_use):
        raised = f"raise the limit of role {server.role} to {server.role_limit + missing}"
    else:
        raised = f"raise max_connections to {server.max_connections + missing} (needs a restart)"
    if pool := largest_pool(server, budget.services):
        return f"Lower max_dynamic_refresh_workers to {pool}, or {raised}."
    return f"{raised[0].upper()}{raised[1:]}, or let others close connections."


def _print_columns(rows: Iterable[Sequence[object]]) -> None:
    lines = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  " + "  ".join(padded).rstrip())
