"""The commands `install`, `upgrade` and `uninstall`."""

from __future__ import annotations

import click

from pgtrickle.cli.common import open_database, with_dsn


@click.command(epilog="\b\nExample:\n  pgtrickle install --service-role pgtrickle_service")
@click.option("--service-role", metavar="ROLE", help="The login of the service; default: the installing role.")
@with_dsn
def install(dsn: str | None, service_role: str | None) -> None:
    """Create the catalog in the database, or upgrade an older one.

    Needs the right to create schemas, not superuser. Running it again changes nothing.
    """
    with open_database(dsn) as database:
        version = database.install(service_role=service_role)
        click.echo(f"catalog version {version} is installed in database {database.conn.info.dbname}")


@click.command()
@with_dsn
def upgrade(dsn: str | None) -> None:
    """Upgrade the catalog to this release's version, in one transaction."""
    with open_database(dsn) as database:
        click.echo(f"the catalog has version {database.upgrade()}")


@click.command(epilog="\b\nExample:\n  pgtrickle uninstall --yes --drop-tables")
@click.option("--drop-tables", is_flag=True, help="Drop the stream tables too; otherwise they stay as plain tables.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@with_dsn
def uninstall(dsn: str | None, drop_tables: bool, yes: bool) -> int:
    """Remove the catalog, all capture triggers and change buffers.

    Statements that only the owners of tables can run are printed.
    """
    with open_database(dsn) as database:
        if not yes:
            what = (
                "the catalog and all stream tables" if drop_tables else "the catalog; stream tables become plain tables"
            )
            if not _confirmed(f"Remove {what} in database {database.conn.info.dbname}?"):
                click.echo("nothing was removed", err=True)
                return 1
        remaining = database.uninstall(drop_tables=drop_tables)
        click.echo(f"pgtrickle is removed from database {database.conn.info.dbname}")
        if remaining:
            click.echo("the owners of these tables must still run:", err=True)
            for statement in remaining:
                click.echo(statement)
    return 0


def _confirmed(question: str) -> bool:
    """Ask the user to confirm; False if the input ends without an answer, as in a script."""
    try:
        return click.confirm(question, err=True)
    except click.Abort as error:
        if isinstance(error.__context__, EOFError):
            click.echo(err=True)
            return False
        raise
