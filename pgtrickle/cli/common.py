"""Helpers that the commands share: the database connection, output, and signals."""

from __future__ import annotations

import functools
import json
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from uuid import UUID

import click

if TYPE_CHECKING:
    import psycopg

    from pgtrickle.api.database import Database
    from pgtrickle.refresh.progress import OnStep

P = ParamSpec("P")
R = TypeVar("R")

WAIT_SECONDS = 600.0  # for a refresh requested from a running service

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for a script to read.")


def with_dsn(command: Callable[Concatenate[str | None, P], R]) -> Callable[P, R]:
    """Add the option `--dsn` to a command; it overrides the option of the same name given before the command."""

    @click.option(
        "--dsn", "own_dsn", metavar="DSN", help="The database; default: PGTRICKLE_DSN, then libpq's variables."
    )
    @click.pass_context
    @functools.wraps(command)
    def wrapped(context: click.Context, /, *args: Any, own_dsn: str | None, **kwargs: Any) -> R:
        return command(own_dsn or context.obj, *args, **kwargs)

    return wrapped  # type: ignore[return-value]  # click's decorators hide the parameters that they supply


def open_database(dsn: str | None, on_step: OnStep | None = None) -> Database:
    """Connect to the database and print the server's warnings to stderr."""
    # Imported here because loading the engine takes half a second, which --help should not have to wait for.
    from pgtrickle.api.connection import log_warning
    from pgtrickle.api.database import connect

    database = connect(dsn, on_step=on_step)
    database.conn.remove_notice_handler(log_warning)
    database.conn.add_notice_handler(_show_notice)
    return database


def _show_notice(diagnostic: psycopg.errors.Diagnostic) -> None:
    from pgtrickle.api.connection import is_worth_telling

    if is_worth_telling(diagnostic):
        echo(f"warning: {diagnostic.message_primary}", err=True)
        if diagnostic.message_hint:
            echo(f"hint: {diagnostic.message_hint}", err=True)


def printable(text: str) -> str:
    """The text with control characters escaped, except for line breaks and tabs.

    Names, messages and values are chosen by other users: they must not control the terminal of whoever reads them.
    """
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)


def echo(text: str, *, err: bool = False) -> None:
    """Print text that may contain names, messages or values of other users."""
    click.echo(printable(text), err=err)


def print_json(value: object) -> None:
    click.echo(json.dumps(value, default=_plain, indent=2, ensure_ascii=False))


def _plain(value: object) -> object:
    match value:
        case datetime():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return float(value)
        case UUID():
            return str(value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            return asdict(value)
    raise TypeError(f"no JSON for {type(value).__name__}")


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> None:
    """Print a formatted table on a terminal; otherwise tab-separated columns without headings."""
    lines = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    headings = [printable(heading) for heading in headings]
    if not sys.stdout.isatty():
        for line in lines:
            click.echo("\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in line))
        return
    if not lines:
        click.echo(empty)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading)
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    Console().print(table)


def age(seconds: float | None) -> str | None:
    """A duration in a human-readable unit."""
    if seconds is None:
        return None
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


def stop_on_signals() -> None:
    """Let SIGTERM and SIGHUP end the command like Ctrl-C, so that everything is closed on the way out.

    SIGINT is set as well, because processes that a script starts in the background ignore it by default.
    """

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, interrupt)


def failures(in_a_row: int, last: str | None) -> str:
    """Describe the failed refreshes of a stream table. Failures that may pass by themselves are not counted."""
    return f"failed {in_a_row} times: {last}" if in_a_row else f"the last refresh failed: {last}"
