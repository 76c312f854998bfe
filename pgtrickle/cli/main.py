"""The entry point `pgtrickle`: registers the commands and turns errors and signals into exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from pgtrickle._version import __version__
from pgtrickle.cli.commands.catalog import install, uninstall, upgrade
from pgtrickle.cli.commands.databases import database
from pgtrickle.cli.commands.demo import demo
from pgtrickle.cli.commands.doctor import doctor
from pgtrickle.cli.commands.inspect import explain, history, list_tables, status
from pgtrickle.cli.commands.operate import drain, pause, resume, wait
from pgtrickle.cli.commands.prepare import prepare
from pgtrickle.cli.commands.profile import profile
from pgtrickle.cli.commands.refresh import refresh
from pgtrickle.cli.commands.run import run
from pgtrickle.cli.commands.tables import alter, create, drop
from pgtrickle.cli.commands.top import top
from pgtrickle.cli.commands.tune import tune
from pgtrickle.cli.commands.verify import verify
from pgtrickle.cli.common import echo
from pgtrickle.errors import ConnectionFailedError, NotInTimeError, PgtrickleError, RefreshConflictError

FAILED, CONFLICT, UNREACHABLE, LATE, INTERRUPTED = 1, 3, 4, 5, 130
CODES = {RefreshConflictError: CONFLICT, ConnectionFailedError: UNREACHABLE, NotInTimeError: LATE}

EPILOG = """\b
Examples:
  pgtrickle demo
  pgtrickle --dsn postgresql://app@db.example/shop install
  export PGTRICKLE_DSN=postgresql://app@db.example/shop
  pgtrickle create revenue "SELECT region, sum(amount) AS total FROM orders GROUP BY region"
  pgtrickle refresh revenue
  pgtrickle status
  pgtrickle doctor
\b
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 another process refreshes that stream table,
4 the database cannot be reached, 5 not done in time, 130 interrupted.
"""


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=EPILOG,
)
@click.option("--dsn", metavar="DSN", help="The database: a URI or key=value pairs. Each command accepts it too.")
@click.version_option(__version__, prog_name="pgtrickle")
@click.pass_context
def cli(context: click.Context, dsn: str | None) -> None:
    """Stream tables for PostgreSQL: query results that are kept fresh incrementally.

    The database is taken from --dsn, then from PGTRICKLE_DSN, then from libpq's variables (PGHOST, PGDATABASE, PGUSER,
    PGSERVICE …). Keep passwords in ~/.pgpass or PGPASSWORD: a command line can be read by others on the machine.
    """
    context.obj = dsn


for command in (
    install, uninstall, upgrade, create, alter, drop, refresh, list_tables, status, explain, history, doctor, demo, run,
    verify, prepare, wait, pause, resume, drain, top, profile, tune, database,
):  # fmt: skip
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code. Expected errors are printed without a traceback."""
    try:
        code = cli.main(list(arguments) if arguments is not None else None, "pgtrickle", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:  # wrong usage
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    except Exception as error:
        report = _report(error)
        if report is None:
            raise
        message, hint, code = report
        echo(f"error: {message}", err=True)
        if hint:
            echo(f"hint: {hint}", err=True)
        sys.exit(code)


def _report(error: Exception) -> tuple[str, str | None, int] | None:
    """Message, hint and exit code of an expected error; None for a bug."""
    if isinstance(error, PgtrickleError):
        return error.message, error.hint, CODES.get(type(error), FAILED)
    # They are already imported if one of their errors was raised. Importing them here would slow down every --help.
    psycopg, pyspark = sys.modules.get("psycopg"), sys.modules.get("pyspark.errors")
    if psycopg is not None and isinstance(error, psycopg.Error):
        message = (error.diag.message_primary or str(error)).strip()
        code = UNREACHABLE if isinstance(error, psycopg.OperationalError) and error.sqlstate is None else FAILED
        return f"{message} (SQLSTATE {error.sqlstate})" if error.sqlstate else message, error.diag.message_hint, code
    if pyspark is not None and isinstance(error, pyspark.PySparkException):
        text = str(error).strip().splitlines() or [type(error).__name__]
        return f"Spark: {text[0]}", None, FAILED
    if isinstance(error, BrokenPipeError):
        return "the output was closed early", None, FAILED
    return None
