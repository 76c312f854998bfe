"""Four ordinary roles: the installing role, two owners, the service role. Owners' code has their own rights only."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
import pytest

import pgtrickle
from pgtrickle.errors import PgtrickleError
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query
from tests.support.service import fresh, running_service

pytestmark = pytest.mark.pgversions


@dataclass(frozen=True)
class Roles:
    database: TestDatabase
    alice: str
    bob: str
    service: str

    def sql(self, role: str, *statements: str) -> None:
        with psycopg.connect(self.database.direct_dsn_as(role), autocommit=True) as conn:
            for statement in statements:
                conn.execute(statement.encode())


@pytest.fixture
def roles(database: TestDatabase) -> Roles:
    """The role `app` installs; alice and bob have a schema and a table each; the service has only USAGE."""
    alice, bob, service = (database.create_role(name) for name in ("alice", "bob", "service"))
    found = Roles(database, alice, bob, service)
    with pgtrickle.connect(database.dsn) as db:
        db.install(service_role=service)
    with psycopg.connect(database.superuser_dsn, autocommit=True) as conn:
        for owner in (alice, bob):
            conn.execute(f"CREATE SCHEMA {owner} AUTHORIZATION {owner}".encode())
    for owner in (alice, bob):
        found.sql(
            owner,
            f"CREATE TABLE {owner}.orders (id int PRIMARY KEY, kind text, amount numeric(10,2))",
            f"INSERT INTO {owner}.orders SELECT i, 'k' || i % 3, i FROM generate_series(1, 20) AS i",
            f"GRANT USAGE ON SCHEMA {owner} TO {service}",
        )
    return found


def create(roles: Roles, owner: str, name: str, query: str) -> str:
    with pgtrickle.connect(roles.database.dsn_as(owner)) as db:
        db.create_stream_table(f"{owner}.{name}", query, initialize=False)
    return f"{owner}.{name}"


def refresh(roles: Roles, *names: str) -> None:
    with pgtrickle.connect(roles.database.dsn_as(roles.service)) as db:
        db.refresh(list(names))


def test_the_service_refreshes_for_owners_whose_tables_it_may_not_read(roles: Roles) -> None:
    alice, bob = roles.alice, roles.bob
    queries = {
        create(roles, alice, "rows", q): (alice, q)
        for q in [f"SELECT id, upper(kind) AS kind, amount FROM {alice}.orders WHERE amount > 3"]
    }
    q = f"SELECT kind, sum(amount) AS total, count(*) AS n FROM {alice}.orders GROUP BY kind"
    queries[create(roles, alice, "sums", q)] = (alice, q)
    q = f"SELECT kind, max(id) AS last FROM {bob}.orders GROUP BY kind"
    queries[create(roles, bob, "lasts", q)] = (bob, q)
    q = f"SELECT a.kind, b.amount FROM {bob}.orders a JOIN {bob}.orders b ON b.id = a.id + 1"
    queries[create(roles, bob, "pairs", q)] = (bob, q)
    with (
        psycopg.connect(roles.database.direct_dsn_as(roles.service), autocommit=True) as conn,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        conn.execute(f"SELECT * FROM {alice}.orders".encode())
    for change in (0, 1):
        if change:
            for owner in (alice, bob):
                roles.sql(
                    owner,
                    f"UPDATE {owner}.orders SET amount = amount + 1, kind = 'k9' WHERE id % 4 = 0",
                    f"DELETE FROM {owner}.orders WHERE id % 5 = 0",
                    f"INSERT INTO {owner}.orders VALUES (100, NULL, 7.50)",
                )
        refresh(roles, *queries)
        for name, (owner, query) in queries.items():
            with psycopg.connect(roles.database.direct_dsn_as(owner), autocommit=True) as conn:
                assert_equal_to_query(conn, name, query)


def test_the_service_verifies_for_owners_whose_tables_it_may_not_read(roles: Roles) -> None:
    alice = roles.alice
    query = f"SELECT id, upper(kind) AS kind, amount FROM {alice}.orders WHERE amount > 3"
    name = create(roles, alice, "rows", query)
    with pgtrickle.connect(roles.database.dsn_as(roles.service)) as db:
        roles.sql(alice, f"UPDATE {alice}.orders SET amount = amount + 1 WHERE id % 4 = 0")
        (found,) = db.verify(name)
        assert (found.equal, found.rows) == (True, 17)
        with psycopg.connect(roles.database.superuser_dsn, autocommit=True) as superuser:
            superuser.execute("SET session_replication_role = replica")
            superuser.execute(f"UPDATE {name} SET kind = 'other' WHERE id = 7".encode())
        (found,) = db.verify(name)
    assert (found.equal, found.missing_rows, found.unexpected_rows) == (
        False,
        (("7", "K1", "7.00"),),
        (("7", "other", "7.00"),),
    )
    with pgtrickle.connect(roles.database.dsn_as(alice)) as db, pytest.raises(PgtrickleError, match="may not verify"):
        db.verify(name)


def test_a_revoked_right_suspends_the_stream_table(roles: Roles) -> None:
    alice, bob = roles.alice, roles.bob
    roles.sql(alice, f"GRANT USAGE ON SCHEMA {alice} TO {bob}", f"GRANT SELECT, TRIGGER ON {alice}.orders TO {bob}")
    name = create(roles, bob, "borrowed", f"SELECT id, amount FROM {alice}.orders")
    refresh(roles, name)
    roles.sql(alice, f"REVOKE SELECT ON {alice}.orders FROM {bob}", f"INSERT INTO {alice}.orders VALUES (500, 'x', 1)")
    with pytest.raises(PgtrickleError, match="may not read"):
        refresh(roles, name)
    with pgtrickle.connect(roles.database.dsn_as(roles.service)) as db:
        table = db.stream_table(name)
    assert table.status == "SUSPENDED"
    assert "may not read" in (table.status_reason or "")


HOSTILE = """
CREATE FUNCTION {owner}.attack(value int) RETURNS int LANGUAGE plpgsql {volatility} AS $$
BEGIN
    BEGIN
        PERFORM set_config('role', '{victim}', true);
    EXCEPTION WHEN OTHERS THEN
        NULL;
    END;
    BEGIN
        EXECUTE 'SELECT sum(amount)::int FROM {victim}.orders' INTO value;
        INSERT INTO {owner}.loot VALUES ('read ' || value);
    EXCEPTION WHEN insufficient_privilege OR read_only_sql_transaction OR feature_not_supported THEN
        NULL;
    END;
    BEGIN
        EXECUTE 'DELETE FROM {victim}.orders';
    EXCEPTION WHEN insufficient_privilege OR read_only_sql_transaction OR feature_not_supported THEN
        NULL;
    END;
    RETURN 1;
