"""The commands `wait`, `pause`, `resume` and `drain`."""

from __future__ import annotations

import click

from pgtrickle.cli.common import open_database, stop_on_signals, with_dsn


@click.command(epilog="\b\nExample:\n  pgtrickle wait sales.by_region --timeout 10")
@click.argument("name")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds to wait.")
@with_dsn
def wait(dsn: str | None, name: str, timeout: float) -> None:
    """Wait until a stream table includes everything that is committed now."""
    stop_on_signals()
    with open_database(dsn) as database:
        database.wait_until_fresh(name, timeout)
    click.echo(f"{name} is fresh")


@click.command()
@with_dsn
def pause(dsn: str | None) -> None:
    """Start no refreshes in a database until `resume`. Changes are still captured."""
    with open_database(dsn) as database:
        database.pause()
    click.echo("paused; `pgtrickle resume` resumes refreshes")


@click.command()
@with_dsn
def resume(dsn: str | None) -> None:
    """Resume refreshes after `pause` or `drain`."""
    with open_database(dsn) as database:
        database.resume()
    click.echo("resumed")


@click.command()
@click.option("--timeout", default=60.0, show_default=True, help="Seconds to wait for running refreshes.")
@with_dsn
def drain(dsn: str | None, timeout: float) -> None:
    """Pause, and wait for running refreshes to finish: before a migration or a failover."""
    stop_on_signals()
    with open_database(dsn) as database:
        database.drain(timeout)
    click.echo("drained; `pgtrickle resume` resumes refreshes")
