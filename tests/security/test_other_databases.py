"""A registered database is read only for roles that may use it, while they may, and runs no user code as its reader."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pgtrickle.errors import InvalidQueryError, PgtrickleError, PrivilegeError, SourceChangedError
from tests.security.registered import Registered, registered
from tests.security.roles import Roles

pytestmark = pytest.mark.pgversions


@pytest.fixture
def crm(roles: Roles) -> Iterator[Registered]:
    with registered(roles) as found:
        yield found


def reads_customers(crm: Registered) -> str:
    """A stream table of mallory's on alice's table, refreshed once."""
    alice, mallory = crm.roles.alice, crm.roles.mallory
    crm.roles.sql(
        mallory,
        f"SELECT pgtrickle.create_stream_table('{mallory}.st', 'SELECT id, secret FROM crm.{alice}.customers',"
        " initialize => false)",
    )
    crm.roles.refresh(f"{mallory}.st")
    return f"{mallory}.st"


def assert_reads_no_more(crm: Registered, name: str) -> None:
    """The stream table is suspended with the reason, and has no rows that were written since."""
    roles, alice = crm.roles, crm.roles.alice
    crm.sql(alice, f"INSERT INTO {alice}.customers VALUES (50, 'written later')")
    with pytest.raises(PrivilegeError, match="may not read") as refused:
        roles.refresh(name)
    assert refused.value.hint is not None
    assert "alter" in refused.value.hint
    assert "later" not in roles.peek(roles.mallory, f"SELECT * FROM {name}")
    with roles.service() as db:
        found = db.stream_table(name)
    assert found.status == "SUSPENDED"
    assert "may not read" in (found.status_reason or "")


def test_a_role_removed_from_a_set_can_no_longer_read_its_members(crm: Registered) -> None:
    roles, alice, mallory = crm.roles, crm.roles.alice, crm.roles.mallory
    with roles.service() as db:
        db.add_database_set("tenants", ["crm"], roles=[mallory])
        db.import_table("crm", f"{alice}.customers")
    name = reads_customers(crm)
    with roles.service() as db:
        db.add_database_set("tenants", ["crm"])
    assert roles.value(mallory, f"SELECT has_table_privilege('\"crm.{alice}\".customers', 'SELECT')") is False
    assert_reads_no_more(crm, name)


def test_roles_of_a_removed_set_can_no_longer_read_its_members(crm: Registered) -> None:
    roles, alice, mallory = crm.roles, crm.roles.alice, crm.roles.mallory
    with roles.service() as db:
        db.add_database_set("tenants", pattern="cr*", roles=[mallory])
        db.import_table("crm", f"{alice}.customers")
    name = reads_customers(crm)
    with roles.service() as db:
        db.remove_database("tenants")
    assert_reads_no_more(crm, name)


def test_a_grant_on_a_stand_in_is_not_enough(crm: Registered) -> None:
    """Regardless of who granted it: the registry decides who may use a database."""
    roles, alice, mallory = crm.roles, crm.roles.alice, crm.roles.mallory
    with roles.service() as db:
        db.import_table("crm", f"{alice}.customers")
    crm.allow(mallory)
    name = reads_customers(crm)
    crm.allow()
    roles.sql(
        roles.app,
        f'GRANT USAGE ON SCHEMA "crm.{alice}" TO {mallory}',
        f'GRANT SELECT ON "crm.{alice}".customers TO {mallory}',
    )
    assert_reads_no_more(crm, name)
    other = f"SELECT pgtrickle.create_stream_table('{mallory}.other', 'SELECT id FROM crm.{alice}.customers')"
    assert "may not read tables of the registered database crm" in (roles.attempt(mallory, other) or "")


@pytest.fixture
def foreign_table(crm: Registered) -> str:
    """A foreign table of mallory's that points to her own table in the registered database."""
    home, mallory = crm.roles.database, crm.roles.mallory
    with psycopg.connect(home.superuser_dsn, autocommit=True) as conn:
        if not conn.execute("SELECT FROM pg_available_extensions WHERE name = 'postgres_fdw'").fetchall():
            pytest.skip("this server comes without postgres_fdw (Debian's has it)")
        conn.execute("CREATE EXTENSION postgres_fdw")
        conn.execute(
            "CREATE SERVER crm FOREIGN DATA WRAPPER postgres_fdw"
            f" OPTIONS (host '127.0.0.1', port '{home.server.port}', dbname '{crm.database.name}')".encode()
        )
        conn.execute(f"GRANT USAGE ON FOREIGN SERVER crm TO {mallory}".encode())
        # No password, because the test's server trusts everybody.
        conn.execute(
            f"CREATE USER MAPPING FOR {mallory} SERVER crm OPTIONS (user '{mallory}', password_required 'false')".encode()
        )
    crm.roles.sql(
        mallory,
        f"CREATE FOREIGN TABLE {mallory}.ft (id int, secret text) SERVER crm"
        f" OPTIONS (schema_name '{mallory}', table_name 'own')",
    )
    return f"{mallory}.ft"


