"""The command `verify`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pgtrickle._version import __version__
from pgtrickle.cli.common import as_json, echo, open_database, print_json, print_table, with_dsn
from pgtrickle.errors import PgtrickleError
from pgtrickle.spark.progress import quiet_jvm

if TYPE_CHECKING:
    from pgtrickle.api.database import Database, Verification

REPAIRED = "pgtrickle verify found a difference"


@click.command(
    epilog="""\b
Examples:
  pgtrickle verify revenue
  pgtrickle verify --all --json
  pgtrickle verify revenue --evidence revenue.json --repair
\b
Exit code 1 if a stream table differs, or cannot be compared because its refresh fails."""
)
@click.argument("names", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All stream tables that are not suspended.")
@click.option("--repair", is_flag=True, help="Re-initialize the stream tables that differ.")
@click.option(
    "--evidence",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="If a stream table differs, write a file for a bug report: counts, frontiers and history; no query, no data.",
)
@click.option(
    "--with-data", is_flag=True, help="Include the query, the plan and the first differing rows in that file."
)
@as_json
@with_dsn
def verify(
    dsn: str | None,
    names: tuple[str, ...],
    everything: bool,
    repair: bool,
    evidence: Path | None,
    with_data: bool,
    as_json: bool,
) -> None:
    """Compare stream tables with their queries.

    Each is refreshed, and then compared in the same snapshot: PostgreSQL runs the query once and adds up hashes of its
    rows and of the table's, so no rows are copied. If the sums differ, the first missing or unexpected rows are shown.
    Results are stored in pgtrickle.pgt_verifications and shown by pgt_status().
    """
    if bool(names) == everything:
        raise click.UsageError("Name stream tables, or give --all.")
    if with_data and evidence is None:
        raise click.UsageError("--with-data is for the file of --evidence.")
    found: list[Verification] = []
    with open_database(dsn) as database, quiet_jvm():
        wanted = (
            [table.name for table in database.stream_tables() if table.status != "SUSPENDED"] if everything else names
        )
        for name in wanted:
            found += database.verify(name)
        differing = [one for one in found if one.equal is False]
        if differing and evidence is not None:
            report = [_evidence(database, one, with_data) for one in differing]
            evidence.touch(mode=0o600)  # with --with-data it holds rows
            evidence.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
        repaired = [database.reinitialize(one.name, REPAIRED) for one in differing] if repair else []
    if as_json:
        print_json(found)
    else:
        _print(found)
    if differing and evidence is not None:
        echo(f"evidence: {evidence}", err=True)
    if repaired:
        echo(f"re-initialized: {', '.join(result.name for result in repaired)}", err=True)
    elif differing:
        named = ", ".join(one.name for one in differing)
        raise PgtrickleError(
            f"{len(differing)} of {len(found)} stream tables differ from their queries: {named}",
            "Run `pgtrickle verify --repair` to re-initialize them, and please report it with the file that --evidence writes.",
        )
    if failed := [one.name for one in found if one.failed]:
        raise PgtrickleError(
            f"{len(failed)} of {len(found)} stream tables could not be compared: {', '.join(failed)}",
            "The table shows why. Once a refresh of such a stream table succeeds, verify it again.",
        )


def _print(found: list[Verification]) -> None:
    print_table(
        ("stream table", "result", "rows", "missing", "unexpected", "query s", "table s", "why not"),
        (
            (
                one.name,
                {True: "equal", False: "DIFFERENT", None: "not compared"}[one.equal],
                one.rows,
                one.missing,
                one.unexpected,
                f"{one.query_seconds:.3f}",
                f"{one.table_seconds:.3f}",
                one.reason,
            )
            for one in found
        ),
        "there are no stream tables",
    )
    for one in found:
        for kind, rows in (("missing", one.missing_rows), ("unexpected", one.unexpected_rows)):
            if rows:
                echo(f"\n{one.name}, {kind}:")
                print_table(one.columns, rows, "")


def _evidence(database: Database, one: Verification, with_data: bool) -> dict[str, Any]:
    """The contents of a bug report. Query and plan contain users' constants, so they count as data."""
    table = database.stream_table(one.name)
    told = ("start_time", "action", "status", "rows_in", "rows_inserted", "rows_deleted", "phases", "sqlstate")
    history = [{key: entry[key] for key in told} for entry in database.history(one.name)]
    frontiers = database.conn.execute(
        "SELECT at, equal, frontier FROM pgtrickle.pgt_verifications WHERE pgt_id = %s ORDER BY at DESC LIMIT 10",
        (one.pgt_id,),
    ).fetchall()
    known = {
        "pgtrickle": __version__,
        "server": database.conn.info.server_version,
        "stream_table": one.name,
        "refresh_mode": table.refresh_mode,
        "effective_mode": table.effective_mode,
        "key": table.key,
        "rows": one.rows,
        "missing": one.missing,
        "unexpected": one.unexpected,
        "verifications": frontiers,
        "history": history,
    }
    if not with_data:
        return known
    return known | {"query": table.query, "plan": database.explain(one.name), "found": asdict(one)}
