"""The command `profile`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pgtrickle.cli.common import as_json, open_database, print_json, stop_on_signals, with_dsn

if TYPE_CHECKING:
    from pgtrickle.api.database import Database
    from pgtrickle.observability.sampling import Sample, Verdict

WITHOUT_MATPLOTLIB = "no profile.png: matplotlib is not installed (pip install matplotlib, or pgtrickle[dev])"


@click.command(
    epilog="""\b
Examples:
  pgtrickle profile --seconds 300 --out profile-4-workers
  pgtrickle profile --out now --json | jq -r .verdict"""
)
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=60, show_default=True, help="How long to sample."
)
@click.option(
    "--interval",
    type=click.FloatRange(0, min_open=True),
    default=1,
    show_default=True,
    help="Seconds between samples.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="DIR",
    help="The directory for profile.csv and profile.png; created if missing.",
)
@as_json
@with_dsn
def profile(dsn: str | None, seconds: float, interval: float, out: Path, as_json: bool) -> None:
    """Sample how busy the refresh workers are and how many jobs wait, and report whether the pool has the right size.
    Writes DIR/profile.csv while sampling and DIR/profile.png at the end. Ctrl-C stops early and reports the samples
    taken so far. To size a pool, profile under load with max_dynamic_refresh_workers set to 4, 8 and 16 in turn.
    """
    from pgtrickle.observability.sampling import judge, plot, require_pool_functions

    stop_on_signals()
    with open_database(dsn) as database:
        require_pool_functions(database.conn)
        if database.conn.execute("SELECT services FROM pgtrickle.health_summary()").fetchone() == (0,):
            click.echo("warning: no service serves this database, so no worker is busy", err=True)
            click.echo("hint: Start one with `pgtrickle run`.", err=True)
        out.mkdir(parents=True, exist_ok=True)
        samples = _sample(database, seconds, interval, out / "profile.csv")
    if not samples:
        raise KeyboardInterrupt
    verdict = judge(samples)
    written = [out / "profile.csv"]
    try:
        plot(samples, verdict, out / "profile.png")
        written.append(out / "profile.png")
    except ImportError:
        # A plot from an earlier run next to this run's figures would be misleading.
        (out / "profile.png").unlink(missing_ok=True)
        click.echo(WITHOUT_MATPLOTLIB, err=True)
    if as_json:
        print_json(verdict)
    else:
        _print_verdict(verdict, written)


def _sample(database: Database, seconds: float, interval: float, path: Path) -> list[Sample]:
    """Take samples and write each to the file at once, so that none is lost if the command ends early."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from pgtrickle.observability.sampling import take_samples

    console = Console(stderr=True)
    if not console.is_terminal:
        click.echo(f"sampling for {seconds:g} s; Ctrl-C stops early", err=True)
    samples: list[Sample] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with (
        path.open("w", newline="") as file,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("sampling", total=seconds)
        writer = csv.writer(file)
        writer.writerow(("ts", "active", "pool_size", "queue_depth"))
        try:
            for sample in take_samples(database.conn, seconds, interval):
                samples.append(sample)
                writer.writerow((sample.ts.isoformat(), sample.active, sample.pool_size, sample.queue_depth))
                file.flush()
                progress.update(
                    task,
                    completed=(sample.ts - samples[0].ts).total_seconds(),
                    description=f"{sample.active} of {sample.pool_size} workers busy, {sample.queue_depth} jobs wait",
                )
        except KeyboardInterrupt:
            if samples:
                click.echo(f"ended early, after {len(samples)} samples", err=True)
    return samples


def _print_verdict(verdict: Verdict, written: list[Path]) -> None:
    click.echo(f"{verdict.verdict}: {verdict.reason}")
    click.echo(f"  {verdict.advice}")
    click.echo(
        f"  {verdict.samples} samples in {verdict.seconds:.0f} s; of {verdict.pool_size} workers {verdict.mean_utilisation:.0%}"
        f" busy on average, {verdict.most_active} at most; {verdict.mean_queue_depth:.1f} jobs waiting on average,"
        f" {verdict.most_queued} at most"
    )
    click.echo(f"  written: {', '.join(map(str, written))}")
