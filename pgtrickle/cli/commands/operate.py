"""The commands `wait`, `pause`, `resume` and `drain`."""

from __future__ import annotations

import click

from pgtrickle.cli.common import open_database, stop_on_signals, with_dsn


@click.command(epilog="\b\nExample:\n  pgtrickle wait sales.by_region --timeout 10")
@click.argument("name")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds to wait.")
@with_dsn
def wait(dsn: str | None, name: str, timeout: float) -> None:
    """Return when a stream table includes everything that is committed now."""
    stop_on_signals()
    with open_database(dsn) as database:
        database.wait_until_fresh(name, timeout)
    click.echo(f"{name} is fresh")


@click.command()
@with_dsn
def pause(dsn: str | None) -> None:
    """Start no refresh in a database until `resume`. Changes go on being captured."""
    with open_database(dsn) as database:
        database.pause()
    click.echo("paused; `pgtrickle resume` goes on")


@click.command()
@with_dsn
def resume(dsn: str | None) -> None:
    """Go on with refreshes after `pause` or `drain`."""
    with open_database(dsn) as database:
        database.resume()
    click.echo("resumed")


@click.command()
@click.option("--timeout", default=60.0, show_default=True, help="Seconds to wait for what runs.")
@with_dsn
def drain(dsn: str | None, timeout: float) -> None:
    """Pause, and return when no refresh runs any more: before a migration or a fail-over."""
    stop_on_signals()
    with open_database(dsn) as database:
        database.drain(timeout)
    click.echo("drained; `pgtrickle resume` goes on")
