"""The commands `create`, `alter` and `drop`."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING

import click

from pgtrickle.cli.common import as_json, echo, open_database, print_json, with_dsn

if TYPE_CHECKING:
    from pgtrickle.api.database import Database, StreamTable

MODE = click.Choice(["AUTO", "DIFFERENTIAL", "FULL"], case_sensitive=False)
PLACEMENT = click.Choice(["auto", "spark"])
ST_PLACEMENT = click.Choice(["auto", "local", "reference", "distributed"])


@click.command(
    epilog="""\b
Examples:
  pgtrickle create revenue "SELECT region, sum(amount) AS total FROM orders GROUP BY region"
  pgtrickle create sales.big_orders -f big_orders.sql --mode DIFFERENTIAL
  echo "SELECT * FROM orders WHERE amount > 100" | pgtrickle create big_orders --no-init"""
)
@click.argument("name")
@click.argument("query", required=False)
@click.option("-f", "--file", type=click.File(encoding="utf-8"), help="Read the query from a file; - is stdin.")
@click.option(
    "--schedule",
    default="calculated",
    show_default=True,
    help="A duration (30s, 5m), a cron expression, or calculated: as fresh as its readers need.",
)
@click.option(
    "--mode",
    type=MODE,
    default="AUTO",
    show_default=True,
    help="DIFFERENTIAL refuses a query that cannot be maintained differentially.",
)
@click.option("--placement", type=PLACEMENT, help="Where joins and aggregates run; default: the database's setting.")
@click.option("--pooler", is_flag=True, help="Refresh it without session state, for poolers in transaction mode.")
@click.option("--no-init", is_flag=True, help="Leave the table empty until its first refresh.")
@click.option("--st-placement", type=ST_PLACEMENT, help="In a Citus cluster: the kind of table; default: auto.")
@click.option("--output-distribution-column", metavar="COLUMN", help="In a Citus cluster: the distribution column.")
@as_json
@with_dsn
def create(
    dsn: str | None,
    name: str,
    query: str | None,
    file: IO[str] | None,
    schedule: str,
    mode: str,
    placement: str | None,
    pooler: bool,
    no_init: bool,
    st_placement: str | None,
    output_distribution_column: str | None,
    as_json: bool,
) -> None:
    """Create stream table NAME from QUERY and fill it.

    Without QUERY and --file the query is read from stdin.
    """
    text = _query(query, file)
    with open_database(dsn) as database:
        table = database.create_stream_table(
            name,
            text,
            schedule=schedule,
            refresh_mode=mode,
            placement=placement,
            pooler_compatibility_mode=pooler,
            initialize=False,
            st_placement=st_placement,
            output_distribution_column=output_distribution_column,
        )
        if not no_init:
            table = _fill(database, name, table.id)
        if as_json:
            print_json(table)
            return
        why = f" ({table.mode_reason})" if table.mode_reason else ""
        mode = {"DIFFERENTIAL": "differentially", "FULL": "in full"}.get(table.effective_mode or "", "as it turns out")
        echo(f"created {table.name}; it will be refreshed {mode}{why}")


@click.command(
    epilog="""\b
Examples:
  pgtrickle alter revenue --schedule 5m
  pgtrickle alter revenue --status SUSPENDED
  pgtrickle alter revenue --query "SELECT region, sum(amount) AS total FROM orders WHERE paid GROUP BY region\""""
)
@click.argument("name")
@click.option("--query", help="A query with the same columns; the next refresh re-initializes the table.")
@click.option("-f", "--file", type=click.File(encoding="utf-8"), help="Read the new query from a file; - is stdin.")
@click.option("--schedule", help="A duration (30s, 5m), a cron expression, or calculated.")
@click.option("--mode", type=MODE)
@click.option("--placement", type=PLACEMENT)
@click.option(
    "--pooler/--no-pooler", default=None, help="Refresh it without session state, for poolers in transaction mode."
)
@click.option("--status", type=click.Choice(["ACTIVE", "SUSPENDED"], case_sensitive=False))
@click.option(
    "--lost-members",
    type=click.Choice(["wait", "keep"]),
    help="While a database of a set cannot be reached: wait for it, or continue with its last known rows.",
)
@with_dsn
def alter(
    dsn: str | None,
    name: str,
    query: str | None,
    file: IO[str] | None,
    schedule: str | None,
    mode: str | None,
    placement: str | None,
    pooler: bool | None,
    status: str | None,
    lost_members: str | None,
) -> None:
    """Change the query, schedule, mode, placement or status of stream table NAME."""
    text = _query(query, file) if query is not None or file is not None else None
    if all(value is None for value in (text, schedule, mode, placement, pooler, status, lost_members)):
        raise click.UsageError("Specify what to change; see `pgtrickle alter --help`.")
    with open_database(dsn) as database:
        table = database.alter_stream_table(
            name,
            query=text,
            schedule=schedule,
            refresh_mode=mode,
            placement=placement,
            pooler_compatibility_mode=pooler,
            status=status,
            lost_members=lost_members,
        )
        echo(f"altered {table.name}")


@click.command()
@click.argument("name")
@click.option("--cascade", is_flag=True, help="Also drop the stream tables and views that read it.")
@with_dsn
def drop(dsn: str | None, name: str, cascade: bool) -> None:
    """Drop stream table NAME."""
    with open_database(dsn) as database:
        database.drop_stream_table(name, cascade=cascade)
        echo(f"dropped {name}")


def _fill(database: Database, name: str, id_: int) -> StreamTable:
    from pgtrickle.cli.refresh_request import bring_up_to_date

    try:
        bring_up_to_date(database, {name: id_}, initiated_by="INITIAL").raise_problems(1)
    except BaseException:
        echo(f"{name} was created but not filled; `pgtrickle refresh {name}` does it", err=True)
        raise
    return database.stream_table(name)


def _query(argument: str | None, file: IO[str] | None) -> str:
    if argument is not None and file is not None:
        raise click.UsageError("Pass the query once: as an argument or with --file.")
    if argument is not None:
        text = argument
    elif file is not None:
        text = file.read()
    elif sys.stdin.isatty():
        raise click.UsageError("Pass the query as an argument, with --file, or on stdin.")
    else:
        text = sys.stdin.read()
    if not text.strip():
        raise click.UsageError("The query is empty.")
    return text
