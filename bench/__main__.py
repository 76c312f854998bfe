"""`python -m bench`: everything with small defaults; `python -m bench refresh --help` and so on for parts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from rich.console import Console

from bench import (
    broker,
    citus,
    fusion,
    isolation,
    many,
    patterns,
    quotas,
    refresh,
    steady,
    tenants,
    tick,
    tpch,
    write_cost,
)
from bench.dataset import QUERIES
from bench.server import Bench, bench_server
from bench.tables import print_refresh, print_verdicts
from bench.targets import refresh_verdicts
from pgtrickle.spark.session import stop_spark

_LABELS = "1000,0.1%,1%"
_out = click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("bench-results"),
    show_default=True,
    help="Where pictures go.",
)


@click.group(invoke_without_command=True)
@click.pass_context
def main(context: click.Context) -> None:
    """Measure pgtrickle on a PostgreSQL of its own. Without a command, everything, over a million rows."""
    # Ended from outside, as by `timeout`, Python would leave the server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    if context.invoked_subcommand is None:
        for command in (refresh_command, write_cost_command, fusion_command):
            context.invoke(command)


@main.command("refresh")
@click.option("--rows", type=int, multiple=True, default=[1_000_000], show_default=True, help="Rows of the source.")
@click.option("--changes", default=_LABELS, show_default=True, help="Changes per refresh, as numbers or percentages.")
@click.option(
    "--query", "queries", multiple=True, type=click.Choice(list(QUERIES)), help="Only this one; all if not given."
)
@click.option("--repeat", default=5, show_default=True, help="Measured cycles per size and change.")
@_out
def refresh_command(rows: tuple[int, ...], changes: str, queries: tuple[str, ...], repeat: int, out: Path) -> None:
    """Refreshes beside REFRESH MATERIALIZED VIEW."""
    from bench.plot import plot_phases, plot_times  # slow to import

    console, report = _console(), refresh.Report()
    with _progress(console) as say, bench_server() as bench:
        try:
            refresh.run(bench, rows, changes.split(","), queries or tuple(QUERIES), repeat, report, say)
        except KeyboardInterrupt:
            if not report.cells:
                raise
            console.print("[bold]Interrupted[/]: what was measured until here, not checked against the queries")
    stop_spark()
    print_refresh(console, report)
    print_verdicts(console, refresh_verdicts(report))
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in (("refresh.png", plot_times), ("phases.png", plot_phases)):
        draw(report, out / name)
        console.print(f"wrote {out / name}")


@main.command("write-cost")
@click.option("--rows", default=200_000, show_default=True, help="Rows per statement.")
@click.option("--single", default=100, show_default=True, help="Single-row INSERTs per block, ten blocks a repeat.")
@click.option("--repeat", default=7, show_default=True)
def write_cost_command(rows: int, single: int, repeat: int) -> None:
    """What capture costs the writer."""
    console = _console()
    with _progress(console) as say, bench_server() as bench:
        costs = write_cost.run(bench, rows, single, repeat, say)
    write_cost.show(console, costs, rows)
    print_verdicts(console, write_cost.verdicts(costs))


@main.command("fusion")
@click.option("--rows", default=100_000, show_default=True, help="Rows of the source.")
@click.option("--changes", default=1_000, show_default=True, help="Changes per refresh.")
@click.option("--repeat", default=7, show_default=True)
def fusion_command(rows: int, changes: int, repeat: int) -> None:
    """One, ten and fifty stream tables in one call."""
    console = _console()
    with _progress(console) as say, bench_server() as bench:
        for family in fusion.run(bench, rows, changes, repeat, say):
            fusion.show(console, family)
            print_verdicts(console, fusion.verdicts(family))
    stop_spark()


@main.command("tick")
@click.option("--count", "counts", type=int, multiple=True, default=tick.COUNTS, show_default=True)
@click.option("--ticks", default=tick.TICKS, show_default=True)
@_out
def tick_command(counts: tuple[int, ...], ticks: int, out: Path) -> None:
    """What an idle tick of the scheduler costs."""
    _measure(tick, lambda bench, say: tick.run(bench, tuple(sorted(counts)), ticks, say), out / "tick.png")


@main.command("many")
@click.option("--count", default=500, show_default=True, help="Stream tables.")
@click.option("--sources", default=50, show_default=True)
@click.option("--repeat", default=3, show_default=True)
@_out
def many_command(count: int, sources: int, repeat: int, out: Path) -> None:
    """Many stream tables at once: fused, one after the other, by four workers; a chain and a fan."""
    _measure(many, lambda bench, say: many.run(bench, count, sources, repeat, say), out / "many.png")


@main.command("steady")
@click.option("--rate", default=5_000, show_default=True, help="Changes a second.")
@click.option("--seconds", default=60.0, show_default=True)
@_out
def steady_command(rate: int, seconds: float, out: Path) -> None:
    """Staleness under a steady stream of changes, with the service at work."""
    _measure(steady, lambda bench, say: steady.run(bench, rate, seconds, say), out / "staleness.png")


@main.command("quotas")
@click.option("--seconds", default=60.0, show_default=True, help="Without and with the flood, each.")
@_out
def quotas_command(seconds: float, out: Path) -> None:
    """How long changes of quiet databases wait beside one that floods."""
    _measure(quotas, lambda bench, say: quotas.run(bench, seconds, say), out / "quotas.png")


@main.command("broker")
@click.option("--seconds", default=30.0, show_default=True, help="Without and with the broker, each, in every cycle.")
@click.option("--repeat", default=2, show_default=True)
@_out
def broker_command(seconds: float, repeat: int, out: Path) -> None:
    """What the refresh broker saves a database that ten others read."""
    _measure(broker, lambda bench, say: broker.run(bench, seconds, repeat, say), out / "broker.png")


@main.command("tenants")
@click.option("--databases", default=100, show_default=True)
@click.option("--connections", default=20, show_default=True, help="That the service may have to the server.")
@click.option("--seconds", default=60.0, show_default=True)
@_out
def tenants_command(databases: int, connections: int, seconds: float, out: Path) -> None:
    """One service for many databases, with fewer connections."""
    _measure(tenants, lambda bench, say: tenants.run(bench, databases, connections, seconds, say), out / "tenants.png")


@main.command("patterns")
@click.option("--databases", default=10, show_default=True)
@_out
def patterns_command(databases: int, out: Path) -> None:
    """What one more database costs in connections and memory, by way of looking after it."""
    _measure(patterns, lambda bench, say: patterns.run(bench, databases, say), out / "patterns.png", patterns.SETTINGS)


@main.command("citus")
@click.option("--rows", default=5_000_000, show_default=True, help="Of the table that is read.")
@click.option("--repeat", default=3, show_default=True)
@click.option("--single", default=200, show_default=True, help="Single-row statements per block, five blocks a repeat.")
@_out
def citus_command(rows: int, repeat: int, single: int, out: Path) -> None:
    """A Citus cluster, where one is installed: reading shards, ways to apply, write cost."""
    console = _console()
    with _progress(console) as say:
        measured = citus.run(rows, repeat, single, say)
    stop_spark()
    citus.show(console, measured)
    print_verdicts(console, citus.verdicts(measured))
    out.mkdir(parents=True, exist_ok=True)
    citus.plot(measured, out / "citus.png")
    console.print(f"wrote {out / 'citus.png'}")


@main.command("tpch")
@click.option("--scale", default=0.1, show_default=True, help="1 has 1.5 million orders.")
@click.option("--changes", default=0.0001, show_default=True, help="Share of the orders that are replaced per round.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--query", "queries", multiple=True, type=click.Choice(list(tpch.QUERIES)), help="Only this one.")
def tpch_command(scale: float, changes: float, rounds: int, queries: tuple[str, ...]) -> None:
    """The queries of TPC-H that join six to eight tables, beside their refreshes."""
    console = _console()
    with _progress(console) as say, bench_server() as bench:
        figures = tpch.run(bench, scale, changes, rounds, say, queries)
    stop_spark()
    tpch.show(console, figures)


@main.command("isolation")
@click.option("--seconds", default=60.0, show_default=True, help="Without and with trouble, each.")
@_out
def isolation_command(seconds: float, out: Path) -> None:
    """Staleness of two databases of which one has a stream table that fails and one that is locked out."""
    _measure(isolation, lambda bench, say: isolation.run(bench, seconds, say), out / "isolation.png")


def _measure(
    part: ModuleType,
    run: Callable[[Bench, Callable[[str], None]], Any],
    picture: Path,
    settings: Mapping[str, str] | None = None,
) -> None:
    """Run a measurement of the service; print its figures, what was to be reached, and a picture."""
    console = _console()
    with _progress(console) as say, bench_server(settings) as bench:
        measured = run(bench, say)
    stop_spark()
    part.show(console, measured)
    print_verdicts(console, part.verdicts(measured))
    picture.parent.mkdir(parents=True, exist_ok=True)
    part.plot(measured, picture)
    console.print(f"wrote {picture}")


def _console() -> Console:
    # Tables are wide; where the output is a file there is no terminal to ask for its width.
    console = Console()
    return console if console.is_terminal else Console(width=170)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """What is being done, in a line that goes away; line by line where the output is a file."""
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
    else:
        yield lambda text: click.echo(f"{datetime.now():%H:%M:%S} {text}", err=True)


if __name__ == "__main__":
    main()
