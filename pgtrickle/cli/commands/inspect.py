"""The commands `list`, `status`, `explain` and `history`."""

from __future__ import annotations

import click

from pgtrickle.cli.common import age, as_json, echo, failures, open_database, print_json, print_table, with_dsn


@click.command("list")
@as_json
@with_dsn
def list_tables(dsn: str | None, as_json: bool) -> None:
    """List the stream tables of the database."""
    with open_database(dsn) as database:
        tables = database.stream_tables()
    if as_json:
        print_json(tables)
        return
    print_table(
        ("stream table", "owner", "status", "schedule", "mode", "query"),
        ((t.name, t.owner, t.status, t.schedule, t.refresh_mode, " ".join((t.query or "").split())) for t in tables),
        "there are no stream tables; `pgtrickle create --help` shows how to create one",
    )


@click.command()
@as_json
@with_dsn
def status(dsn: str | None, as_json: bool) -> None:
    """Show how fresh the stream tables are and what their last refresh did."""
    with open_database(dsn) as database:
        rows = database.status()
    if as_json:
        print_json(rows)
        return
    print_table(
        ("stream table", "status", "mode", "staleness", "last", "rows", "seconds", "remarks"),
        (
            (
                row.name,
                row.status,
                row.effective_mode or row.refresh_mode,
                age(row.staleness) or "never filled",
                row.last_action or row.last_status,
                f"+{row.rows_inserted} −{row.rows_deleted}" if row.rows_inserted is not None else None,
                f"{row.seconds:.2f}" if row.seconds is not None else None,
                "; ".join(
                    text
                    for text in (
                        row.mode_reason,
                        row.status_reason,
                        f"re-initializes next: {row.reinit_reason}" if row.reinit_reason else None,
                        failures(row.errors, row.last_error) if row.errors or row.last_error else None,
                    )
                    if text
                ),
            )
            for row in rows
        ),
        "there are no stream tables",
    )


@click.command()
@click.argument("name")
@as_json
@with_dsn
def explain(dsn: str | None, name: str, as_json: bool) -> None:
    """Print the delta plan of stream table NAME as a tree: what runs where, and why."""
    with open_database(dsn) as database:
        text = database.explain(name)
        table = database.stream_table(name)
    if as_json:
        modes = {
            "refresh_mode": table.refresh_mode,
            "effective_mode": table.effective_mode,
            "reason": table.mode_reason,
        }
        print_json({"name": table.name, "query": table.query, **modes, "plan": text.splitlines()})
    else:
        echo(text)


@click.command(epilog="\b\nExample:\n  pgtrickle history revenue --limit 100 --json")
@click.argument("name")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Number of refreshes.")
@as_json
@with_dsn
def history(dsn: str | None, name: str, limit: int, as_json: bool) -> None:
    """Show the last refreshes of stream table NAME, newest first."""
    with open_database(dsn) as database:
        rows = database.history(name, limit)
    if as_json:
        print_json(rows)
        return
    print_table(
        ("started", "status", "action", "by", "rows in", "inserted", "deleted", "phases", "reason"),
        (
            (
                row["start_time"].strftime("%Y-%m-%d %H:%M:%S"),
                row["status"],
                row["action"],
                row["initiated_by"],
                row["rows_in"],
                row["rows_inserted"],
                row["rows_deleted"],
                " ".join(f"{phase} {seconds:.3f}" for phase, seconds in (row["phases"] or {}).items()),
                row["error"] or row["reason"],
            )
            for row in rows
        ),
        f"{name} was never refreshed",
    )
