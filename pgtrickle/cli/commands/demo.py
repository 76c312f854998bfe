"""The command `demo`."""

from __future__ import annotations

import click

from pgtrickle.cli.common import stop_on_signals


@click.command(
    epilog="""\b
Examples:
  pgtrickle demo
  pgtrickle demo --forever
  pgtrickle demo --seconds 20 --rows 1000000"""
)
@click.option(
    "--seconds", type=click.FloatRange(1), default=60, show_default=True, help="How long to make changes, in seconds."
)
@click.option("--forever", is_flag=True, help="Run until Ctrl-C.")
@click.option(
    "--rows", type=click.IntRange(20), default=200_000, show_default=True, help="Number of order items at the start."
)
def demo(seconds: float, forever: bool, rows: int) -> int:
    """Demonstrate stream tables on a temporary PostgreSQL server.

    The tables of a shop change continuously; five stream tables are refreshed every second and compared with their
    queries. Needs Java 17 or newer, nothing else. Exit code 1 if a stream table was ever wrong.
    """
    from pgtrickle.demo.play import play

    stop_on_signals()
    return play(None if forever else seconds, rows)
