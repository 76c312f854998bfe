"""Stream tables of mallory's that run her code when the service refreshes them."""

from __future__ import annotations

from tests.security.roles import Roles


def plain_query(roles: Roles) -> str:
    return f"SELECT id, v FROM {roles.mallory}.src"


def create_hostile_table(roles: Roles, body: str) -> str:
    """A stream table whose trigger runs `body` when the service writes to it."""
    mallory = roles.mallory
    name = roles.create(mallory, "trap", plain_query(roles))
    roles.sql(
        mallory,
        f"CREATE FUNCTION {mallory}.spring() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} RETURN NULL; END $$",
        f"CREATE TRIGGER spring AFTER INSERT ON {name} FOR EACH STATEMENT EXECUTE FUNCTION {mallory}.spring()",
    )
    return name


def create_hostile_query(roles: Roles, body: str) -> str:
    """A stream table whose query runs `body` when the service reads for it."""
    mallory = roles.mallory
    roles.sql(
        mallory,
        f"CREATE FUNCTION {mallory}.act() RETURNS void LANGUAGE plpgsql AS $$ BEGIN {body} END $$",
        # Must not be VOLATILE, but may call a function that is.
        f"CREATE FUNCTION {mallory}.pure(v int) RETURNS int LANGUAGE plpgsql IMMUTABLE STRICT AS"
        f" $$ BEGIN PERFORM {mallory}.act(); RETURN v; END $$",
    )
    return roles.create(mallory, "trap", f"SELECT id, {mallory}.pure(v) AS v FROM {mallory}.src")


def create_hostile_table_in(way: str, roles: Roles, body: str) -> str:
    return create_hostile_query(roles, body) if way == "query" else create_hostile_table(roles, body)
