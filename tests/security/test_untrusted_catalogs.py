"""A catalog or search path that a hostile role has prepared in a database to which a privileged login connects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

import pgtrickle
from pgtrickle.catalog.install import install, latest_version
from pgtrickle.cli.diagnostics import find_problems
from pgtrickle.errors import PgtrickleError, PrivilegeError
from pgtrickle.observability.tuning import read_server
from pgtrickle.service.config import ServerConfig, ServiceConfig
from pgtrickle.service.launcher import Launcher, Watched
from pgtrickle.service.service import Service
from tests.security.roles import Roles
from tests.support.service import serving, until

pytestmark = pytest.mark.pgversions

# Runs in a database of mallory's own, where it can only tell by the server's log that it ran.
_EVIL = """
CREATE SCHEMA evil;
GRANT USAGE ON SCHEMA evil TO PUBLIC;
CREATE FUNCTION evil.pg_backend_pid() RETURNS integer LANGUAGE plpgsql AS $$
BEGIN
    RAISE LOG 'evil ran as %', current_user;
    RETURN pg_catalog.pg_backend_pid();
END $$;
"""
_PLANTED = """
CREATE SCHEMA pgtrickle;
GRANT USAGE ON SCHEMA pgtrickle TO PUBLIC;
CREATE VIEW pgtrickle.pgt_schema_version AS SELECT evil.pg_backend_pid() AS version;
GRANT SELECT ON pgtrickle.pgt_schema_version TO PUBLIC;
"""


@contextmanager
def own_database(roles: Roles, prefix: str) -> Iterator[Roles]:
    """A database that belongs to mallory, as seen by the same roles."""
    server, name = roles.database.server, f"{prefix}_{roles.database.name[-8:]}"
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name} OWNER {roles.mallory} TEMPLATE template0".encode())
    try:
        yield Roles(type(roles.database)(server, name), roles.alice, roles.bob, roles.mallory)
    finally:
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            conn.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@contextmanager
def watching(dsn: str, *trusted: str) -> Iterator[Launcher]:
    """A service that watches a whole server."""
    service = Service(ServiceConfig((ServerConfig("test", dsn),), list_seconds=0.2, trusted_owners=trusted))
    service.start()
    try:
        yield service.launchers[0]
    finally:
        service.stop()


def not_served(launcher: Launcher, name: str) -> str:
    """Why a database is not served, once the launcher has examined it."""
    until(lambda: launcher.databases.get(name, Watched()).problem, "the launcher has looked at it")
    return launcher.databases[name].problem or ""


@pytest.mark.parametrize("way", ["search_path", "view"])
def test_the_service_runs_no_code_of_a_database_that_it_examines(roles: Roles, way: str) -> None:
    service = roles.database.create_role("svc")
    with own_database(roles, "mallorys") as own:
        own.sql(roles.mallory, _EVIL)
        if way == "view":
            own.sql(roles.mallory, _PLANTED)
        else:
            own.sql(
                roles.mallory,
                f"ALTER DATABASE {own.database.name} SET search_path = evil, pg_catalog",
                "CREATE SCHEMA pgtrickle",
            )
        with watching(roles.database.direct_dsn_as(service)) as launcher:
            problem = not_served(launcher, own.database.name)
        assert own.ran_as() == set()
        assert f"belongs to role {roles.mallory}, which {service} does not trust" in problem
        assert "trusted_owners" in problem


def test_the_service_serves_catalogs_of_owners_that_it_is_told_to_trust(roles: Roles) -> None:
    service = roles.database.create_role("svc")
    with pgtrickle.connect(roles.database.dsn) as db:
        db.install(service_role=service)
        assert "trusted_owners" in str([one.remedy for one in find_problems(db.conn, 300)])
    with watching(roles.database.direct_dsn_as(service)) as launcher:
        assert f"belongs to role {roles.app}" in not_served(launcher, roles.database.name)
    with watching(roles.database.direct_dsn_as(service), roles.app), roles.connect(roles.app) as conn:
        serving(conn)
        assert "trusted_owners" not in str([one.remedy for one in find_problems(conn, 300)])


def test_the_service_serves_catalogs_of_owners_that_can_act_as_its_login(roles: Roles) -> None:
    service = roles.database.create_role("svc")
    with pgtrickle.connect(roles.database.dsn) as db:
        db.install(service_role=service)
    with psycopg.connect(roles.database.superuser_dsn, autocommit=True) as conn:
        conn.execute(f"GRANT {service} TO {roles.app}".encode())
    with watching(roles.database.direct_dsn_as(service)), roles.connect(roles.app) as conn:
        serving(conn)


@pytest.mark.parametrize("who", ["app", "superuser"])
@pytest.mark.parametrize("schema", ["pgtrickle", "pgtrickle_views"])
def test_installing_runs_nothing_that_was_planted(roles: Roles, who: str, schema: str) -> None:
    with own_database(roles, "planted") as own:
        own.sql(roles.mallory, _EVIL, _PLANTED.replace("pgtrickle", schema))
        with psycopg.connect(own.database.superuser_dsn, autocommit=True) as conn:
            conn.execute(f"GRANT CREATE ON DATABASE {own.database.name} TO {roles.app}".encode())
        dsn = own.database.superuser_dsn if who == "superuser" else own.database.direct_dsn
        with pgtrickle.connect(dsn) as db:
            for attempt in (db.install, db.upgrade, db.uninstall):
                with pytest.raises(PgtrickleError, match=f"belongs to role {roles.mallory}|already has a schema"):
                    attempt()
        assert own.ran_as() == set()


def test_installing_does_not_trust_the_search_path(roles: Roles) -> None:
    with own_database(roles, "shadowed") as own:
        own.sql(
            roles.mallory,
            _EVIL,
            "CREATE FUNCTION evil.set_config(text, text, boolean) RETURNS text LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE LOG 'evil ran as %', current_user; RETURN pg_catalog.set_config($1, $2, $3); END $$",
            f"ALTER DATABASE {own.database.name} SET search_path = evil, pg_catalog",
        )
        with pgtrickle.connect(own.database.superuser_dsn) as db:
            db.install()
        assert own.ran_as() == set()


@pytest.mark.parametrize("way", ["search_path", "view"])
def test_tune_runs_no_code_of_a_database_that_it_examines(roles: Roles, way: str) -> None:
    with own_database(roles, "tuned") as own:
        own.sql(
            roles.mallory,
            _EVIL,
            _PLANTED
            + "CREATE VIEW pgtrickle.pgt_settings AS SELECT; GRANT SELECT ON pgtrickle.pgt_settings TO PUBLIC;",
            "CREATE VIEW pgtrickle.pgt_stream_tables AS TABLE pgtrickle.pgt_schema_version",
            "GRANT SELECT ON pgtrickle.pgt_stream_tables TO PUBLIC",
            "CREATE FUNCTION pgtrickle._setting(text) RETURNS text LANGUAGE sql AS $$ SELECT '1' $$",
        )
        if way == "search_path":
            own.sql(roles.mallory, f"ALTER DATABASE {own.database.name} SET search_path = evil, pg_catalog")
        with pgtrickle.connect(roles.database.superuser_dsn) as db:
            (found,) = read_server(db.conn, [own.database.name]).databases
        assert f"belongs to role {roles.mallory}" in str(found.problem)
        assert own.ran_as() == set()


def test_an_owner_uses_a_catalog_of_another_role(roles: Roles) -> None:
    name = roles.create(roles.alice, "mine", f"SELECT id, kind FROM {roles.alice}.orders")
    with pgtrickle.connect(roles.database.dsn_as(roles.alice)) as db:
        assert [one.name for one in db.status()] == [name]
        with pytest.raises(PrivilegeError, match=f"belongs to role {roles.app}"):
            install(db.conn)


def test_a_member_of_a_set_with_a_hostile_catalog_does_not_join(roles: Roles) -> None:
    """A role that may create databases creates one whose name matches the pattern."""
    login = roles.database.create_role("svc")
    with own_database(roles, "tenant") as own:
        own.sql(
            roles.mallory,
            "CREATE SCHEMA pgtrickle; GRANT USAGE ON SCHEMA pgtrickle TO PUBLIC",
            f"CREATE TABLE pgtrickle.pgt_schema_version AS SELECT {latest_version()} AS version",
            "GRANT SELECT ON pgtrickle.pgt_schema_version TO PUBLIC",
            "CREATE FUNCTION pgtrickle._database_identity() RETURNS text LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE LOG 'evil ran as %', current_user; RETURN '1/1'; END $$",
        )
        with roles.service() as db:
            server = roles.database.server.dsn("postgres", login)
            added = db.add_database_set("tenants", pattern=own.database.name, server=server)
            db.engine.sets.update_members()
        assert own.ran_as() == set()
        assert added.members == []
        assert f"belongs to role {roles.mallory}" in str(added.problem)


def test_a_registered_database_with_a_planted_catalog_is_not_read(roles: Roles) -> None:
    """The role that registers it trusts its owner, but not others who may create schemas there."""
    login = roles.database.create_role("reader")
    with own_database(roles, "crm") as own:
        own.sql(
            roles.mallory,
            f"GRANT CREATE ON DATABASE {own.database.name} TO {roles.bob}",
        )
        own.sql(roles.bob, _EVIL, _PLANTED)
        with roles.service() as db, pytest.raises(PgtrickleError, match=f"belongs to role {roles.bob}"):
            db.add_database("crm", own.database.direct_dsn_as(login))
        assert own.ran_as() == set()