def reads_foreign_table(crm: Registered, table: str) -> str:
    mallory = crm.roles.mallory
    crm.roles.sql(
        mallory,
        f"SELECT pgtrickle.create_stream_table('{mallory}.st', 'SELECT id, secret FROM {table}', initialize => false)",
    )
    crm.roles.refresh(f"{mallory}.st")
    return f"{mallory}.st"


def test_a_foreign_table_cannot_stand_for_a_table_that_its_owner_may_not_use(
    crm: Registered, foreign_table: str
) -> None:
    with crm.roles.service() as db, pytest.raises(PrivilegeError, match="may not read tables of the registered"):
        db.resolve_foreign_table(foreign_table, "crm")
    crm.allow(crm.roles.mallory)
    with crm.roles.service() as db:
        assert db.resolve_foreign_table(foreign_table, "crm") == "crm"
    name = reads_foreign_table(crm, foreign_table)
    crm.allow()
    assert_reads_no_more(crm, name)


def test_a_redirected_foreign_table_is_followed_to_imported_tables_only(crm: Registered, foreign_table: str) -> None:
    roles, alice, mallory = crm.roles, crm.roles.alice, crm.roles.mallory
    crm.allow(mallory)
    with roles.service() as db:
        db.resolve_foreign_table(foreign_table, "crm")
    name = reads_foreign_table(crm, foreign_table)
    assert roles.rows(mallory, f"SELECT id, secret FROM {name}") == [(1, "harmless")]
    redirect = f"ALTER FOREIGN TABLE {foreign_table} OPTIONS (SET schema_name '{alice}', SET table_name 'customers')"
    roles.sql(mallory, redirect)
    with pytest.raises(PrivilegeError, match="may not import table"):
        roles.refresh(name)
    assert roles.rows(mallory, f"SELECT id, secret FROM {name}") == [(1, "harmless")]
    with roles.service() as db:
        assert db.stream_table(name).status == "SUSPENDED"
        db.import_table("crm", f"{alice}.customers")
    roles.sql(mallory, f"SELECT pgtrickle.alter_stream_table('{name}', status => 'ACTIVE')")
    roles.refresh(name)
    assert roles.rows(mallory, f"SELECT id, secret FROM {name}") == [(1, "secret")]
    # Nor to another database, or to this one after the right is gone.
    crm.allow()
    roles.sql(
        mallory, f"ALTER FOREIGN TABLE {foreign_table} OPTIONS (SET schema_name '{mallory}', SET table_name 'own')"
    )
    assert_reads_no_more(crm, name)


EVIL_EQUALS = (
    "CREATE FUNCTION {m}.eq(int, int) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS"
    " $$ BEGIN PERFORM {m}.evil(); RETURN $1 = $2; END $$;"
    "CREATE OPERATOR {m}.=== (LEFTARG = int, RIGHTARG = int, FUNCTION = {m}.eq)"
)
EVIL_DOMAIN = (
    "CREATE FUNCTION {m}.chk(text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS"
    " $$ BEGIN PERFORM {m}.evil(); RETURN true; END $$;"
    "CREATE DOMAIN {m}.e AS text CHECK ({m}.chk(value))"
)
OPERATOR = "CREATE OPERATOR {m}.=== (LEFTARG = int, RIGHTARG = int, FUNCTION = pg_catalog.int4eq)"
ENUM = "CREATE TYPE {m}.e AS ENUM ('a', 'b')"

