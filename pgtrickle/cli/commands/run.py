"""The command `run`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pgtrickle.cli.common import open_database, stop_on_signals, with_dsn
from pgtrickle.errors import RefreshConflictError, RefreshError

if TYPE_CHECKING:
    from pgtrickle.service.config import ServiceConfig


@click.command(
    epilog="""\b
Examples:
  pgtrickle run                           watch the server that --dsn, PGTRICKLE_DSN or libpq's variables name
  pgtrickle run --config pgtrickle.toml   watch the servers in the file
  pgtrickle run --once                    serve the waiting requests of one database, and exit"""
)
@click.option("--once", is_flag=True, help="Serve the requests that are waiting now in one database, and exit.")
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="PGTRICKLE_CONFIG",
    help="The configuration file; pgtrickle.toml in this directory if there is one and no DSN is given.",
)
@click.option("--http", help="host:port for /metrics, /healthz and /readyz (127.0.0.1:9187; '' for none).")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="Format of log lines (text).")
@click.option(
    "--log-level",
    type=click.Choice(["info", "debug"]),
    help="Level of the log; debug includes every stage of every refresh (info).",
)
@click.option(
    "--drain-seconds", type=float, help="Seconds that running refreshes may take when the service stops (30)."
)
@click.option("--database", "databases", multiple=True, help="Serve only this database. Repeatable.")
@click.option("--max-connections", type=int, help="Maximum number of connections to a server; schedulers share them.")
@click.option(
    "--trusted-owner",
    "trusted_owners",
    metavar="ROLE",
    multiple=True,
    help="Serve databases whose catalog this role installed. Repeatable. Its functions run with the service's rights.",
)
@with_dsn
def run(
    dsn: str | None,
    once: bool,
    path: Path | None,
    http: str | None,
    log_format: str | None,
    log_level: str | None,
    drain_seconds: float | None,
    databases: tuple[str, ...],
    max_connections: int | None,
    trusted_owners: tuple[str, ...],
) -> None:
    """Keep the stream tables of all databases of the watched servers fresh.

    Runs until Ctrl-C or SIGTERM, which let running refreshes finish; needs the login of the service's role. Several
    services on the same databases share the work.
    """
    if once:
        _serve_once(dsn, trusted_owners)
        return
    from pgtrickle.service.config import load_config

    dsn = dsn or os.environ.get("PGTRICKLE_DSN")
    given = {"http": http, "log_format": log_format, "log_level": log_level, "drain_seconds": drain_seconds}
    _run_service(load_config(path, dsn, databases, max_connections, trusted_owners, **given))


def _run_service(config: ServiceConfig) -> None:
    from pgtrickle.observability.logs import log_to_stderr
    from pgtrickle.observability.metrics_server import serve_http
    from pgtrickle.service.service import Service
    from pgtrickle.spark.progress import quiet_jvm
    from pgtrickle.spark.session import check_java, spark_session, stop_spark

    check_java()
    log_to_stderr(config.log_format, config.log_level)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    service = Service(config)
    server = serve_http(service, config.http) if config.http else None
    with quiet_jvm():
        service.start()
        # Start Spark now, so that the first change does not have to wait for it.
        threading.Thread(target=spark_session, name="pgtrickle-spark-start", daemon=True).start()
        names = ", ".join(launcher.server.name for launcher in service.launchers)
        click.echo(f"watching {names}; Ctrl-C stops it", err=True)
        over.wait()
        click.echo("waiting for running refreshes", err=True)
        finished = service.stop()
        if server is not None:
            server.shutdown()
        if finished:
            stop_spark()
    if not finished:
        raise RefreshError(
            f"refreshes still ran after {config.drain_seconds:g} seconds and were given up",
            "They wrote nothing; the next service repeats them. --drain-seconds gives them more time.",
        )


def _serve_once(dsn: str | None, trusted_owners: Sequence[str]) -> None:
    from pgtrickle.catalog.install import require_installed
    from pgtrickle.catalog.trust import Trust, require_trusted
    from pgtrickle.spark.progress import RefreshProgress, quiet_jvm

    stop_on_signals()
    with open_database(dsn) as database:
        require_trusted(database.conn, Trust(frozenset(trusted_owners), database_owner=True))
        require_installed(database.conn)
        with quiet_jvm(), RefreshProgress(1) as progress:
            counts = database.serve_requests(on_step=progress.step)
    done, failed, postponed = (counts.get(status, 0) for status in ("DONE", "FAILED", "PENDING"))
    click.echo(f"{done} done, {failed} failed, {postponed} postponed")
    if failed:
        raise RefreshError(f"{failed} of the requests failed", "`pgtrickle status` shows which and why.")
    if postponed:
        raise RefreshConflictError(
            f"{postponed} requests are waiting for another process that refreshes their stream table, or for a lock",
            "Run it again.",
        )
