"""The command `refresh`."""

from __future__ import annotations

import click

from pgtrickle.cli.common import WAIT_SECONDS, as_json, echo, open_database, print_json, print_table, with_dsn


@click.command(
    epilog="""\b
Examples:
  pgtrickle refresh revenue
  pgtrickle refresh revenue sales.big_orders
  pgtrickle refresh --all --json
  pgtrickle refresh revenue --request-id nightly-2026-11-16 --timeout 300     from Airflow, cron and similar tools"""
)
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All stream tables that are not suspended.")
@click.option("--local", is_flag=True, help="Refresh in this process even if a service is running.")
@click.option(
    "--request-id",
    metavar="ID",
    help="Request the refresh from the service; repeating the command with the same ID does not request it again.",
)
@click.option("--timeout", default=WAIT_SECONDS, show_default=True, help="Seconds to wait for the service.")
@as_json
@with_dsn
def refresh(
    dsn: str | None,
    names: tuple[str, ...],
    everything: bool,
    local: bool,
    request_id: str | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Bring stream tables up to date, all in one Spark job.

    A running service does the work. Without one, this process starts Spark if there is something to compute.
    """
    if bool(names) == everything:
        raise click.UsageError("Name stream tables, or give --all.")
    if local and request_id is not None:
        raise click.UsageError("--request-id is for a service, --local for this process.")
    from pgtrickle.cli.refresh_request import bring_up_to_date

    with open_database(dsn) as database:
        if everything:
            found = database.stream_tables()
            tables = [table for table in found if table.status != "SUSPENDED"]
            if len(tables) < len(found):
                skipped = ", ".join(table.name for table in found if table.status == "SUSPENDED")
                echo(f"suspended, not refreshed: {skipped}", err=True)
        else:
            tables = [database.stream_table(name) for name in names]
        ids = {table.name: table.id for table in tables}
        outcome = bring_up_to_date(database, ids, local=local, key=request_id, seconds=timeout)
    places = list(ids.values())
    results = sorted(outcome.results, key=lambda result: places.index(result.pgt_id))
    if as_json:
        print_json(results)
    else:
        print_table(
            ("stream table", "action", "inserted", "deleted", "seconds", "reason"),
            (
                (r.name, r.action, r.rows_inserted, r.rows_deleted, f"{sum(r.phases.values()):.2f}", r.reason)
                for r in results
            ),
            "there are no stream tables" if not ids else "nothing was refreshed",
        )
    outcome.raise_problems(len(ids))
