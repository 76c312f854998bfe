"""The commands `database …`, which manage remote databases and database sets."""

from __future__ import annotations

import click

from pgtrickle.cli.common import as_json, echo, open_database, print_json, print_table, with_dsn


@click.group(
    epilog="""\b
Examples:
  pgtrickle database add crm "host=crm.example dbname=crm user=pgtrickle password=\\${PGTRICKLE_CRM_PASSWORD}"
  pgtrickle create vip_orders "SELECT o.id, c.name FROM orders o JOIN crm.public.customers c ON c.id = o.customer"
  pgtrickle database check"""
)
def database() -> None:
    """Manage other databases, whose tables queries can name as NAME.schema.table."""


@database.command()
@click.argument("name")
@click.argument("target", metavar="DSN")
@click.option(
    "--role", "roles", multiple=True, help="A local role that may use it, in addition to administrators. Repeatable."
)
@with_dsn
def add(dsn: str | None, name: str, target: str, roles: tuple[str, ...]) -> None:
    """Register the database at DSN as NAME, or change the DSN of NAME.

    pgtrickle must be installed there too, with the DSN's user as its service role. A password is not stored: keep it in
    a password file or service file of libpq, or name a variable of the environment, as
    password=${PGTRICKLE_CRM_PASSWORD}.
    """
    with open_database(dsn) as db:
        added = db.add_database(name, target, roles=roles)
        echo(f"registered {added.name}: name its tables as {added.name}.schema.table")


@database.command("add-set")
@click.argument("name")
@click.argument("members", nargs=-1, metavar="[DATABASE]...")
@click.option(
    "--pattern", help="All registered databases whose names match it, such as tenant_*, including later ones."
)
@click.option(
    "--server", metavar="DSN", help="A server whose databases are registered automatically if they match the pattern."
)
@click.option(
    "--role", "roles", multiple=True, help="A local role that may use it, in addition to administrators. Repeatable."
)
@with_dsn
def add_set(
    dsn: str | None,
    name: str,
    members: tuple[str, ...],
    pattern: str | None,
    server: str | None,
    roles: tuple[str, ...],
) -> None:
    """Register NAME as a set of databases: NAME.schema.table is that table in all of them.

    The column pgt_database names the database of a row. New members join automatically; `pgtrickle database remove`
    removes one.
    """
    with open_database(dsn) as db:
        added = db.add_database_set(name, members, pattern=pattern, server=server, roles=roles)
        echo(f"registered {added.name}: {len(added.members)} databases")
        if added.problem is not None:
            echo(added.problem, err=True)


@database.command("list")
@as_json
@with_dsn
def list_databases(dsn: str | None, as_json: bool) -> None:
    """Show the registered databases, and their tables that have been imported."""
    with open_database(dsn) as db:
        found, sets = db.databases(), db.database_sets()
    if as_json:
        print_json([*found, *sets])
        return
    rows = [(one.name, one.dsn, ", ".join(one.tables), ", ".join(one.roles)) for one in found]
    print_table(("name", "dsn", "tables", "roles"), rows, "no database is registered")
    if sets:
        members = [(one.name, _brief(one.members), ", ".join(one.tables), one.problem or "ok") for one in sets]
        print_table(("set", "members", "tables", "state"), members, "")


def _brief(names: list[str]) -> str:
    """The names, shortened if there are many."""
    return ", ".join(names) if len(names) <= 6 else f"{len(names)}: {', '.join(names[:3])}, … {names[-1]}"


@database.command()
@click.argument("name", required=False)
@with_dsn
def check(dsn: str | None, name: str | None) -> int:
    """Check whether the registered databases, or only NAME, can be reached and read."""
    with open_database(dsn) as db:
        found = [one for one in db.databases() if name in (None, one.name)]
        if not found and name is not None:
            raise click.UsageError(f"No database is registered as {name}.")
        problems = {one.name: db.check_database(one.name) for one in found}
    rows = [(one.name, problems[one.name] or "ok") for one in found]
    print_table(("name", "state"), rows, "no database is registered")
    return 1 if any(problems.values()) else 0


@database.command("import")
@click.argument("name")
@click.argument("table")
@with_dsn
def import_table(dsn: str | None, name: str, table: str) -> None:
    """Import TABLE (schema.table) of database NAME, so that SQL can name it too."""
    with open_database(dsn) as db:
        db.import_table(name, table)
        echo(f"{name}.{table} can be named in queries")


@database.command()
@click.argument("table")
@click.option("--as", "name", metavar="NAME", help="The registered database, if its address does not identify it.")
@with_dsn
def resolve(dsn: str | None, table: str, name: str | None) -> int:
    """Associate the foreign table TABLE of postgres_fdw with a registered database. Its changes are then captured
    there. Creating a stream table that reads it does this automatically.
    """
    with open_database(dsn) as db:
        found = db.resolve_foreign_table(table, name)
    if found is None:
        echo(f"no registered database is known for the target of {table}", err=True)
        return 1
    echo(f"{table} is read in {found}")
    return 0


@database.command()
@click.argument("name")
@with_dsn
def remove(dsn: str | None, name: str) -> None:
    """Remove database NAME, or the set of that name. Drop stream tables that name it first. If it is a member of a set,
    it leaves the set, and the next refresh re-initializes the set's readers.
    """
    with open_database(dsn) as db:
        db.remove_database(name)
        echo(f"removed {name}")
