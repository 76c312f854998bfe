"""run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pgtrickle.cli.common import open_database, stop_on_signals, with_dsn
from pgtrickle.errors import RefreshConflictError, RefreshError

if TYPE_CHECKING:
    from pgtrickle.cli.serving import Served


@click.command(
    epilog="""\b
Examples:
  pgtrickle run --once
  pgtrickle run"""
)
@click.option("--once", is_flag=True, help="Serve the requests that are waiting now, and end.")
@with_dsn
def run(dsn: str | None, once: bool) -> None:
    """Serve refreshes that were asked for in SQL (pgtrickle.refresh_stream_table, refresh_and_wait).

    Runs until Ctrl-C or SIGTERM; needs the login of the service's role. This release serves requests of one database:
    schedules and many databases come with the next one.
    """
    from pgtrickle.catalog.install import require_installed
    from pgtrickle.cli.serving import Presence, serve_requests
    from pgtrickle.cli.spark_output import RefreshProgress, quiet_jvm

    stop_on_signals()
    with open_database(dsn) as database:
        require_installed(database.conn)
        with quiet_jvm(), RefreshProgress(1) as progress, Presence(database):
            database.engine.on_step = progress.step
            if once:
                served = serve_requests(database)
                click.echo(f"{served.done} done, {served.failed} failed, {served.postponed} postponed")
                _judge(served)
                return
            database.conn.execute("LISTEN pgtrickle_wake")
            click.echo(f"serving requests in database {database.conn.info.dbname}; Ctrl-C ends it", err=True)
            while True:
                served = serve_requests(database)
                if served.done or served.failed or served.postponed:
                    click.echo(f"{served.done} done, {served.failed} failed, {served.postponed} postponed")
                for _ in database.conn.notifies(timeout=1, stop_after=1):
                    pass


def _judge(served: Served) -> None:
    if served.failed:
        raise RefreshError(
            f"{served.failed} of the requested refreshes failed", "`pgtrickle status` says which and why."
        )
    if served.postponed:
        raise RefreshConflictError(
            f"{served.postponed} requests wait for another process that refreshes their stream table", "Run it again."
        )