# What is created here, what in the registered database, and the query.
MEANT_OTHERWISE = {
    "operator in a filter": (OPERATOR, EVIL_EQUALS, "SELECT id, v FROM crm.{m}.t WHERE v OPERATOR({m}.===) 1"),
    "operator in a column": (OPERATOR, EVIL_EQUALS, "SELECT id, v OPERATOR({m}.===) 1 AS hit FROM crm.{m}.t"),
    "type in a column": (ENUM, EVIL_DOMAIN, "SELECT id, ('a'::{m}.e)::text || n AS x FROM crm.{m}.t"),
    "type in a filter": (
        ENUM,
        EVIL_DOMAIN,
        "SELECT id, v FROM crm.{m}.t WHERE (CASE v WHEN 1 THEN 'a' ELSE 'b' END)::{m}.e = 'a'::{m}.e",
    ),
    "array type": (ENUM, EVIL_DOMAIN, "SELECT id, (ARRAY['a']::{m}.e[])::text || n AS x FROM crm.{m}.t"),
}


@pytest.mark.parametrize("kind", MEANT_OTHERWISE)
def test_operators_and_types_are_the_same_in_a_registered_database(crm: Registered, kind: str) -> None:
    roles, mallory = crm.roles, crm.roles.mallory
    here, there, query = (text.format(m=mallory) for text in MEANT_OTHERWISE[kind])
    crm.allow(mallory)
    with roles.service() as db:
        db.import_table("crm", f"{mallory}.t")
    roles.sql(mallory, here)
    crm.sql(mallory, there)
    with pytest.raises(InvalidQueryError, match=r"in database crm: it (belongs to role|is a domain)"):
        roles.create(mallory, "st", query)
    with roles.connect(mallory) as conn, pytest.raises(psycopg.errors.FeatureNotSupported):
        conn.execute("SELECT pgtrickle.create_stream_table(%s, %s, initialize => false)", (f"{mallory}.st", query))
    crm.assert_powerless()


def test_a_domain_here_does_not_take_the_place_of_a_type_there(crm: Registered) -> None:
    """Whoever adds a column evaluates the default of its type."""
    roles, mallory = crm.roles, crm.roles.mallory
    crm.sql(
        mallory,
        f"CREATE TYPE {mallory}.k AS (a int)",
        f"CREATE TABLE {mallory}.ks (id int PRIMARY KEY, k {mallory}.k)",
        f"GRANT SELECT, TRIGGER ON {mallory}.ks TO {crm.reader}",
    )
    roles.sql(mallory, f"CREATE DOMAIN {mallory}.k AS text DEFAULT {mallory}.evil()::text")
    with roles.service() as db, pytest.raises(InvalidQueryError, match="cannot have type"):
        db.import_table("crm", f"{mallory}.ks")
    roles.assert_powerless()


def test_objects_trusted_at_creation_are_compared_again_at_every_refresh(crm: Registered) -> None:
    roles, mallory = crm.roles, crm.roles.mallory
    crm.allow(mallory)
    with roles.service() as db:
        db.import_table("crm", f"{mallory}.t")
    roles.sql(mallory, OPERATOR.format(m=mallory))
    with psycopg.connect(crm.database.superuser_dsn, autocommit=True) as conn:
        conn.execute(f"ALTER SCHEMA {mallory} OWNER TO {crm.reader}".encode())
        conn.execute(f"GRANT USAGE, CREATE ON SCHEMA {mallory} TO {mallory}".encode())
        conn.execute(f"SET ROLE {crm.reader}".encode())
        conn.execute(OPERATOR.format(m=mallory).encode())
    name = roles.create(mallory, "st", f"SELECT id, v FROM crm.{mallory}.t WHERE v OPERATOR({mallory}.===) 1")
    roles.refresh(name)
    assert len(roles.rows(mallory, f"SELECT id FROM {name}")) == 2
    with psycopg.connect(crm.database.superuser_dsn, autocommit=True) as conn:
        conn.execute(f"DROP OPERATOR {mallory}.=== (int, int)".encode())
    crm.sql(mallory, EVIL_EQUALS.format(m=mallory), f"UPDATE {mallory}.t SET v = 1")
    with pytest.raises(SourceChangedError, match=r"operator .*=== ?\(integer,integer\) cannot be relied on"):
        roles.refresh(name)
    crm.assert_powerless()


