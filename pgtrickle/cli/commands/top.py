"""The command `top`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from pgtrickle.cli.common import age, open_database, printable, stop_on_signals, with_dsn

if TYPE_CHECKING:
    import psycopg
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

JOBS, EVENTS = 6, 6
# Lines of a frame that do not show stream tables: health and pool, headings, separators, jobs and events.
OTHER_LINES = JOBS + EVENTS + 12
PIPE_WIDTH = 160
COLOURS = {"ACTIVE": "green", "SUSPENDED": "yellow", "ERROR": "red", "FAILED": "red", "RUNNING": "green"}


@click.command(epilog="\b\nExamples:\n  pgtrickle top\n  pgtrickle top --once | head -3")
@click.option("--once", is_flag=True, help="Print one frame and exit; the default without a terminal.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    default=1,
    show_default=True,
    help="Seconds between frames.",
)
@with_dsn
def top(dsn: str | None, once: bool, interval: float) -> None:
    """Watch the service: health, worker pool, stalest stream tables, jobs, events. Ctrl-C stops it."""
    from rich.console import Console
    from rich.live import Live

    from pgtrickle.observability.sampling import require_pool_functions

    stop_on_signals()
    on_terminal = sys.stdout.isatty()
    console = Console(width=None if on_terminal else PIPE_WIDTH)
    try:
        with open_database(dsn) as database:
            require_pool_functions(database.conn)
            if once or not on_terminal:
                console.print(_frame(database.conn, None))
                return
            first = _frame(database.conn, _room(console))
            with Live(first, console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(interval)
                    live.update(_frame(database.conn, _room(console)), refresh=True)
    except KeyboardInterrupt:
        return  # the normal way to end it


def _room(console: Console) -> int:
    """How many stream tables a frame can show while everything below them stays on the screen."""
    return max(3, console.height - OTHER_LINES)


def _frame(conn: psycopg.Connection[Any], limit: int | None) -> Group:
    from rich.console import Group

    return Group(
        _health(conn), _pool(conn), "", _stream_tables(conn, limit), "", _jobs(conn), "", _events(conn)
    )  # fmt: skip


def _health(conn: psycopg.Connection[Any]) -> Text:
    from rich.text import Text

    found = conn.execute(
        "SELECT scheduler_status, services, total_stream_tables, active_count, error_count, suspended_count, stale_count,"
        " max_staleness_seconds::float, cache_hit_rate::float, pending_requests, to_char(clock_timestamp(), 'HH24:MI:SS')"
        " FROM pgtrickle.health_summary()"
    ).fetchone()
    assert found is not None
    scheduler, services, total, active, errors, suspended, stale, stalest, hits, requests, clock = found
    line = Text(f"{conn.info.dbname}  {clock}  scheduler ")
    line.append(str(scheduler), "bold")
    line.append(f", services {services}  ·  {total} stream tables: {active} active")
    for number, said, colour in (
        (errors, "with errors", "red"),
        (suspended, "suspended", "yellow"),
        (stale, "stale", "red"),
    ):
        line.append(", ")
        line.append(f"{number} {said}", colour if number else "")
    line.append(f"  ·  stalest {age(stalest) or '–'}")
    line.append(f"  ·  plans found {hits:.0%}" if hits is not None else "")
    line.append(f"  ·  {requests} requests wait")
    return line


def _pool(conn: psycopg.Connection[Any]) -> Text:
    from rich.text import Text

    found = conn.execute(
        "SELECT active_workers, max_workers, per_db_cap, parallel_mode FROM pgtrickle.worker_pool_status()"
    ).fetchone()
    active, size, cap, mode = found if found is not None else (0, 0, 0, "off")
    line = Text(f"pool  {active} of {size} workers busy  ")
    width = min(size or 0, 64)
    line.append("█" * min(active or 0, width), "green" if active < size else "red")
    line.append("░" * max(0, width - (active or 0)), "dim")
    line.append(f"  ·  at most {cap} for this database  ·  parallel_refresh_mode {mode}")
    return line


def _stream_tables(conn: psycopg.Connection[Any], limit: int | None) -> Table | Text:
    rows = conn.execute(
        "SELECT format('%%I.%%I', pgt_schema, pgt_name), status, tier, schedule, staleness_seconds::float, last_ms::float,"
        " refreshes, failures, consecutive_errors, last_error, count(*) OVER () FROM pgtrickle.pg_stat_stream_tables"
        " ORDER BY staleness_seconds DESC NULLS FIRST, 1 LIMIT %s",
        (limit,),
    ).fetchall()
    total = rows[0][-1] if rows else 0
    title = "stream table" if total == len(rows) else f"stream table ({len(rows)} stalest of {total})"
    return _table(
        (title, "status", "tier", "schedule", "staleness", "last ms", "refreshes", "errors", "last error"),
        {"staleness", "last ms", "refreshes", "errors"},
        [
            (
                name,
                status,
                tier,
                schedule,
                age(staleness) or "never filled",
                f"{last_ms:,.0f}" if last_ms is not None else None,
                refreshes,
                f"{failures} ({in_a_row} in a row)" if in_a_row else failures,
                last_error,
            )
            for name, status, tier, schedule, staleness, last_ms, refreshes, failures, in_a_row, last_error, _ in rows
        ],
        "no stream tables",
    )


def _jobs(conn: psycopg.Connection[Any]) -> Table | Text:
    rows = conn.execute(
        "SELECT job_id, kind, stream_tables, status,"
        " extract(epoch FROM clock_timestamp() - coalesce(started_at, enqueued_at))::float,"
        " worker, worker_pid, count(*) OVER ()"
        " FROM pgtrickle.parallel_job_status(5) WHERE status IN ('RUNNING', 'QUEUED')"
        " ORDER BY status DESC, job_id LIMIT %s",
        (JOBS - 1,),
    ).fetchall()
    lines: list[Sequence[object]] = [
        (job, kind, status, age(seconds), worker, pid, ", ".join(tables) if isinstance(tables, list) else tables)
        for job, kind, tables, status, seconds, worker, pid, _ in rows
    ]
    if rows and rows[0][-1] > len(rows):
        lines.append(("…", f"and {rows[0][-1] - len(rows)} more", None, None, None, None, None))
    return _table(("job", "kind", "status", "for", "worker", "pid", "stream tables"), {"for"}, lines, "no jobs")


def _events(conn: psycopg.Connection[Any]) -> Table | Text:
    # On a busy database, five minutes are many thousands of events, and the last few seconds are enough to fill the
    # frame.
    for window in ("10 seconds", "5 minutes"):
        rows = conn.execute(
            "SELECT to_char(at, 'HH24:MI:SS'), event, coalesce(payload ->> 'stream_table', ''), coalesce(payload ->> 'error',"
            " payload ->> 'reason', payload ->> 'action') FROM pgtrickle.events(now() - %s::interval)"
            " ORDER BY at DESC LIMIT %s",
            (window, EVENTS),
        ).fetchall()
        if len(rows) == EVENTS:
            break
    return _table(("at", "event", "stream table", "what"), set(), rows[::-1], "no events in the last five minutes")


def _table(headings: Sequence[str], right: set[str], rows: Sequence[Sequence[object]], empty: str) -> Table | Text:
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return Text(empty, "dim")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        # Text, not str: brackets in a name must not be parsed as markup. Error messages are joined into a single line.
        cells = ("" if cell is None else " ".join(str(cell).split()) for cell in row)
        table.add_row(*(Text(printable(cell), COLOURS.get(cell, "")) for cell in cells))
    return table