END $$"""


@pytest.mark.parametrize("way", ["query", "trigger", "check", "index"])
def test_an_owners_code_cannot_reach_another_owners_table(roles: Roles, way: str) -> None:
    """The service runs it during fetch and apply: it has the owner's rights, and cannot regain the login's."""
    alice, bob = roles.alice, roles.bob
    volatility = "IMMUTABLE" if way in {"query", "index"} else "VOLATILE"
    roles.sql(
        bob, f"CREATE TABLE {bob}.loot (what text)", HOSTILE.format(owner=bob, victim=alice, volatility=volatility)
    )
    # Something of alice's that the service does have rights on, in the same database.
    other = create(roles, alice, "mine", f"SELECT id, amount FROM {alice}.orders")
    called = f"{bob}.attack(id)" if way == "query" else "1"
    query = f"SELECT id, {called} AS called FROM {bob}.orders"
    name = create(roles, bob, "trap", query)
    if way == "trigger":
        roles.sql(
            bob,
            f"CREATE FUNCTION {bob}.fire() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$BEGIN PERFORM {bob}.attack(1); RETURN NEW; END$$",
            f"CREATE TRIGGER fire BEFORE INSERT ON {name} FOR EACH ROW EXECUTE FUNCTION {bob}.fire()",
        )
    elif way == "check":
        roles.sql(bob, f"ALTER TABLE {name} ADD CHECK ({bob}.attack(id) = 1)")
    elif way == "index":
        roles.sql(bob, f"CREATE INDEX ON {name} (({bob}.attack(id)))")
    refresh(roles, name, other)
    roles.sql(bob, f"INSERT INTO {bob}.orders VALUES (900, 'late', 1)")
    refresh(roles, name, other)
    with psycopg.connect(roles.database.direct_dsn_as(alice), autocommit=True) as conn:
        assert conn.execute(f"SELECT count(*) FROM {alice}.orders".encode()).fetchone() == (20,)
    with psycopg.connect(roles.database.direct_dsn_as(bob), autocommit=True) as conn:
        assert conn.execute(f"SELECT * FROM {bob}.loot".encode()).fetchall() == []
        assert conn.execute(f"SELECT count(*) FROM {name}".encode()).fetchone() == (21,)


def test_a_service_with_a_separate_login(roles: Roles) -> None:
    """It owns nothing, neither tables nor catalog; a diamond needs the same rights as everything else."""
    alice = roles.alice
    half = f"SELECT kind, sum(amount) AS total FROM {alice}.orders WHERE id % 2 = {{}} GROUP BY kind"
    even, odd = create(roles, alice, "even", half.format(0)), create(roles, alice, "odd", half.format(1))
    query = f"SELECT kind, e.total + o.total AS total FROM {even} AS e JOIN {odd} AS o USING (kind)"
    merged = create(roles, alice, "merged", query)
    service = roles.database.dsn_as(roles.service)
    with (
        running_service(service, roles.database.name),
        psycopg.connect(roles.database.direct_dsn_as(alice), autocommit=True) as conn,
    ):
        fresh(conn, merged)
        roles.sql(alice, f"UPDATE {alice}.orders SET amount = amount + 1", f"DELETE FROM {alice}.orders WHERE id = 4")
        fresh(conn, merged)
        assert_equal_to_query(conn, merged, query)
        total = f"SELECT kind, sum(amount) AS total FROM {alice}.orders GROUP BY kind"
        assert_equal_to_query(conn, merged, total)
        kinds = conn.execute("SELECT DISTINCT kind FROM pgtrickle.parallel_job_status(300) WHERE status = 'SUCCEEDED'")
        assert ("GROUP",) in kinds.fetchall()
        assert conn.execute("SELECT scheduler_status FROM pgtrickle.health_summary()").fetchone() == ("ACTIVE",)