def test_an_extension_of_an_untrusted_role_is_not_trusted(crm: Registered) -> None:
    """Its objects belong to a superuser, but its owner can drop them and create others in their place."""
    roles, mallory = crm.roles, crm.roles.mallory
    with psycopg.connect(crm.database.superuser_dsn, autocommit=True) as conn:
        if not conn.execute("SELECT FROM pg_available_extensions WHERE name = 'citext'").fetchall():
            pytest.skip("this server comes without citext")
        conn.execute(f"GRANT CREATE ON DATABASE {crm.database.name} TO {mallory}".encode())
    with psycopg.connect(roles.database.superuser_dsn, autocommit=True) as conn:
        conn.execute(f"CREATE EXTENSION citext SCHEMA {mallory}".encode())
    crm.sql(mallory, f"CREATE EXTENSION citext SCHEMA {mallory}")
    crm.allow(mallory)
    with roles.service() as db:
        db.import_table("crm", f"{mallory}.t")
    with pytest.raises(InvalidQueryError, match=r"its schema .* belongs to role"):
        roles.create(
            mallory, "st", f"SELECT id FROM crm.{mallory}.t WHERE n::{mallory}.citext = 'N1'::{mallory}.citext"
        )
    crm.assert_powerless()


def test_untrusted_owners_are_recognized_if_the_readers_name_needs_quotes(crm: Registered) -> None:
    name = f"Reader {crm.database.name}"
    with psycopg.connect(crm.database.superuser_dsn, autocommit=True) as conn:
        conn.execute(f'CREATE ROLE "{name}"'.encode())
        try:
            conn.execute(f'SET ROLE "{name}"'.encode())
            function = f"{crm.roles.mallory}.evil()"
            found = conn.execute("SELECT problem FROM pgtrickle._describe_functions(%s)", ([function],)).fetchone()
            table = f"{crm.roles.mallory}.t"
            assert conn.execute("SELECT pgtrickle._untrusted_cast(%s::regclass)", (table,)).fetchone() == (None,)
        finally:
            conn.execute("RESET ROLE")
            conn.execute(f'DROP ROLE "{name}"'.encode())
    problem = f'it belongs to role {crm.roles.mallory}, and would run with the rights of role "{name}"'
    assert found == (problem,)


@pytest.mark.parametrize("direction", ["e AS text", "text AS e"])
def test_a_table_whose_type_has_a_cast_of_an_untrusted_role_is_not_read(crm: Registered, direction: str) -> None:
    """Values are printed with a cast to text; keys for lookups are read with a cast from text."""
    mallory = crm.roles.mallory
    source, _, target = (f"{mallory}.e" if part == "e" else part for part in direction.partition(" AS "))
    crm.sql(
        mallory,
        f"CREATE TYPE {mallory}.e AS ENUM ('a', 'b')",
        f"CREATE TABLE {mallory}.es (e {mallory}.e PRIMARY KEY)",
        f"CREATE FUNCTION {mallory}.turn({source}) RETURNS {target} LANGUAGE plpgsql IMMUTABLE AS"
        f" $$ BEGIN PERFORM {mallory}.evil(); RETURN 'a'; END $$",
        f"CREATE CAST ({source} AS {target}) WITH FUNCTION {mallory}.turn({source})",
    )
    crm.roles.sql(mallory, f"CREATE TYPE {mallory}.e AS ENUM ('a', 'b')")
    with crm.roles.service() as db, pytest.raises(PgtrickleError, match=r"turn\(.*casts from or to type"):
        db.import_table("crm", f"{mallory}.es")
