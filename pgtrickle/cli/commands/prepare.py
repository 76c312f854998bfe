"""The command `prepare`."""

from __future__ import annotations

import click

from pgtrickle.cli.common import as_json, print_json
from pgtrickle.spark.progress import quiet_jvm


@click.command()
@as_json
def prepare(as_json: bool) -> None:
    """Make Spark start faster on this machine.

    Java loads and checks Spark's classes whenever a command starts Spark. This command does it once and stores the
    result in a file of about 170 MB below ~/.cache/pgtrickle (or XDG_CACHE_HOME), which later commands of this user
    read. It takes about a minute. Run it again after an update of Java or pgtrickle; until then Spark starts as if
    there were no file.
    """
    from pgtrickle.spark.prepare import make_archive

    if not as_json:
        click.echo("running Spark once and recording its classes, which takes about a minute…", err=True)
    with quiet_jvm():
        path = make_archive()
    size = path.stat().st_size
    if as_json:
        print_json({"file": str(path), "bytes": size})
    else:
        click.echo(f"Spark's classes are in {path} ({size / 1e6:.0f} MB).")
