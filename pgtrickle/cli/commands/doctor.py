"""The command `doctor`."""

from __future__ import annotations

import click

from pgtrickle.cli.common import as_json, echo, open_database, print_json, with_dsn


@click.command(epilog="\b\nExample:\n  pgtrickle doctor --json || echo 'look at it'")
@click.option(
    "--held-seconds",
    type=click.FloatRange(0),
    default=300,
    show_default=True,
    help="Report transactions that are open longer than this.",
)
@as_json
@with_dsn
def doctor(dsn: str | None, held_seconds: float, as_json: bool) -> int:
    """Find problems that keep stream tables from being fresh, and suggest remedies. Exit code 1 if there is a problem."""
    from pgtrickle.cli.diagnostics import find_problems

    with open_database(dsn) as database:
        found = find_problems(database.conn, held_seconds)
    if as_json:
        print_json({"ok": not found, "findings": found})
    else:
        for finding in found:
            echo(f"{finding.check}: {finding.subject} {finding.problem}")
            echo(f"  {finding.remedy}")
        if not found:
            click.echo("no problems found")
    return 1 if found else 0
