"""Run the demo: start a server, load the shop, create stream tables, refresh and check them, and clean up."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live

from pgtrickle.api.database import Database, connect
from pgtrickle.demo.check import differences
from pgtrickle.demo.shop import SETTINGS, Writer, open_shop, stream_tables
from pgtrickle.demo.view import Board, Shown
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.errors import PgtrickleError
from pgtrickle.spark.progress import STARTING, quiet_jvm
from pgtrickle.spark.session import check_java

REFRESH_SECONDS = 1.0
CHECK_SECONDS = 10.0
KINDS = {
    "open_orders": "filter",
    "order_lines": "join",
    "product_sales": "aggregate",
    "revenue_by_region": "join, aggregate",
    "strong_regions": "on another",
}


def play(seconds: float | None, rows: int) -> int:
    """Run the demo for some seconds, or until interrupted; return the exit code."""
    check_java()  # fail before the set-up, which takes up to a minute
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    with _server() as server, quiet_jvm():
        console.print(f"PostgreSQL {server.version} is running; loading the shop ({rows:,} order items)…")
        dsn = open_shop(server, rows)
        console.print(f"connect to it: psql {dsn}", soft_wrap=True)
        console.print(STARTING)
        with connect(dsn) as database:
            board = _set_up(database, console, f"psql {dsn}")
            try:
                with Writer(dsn) as writer, _live(board, console) as show:
                    _refresh_and_check(database, dsn, writer, board, show, seconds)
            finally:
                console.print(board.summary())
    console.print(
        "every check: OK" if not board.mismatches else f"MISMATCH in {board.mismatches} of {board.checks} checks"
    )
    return 1 if board.mismatches else 0


@contextmanager
def _server() -> Iterator[EmbeddedServer]:
    """Run a server in a temporary directory; both are removed when the block ends, even after an error."""
    folder = Path(tempfile.mkdtemp(prefix="pgtrickle-demo-"))
    server = EmbeddedServer(folder / "data", version=18, settings=SETTINGS)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _set_up(database: Database, console: Console, psql: str) -> Board:
    database.install()
    tables = {}
    for name, query in stream_tables().items():
        began = time.monotonic()
        table = database.create_stream_table(name, query, schedule="1s")
        tables[table.name] = Shown(KINDS[name])
        console.print(f"created {name} ({KINDS[name]}), filled in {time.monotonic() - began:.1f} s")
    return Board(tables, psql)


@contextmanager
def _live(board: Board, console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a progress line. On a terminal it does nothing: the board is redrawn instead."""
    if not console.is_terminal:
        yield lambda line: console.print(line, soft_wrap=True)
        return
    with Live(get_renderable=board.__rich__, console=console, refresh_per_second=4, transient=True):
        yield lambda line: None


def _refresh_and_check(
    database: Database, dsn: str, writer: Writer, board: Board, show: Callable[[str], None], seconds: float | None
) -> None:
    checked = time.monotonic()
    while True:
        began = time.monotonic()
        over = seconds is not None and board.elapsed() >= seconds
        if over or began - checked >= CHECK_SECONDS:
            with writer.paused():
                _refresh(database, writer, board)
                _check(database, dsn, board)
            checked = time.monotonic()
            verdicts = ", ".join(f"{name} {shown.verdict}" for name, shown in board.tables.items())
            show(f"{board.line()}\n        check: {verdicts}")
        else:
            _refresh(database, writer, board)
            show(board.line())
        if over:
            return
        time.sleep(max(0.0, REFRESH_SECONDS - (time.monotonic() - began)))


def _refresh(database: Database, writer: Writer, board: Board) -> None:
    if writer.error is not None:
        raise PgtrickleError(f"a write to the shop failed: {writer.error}") from writer.error
    began = time.monotonic()
    for result in database.refresh_all():
        board.tables[result.name].add(result, began)
    board.written = writer.rows


def _check(database: Database, dsn: str, board: Board) -> None:
    board.checks += 1
    for name, wrong in differences(database, dsn).items():
        board.tables[name].wrong = wrong
    if any(shown.wrong for shown in board.tables.values()):
        board.mismatches += 1
