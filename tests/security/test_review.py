"""Attacks that a hostile review of decision 019 found, and similar ones."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

import pgtrickle
from tests.security.hostile_tables import create_hostile_table
from tests.security.roles import Roles, Worker
from tests.support.oracle import assert_equal_to_query

pytestmark = pytest.mark.pgversions


def gate(action: str, **arguments: Any) -> str:
    """The statement with which any role uses the gate."""
    return f"SELECT pgtrickle._gate('{action}', $gate${json.dumps(arguments)}$gate$)"


def try_refresh(roles: Roles, name: str) -> None:
    """Refresh like a worker: after an error, the next one is refreshed."""
    worker = Worker(roles.database.dsn)
    worker.refresh(roles.id_of(name))
    worker.close()


# Types of a user's: printing a value, or reading one, calls what the user has made of it.
TYPES = """
CREATE TYPE {m}.e AS ENUM ('a', 'b');
CREATE TABLE {m}.es (id int PRIMARY KEY, e {m}.e);
INSERT INTO {m}.es VALUES (1, 'a');
CREATE FUNCTION {m}.etext({m}.e) RETURNS text LANGUAGE plpgsql AS $$ BEGIN PERFORM {m}.evil(); RETURN 'a'; END $$;
CREATE FUNCTION {m}.ejson({m}.e) RETURNS json LANGUAGE plpgsql AS $$ BEGIN PERFORM {m}.evil(); RETURN '1'; END $$;
CREATE CAST ({m}.e AS json) WITH FUNCTION {m}.ejson({m}.e);
CREATE FUNCTION {m}.chk(v int) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN PERFORM {m}.evil(); RETURN true; END $$;
CREATE DOMAIN {m}.dom AS int CHECK ({m}.chk(value));
CREATE TYPE {m}.comp AS (a {m}.dom);
"""


@pytest.mark.parametrize(
    "query",
    [
        "SELECT id, e FROM {m}.es",
        "SELECT e, count(*) AS n FROM {m}.es GROUP BY e",
        "SELECT id, to_jsonb(e)::text AS j FROM {m}.es",
        "SELECT id, ('(5)'::{m}.comp)::text AS c FROM {m}.es",
        "SELECT id, (('{{' || id || '}}')::{m}.dom[])::text AS c FROM {m}.es",
    ],
)
def test_types_of_an_owner_run_no_code_as_the_service(roles: Roles, query: str) -> None:
    mallory = roles.mallory
    roles.sql(mallory, TYPES.format(m=mallory))
    name = roles.create(mallory, "trap", query.format(m=mallory))
    try_refresh(roles, name)
    roles.sql(
        mallory,
        f"CREATE CAST ({mallory}.e AS text) WITH FUNCTION {mallory}.etext({mallory}.e)",
        f"INSERT INTO {mallory}.es VALUES (2, 'b')",
    )
    try_refresh(roles, name)
    assert {entry.split(" at character")[0] for entry in roles.ran_as()} <= {mallory}


@pytest.mark.parametrize(("step", "kind"), [("cut", "read"), ("spark", "write")])
def test_an_owners_function_is_not_replaced_in_the_middle_of_a_change(roles: Roles, step: str, kind: str) -> None:
    """Altering the query opens the schema of these functions to their owner, for one transaction."""
    mallory = roles.mallory
    query = f"SELECT id, {mallory}.sly(v) AS v FROM {mallory}.src"
    name = roles.create(mallory, "trap", query)
    id_ = roles.id_of(name)
    returned = "SETOF record" if kind == "read" else "bigint[]"
    refusals: list[str | None] = []

    def attack(reached: str) -> None:
        if reached != step or refusals:
            return
        try:
            with psycopg.connect(roles.database.direct_dsn_as(mallory)) as conn:
                conn.execute(gate("begin_alter", id=id_).encode())
                conn.execute(
                    f"CREATE OR REPLACE FUNCTION pgtrickle_views.{kind}_{id_}(statement text, args text[])"
                    f" RETURNS {returned} LANGUAGE plpgsql SECURITY INVOKER AS"
                    f" $$ BEGIN PERFORM {mallory}.evil(); RETURN; END $$".replace(
                        "RETURN;", "RETURN;" if kind == "read" else "RETURN NULL;"
                    ).encode()
                )
                conn.execute(gate("update", id=id_, query=query).encode())
            refusals.append(None)
        except psycopg.errors.InvalidObjectDefinition as error:
            refusals.append(str(error))

    with pgtrickle.connect(roles.database.dsn, on_step=attack) as db:
        db.refresh([name])
    assert "was not created by pgtrickle" in str(refusals[0])
    roles.assert_powerless()


def test_a_deferred_foreign_key_runs_no_cast_when_a_refresh_commits(roles: Roles) -> None:
    mallory = roles.mallory
    roles.sql(
        mallory,
        f"""
        CREATE TYPE {mallory}.k AS (a int);
        CREATE FUNCTION {mallory}.kint({mallory}.k) RETURNS int LANGUAGE plpgsql AS $$
        BEGIN
            EXECUTE format('DECLARE %I CURSOR WITH HOLD FOR SELECT {mallory}.evil()', 'c' || random());
            RETURN 1;
        END $$;
        CREATE CAST ({mallory}.k AS int) WITH FUNCTION {mallory}.kint({mallory}.k) AS IMPLICIT;
        CREATE TABLE {mallory}.pk (t int PRIMARY KEY);
        INSERT INTO {mallory}.pk VALUES (1);
        CREATE TABLE {mallory}.fk (k {mallory}.k REFERENCES {mallory}.pk (t) DEFERRABLE INITIALLY DEFERRED)""",
    )
    name = create_hostile_table(roles, f"INSERT INTO {mallory}.fk VALUES (ROW(1)::{mallory}.k);")
    try_refresh(roles, name)
    roles.assert_powerless()


def test_a_deferred_foreign_key_is_refused_and_another_is_not(roles: Roles) -> None:
    alice = roles.alice
    query = f"SELECT id, kind FROM {alice}.orders"
    name = roles.create(alice, "mine", query)
    roles.sql(
        alice,
        f"CREATE TABLE {alice}.kinds (kind text PRIMARY KEY)",
        f"INSERT INTO {alice}.kinds SELECT DISTINCT kind FROM {alice}.orders",
        f"ALTER TABLE {name} ADD FOREIGN KEY (kind) REFERENCES {alice}.kinds DEFERRABLE INITIALLY DEFERRED",
    )
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="is deferrable"):
        roles.refresh(name)
    roles.sql(alice, f"ALTER TABLE {name} ALTER CONSTRAINT mine_kind_fkey NOT DEFERRABLE")
    roles.refresh(name)
    with roles.connect(alice) as conn:
        assert_equal_to_query(conn, name, query)


def test_nothing_is_planted_while_a_role_creates_a_stream_table(roles: Roles) -> None:
    alice, mallory = roles.alice, roles.mallory
    name = roles.create(alice, "mine", f"SELECT kind, sum(amount) AS s FROM {alice}.orders GROUP BY kind")
    create = (
        f"SELECT pgtrickle.create_stream_table('{mallory}.cover', 'SELECT v FROM {mallory}.src', initialize => false)"
    )
    for planted in (
        "CREATE DOMAIN pgtrickle_views.q_99 AS int",
        "CREATE TYPE pgtrickle_views.q_99 AS (a int)",
        f"CREATE VIEW pgtrickle_views.state_{roles.id_of(name)} AS SELECT 1 AS a",
        f"CREATE TABLE pgtrickle_views.stage_{roles.id_of(name)}_1 (a int)",
    ):
        with pytest.raises(psycopg.errors.InvalidObjectDefinition, match="was not created by pgtrickle"):
            roles.sql(mallory, f"BEGIN; {gate('begin_create')}; {planted}; {create}; COMMIT")
        with pytest.raises(psycopg.errors.UndefinedTable, match="no stream table with id"):
            roles.sql(mallory, f"BEGIN; {gate('begin_create')}; {planted}; {gate('update', id=-1, query='x')}; COMMIT")
    roles.refresh(name)


def test_clean_up_locks_no_table_of_another_role(roles: Roles) -> None:
    alice, mallory = roles.alice, roles.mallory
    name = roles.create(alice, "mine", f"SELECT id, amount FROM {alice}.orders")
    roles.sql(alice, f"DROP TABLE {name}")
    with psycopg.connect(roles.database.direct_dsn_as(mallory)) as conn:
        conn.execute("SELECT pgtrickle._forget_dropped(), (SELECT count(*) FROM pgtrickle._untrack_unused())")
        assert roles.value(alice, f"SELECT count(*) FROM {alice}.orders") == 20
    with roles.service() as db:
        db.conn.execute("SELECT pgtrickle._untrack_unused()")
        assert db.conn.execute("SELECT count(*) FROM pgtrickle.pgt_change_tracking").fetchone() == (0,)


def test_a_session_setting_does_not_change_schedules_of_others(roles: Roles) -> None:
    alice, mallory = roles.alice, roles.mallory
    roles.create(alice, "mine", f"SELECT id, amount FROM {alice}.orders")
    roles.create(mallory, "hers", f"SELECT id, v FROM {mallory}.src")
    every = "SELECT every FROM pgtrickle.pgt_stream_tables WHERE pgt_name = 'mine'"
    before = roles.value(alice, every)
    with psycopg.connect(roles.database.direct_dsn_as(mallory)) as conn:
        conn.execute("SET pg_trickle.default_schedule_seconds = '999999'")
        conn.execute(f"SELECT pgtrickle.alter_stream_table('{mallory}.hers', schedule => 'calculated')".encode())
        roles.refresh(f"{alice}.mine")  # no row of alice's is locked
    assert roles.value(alice, every) == before


def test_replaced_views_cannot_form_a_cycle(roles: Roles) -> None:
    mallory = roles.mallory
    for view in ("va", "vb"):
        roles.sql(mallory, f"CREATE VIEW {mallory}.{view} AS SELECT id, v FROM {mallory}.src")
    a, b = (roles.create(mallory, name, f"SELECT id, v FROM {mallory}.v{name}") for name in ("a", "b"))
    roles.sql(mallory, f"CREATE OR REPLACE VIEW {mallory}.va AS SELECT id, v FROM {b}")
    roles.sql(mallory, f"CREATE OR REPLACE VIEW {mallory}.vb AS SELECT id, v FROM {a}")
    roles.sql(mallory, gate("update", id=roles.id_of(a), query="x"))
    with pytest.raises(psycopg.errors.InvalidObjectDefinition, match="would read itself"):
        roles.sql(mallory, gate("update", id=roles.id_of(b), query="x"))
    with pytest.raises(psycopg.errors.ActiveSqlTransaction):
        roles.sql(mallory, "BEGIN ISOLATION LEVEL REPEATABLE READ", gate("update", id=roles.id_of(b), query="x"))
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        roles.sql(mallory, gate("record_coordinator", id=roles.id_of(b)))


def test_an_exported_definition_runs_nothing_but_the_creation(roles: Roles) -> None:
    mallory = roles.mallory
    name = roles.create(mallory, "trap", f"SELECT id, v FROM {mallory}.src")
    settings = {"search_path": f"public; SELECT {mallory}.evil(); --", "role": "app"}
    roles.sql(mallory, gate("update", id=roles.id_of(name), session_settings=settings))
    kept = roles.value(roles.app, "SELECT session_settings FROM pgtrickle.pgt_stream_tables WHERE pgt_name = 'trap'")
    assert "role" not in kept
    script = roles.value(roles.app, f"SELECT pgtrickle.export_definition('{name}')")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="search_path"):
        roles.sql(roles.app, script)
    roles.assert_powerless()


def test_a_member_that_cannot_become_the_owner_is_not_the_owner(roles: Roles, pg_version: int) -> None:
    if pg_version < 16:
        pytest.skip("before PostgreSQL 16 every member can")
    alice, mallory = roles.alice, roles.mallory
    name = roles.create(alice, "mine", f"SELECT id, amount FROM {alice}.orders")
    with psycopg.connect(roles.database.superuser_dsn, autocommit=True) as conn:
        conn.execute(f"GRANT {alice} TO {mallory} WITH INHERIT FALSE, SET FALSE".encode())
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        roles.sql(mallory, f"SELECT pgtrickle.alter_stream_table('{name}', status => 'SUSPENDED')")


def test_a_former_owner_has_no_right_on_the_state_of_groups(roles: Roles) -> None:
    alice, bob = roles.alice, roles.bob
    query = f"SELECT kind, sum(amount) AS s FROM {alice}.orders GROUP BY kind"
    name = roles.create(alice, "sums", query)
    roles.refresh(name)
    id_ = roles.id_of(name)
    with psycopg.connect(roles.database.superuser_dsn, autocommit=True) as conn:
        conn.execute(f"GRANT USAGE ON SCHEMA {alice} TO {bob}; GRANT SELECT ON {alice}.orders TO {bob}".encode())
        conn.execute(f"ALTER TABLE {name} OWNER TO {bob}; ALTER VIEW pgtrickle_views.q_{id_} OWNER TO {bob}".encode())
        for kind in ("read", "write"):
            conn.execute(f"ALTER FUNCTION pgtrickle_views.{kind}_{id_}(text, text[]) OWNER TO {bob}".encode())
    roles.sql(alice, f"INSERT INTO {alice}.orders VALUES (500, 'new', 500)")
    roles.refresh(name)
    with roles.connect(bob) as conn:
        assert_equal_to_query(conn, name, query)
    assert roles.attempt(alice, f"SELECT * FROM pgtrickle_views.state_{id_}") is not None


def test_a_reader_of_a_table_cannot_prevent_its_capture(roles: Roles) -> None:
    alice, mallory = roles.alice, roles.mallory
    roles.create(alice, "mine", f"SELECT id FROM {alice}.orders")
    roles.sql(alice, f"GRANT SELECT ON {alice}.orders TO {mallory}")
    source = roles.value(alice, f"SELECT '{alice}.orders'::regclass::oid::bigint")
    with psycopg.connect(roles.database.direct_dsn_as(mallory)) as conn:
        conn.execute(gate("is_captured", source=source, columns=[1]).encode())
        roles.create(alice, "more", f"SELECT id, kind, amount FROM {alice}.orders")


def test_the_mode_of_one_stream_table_is_not_that_of_others(roles: Roles) -> None:
    """pooler_compatibility_mode is for the refreshes of its own stream table, not for the worker's connection."""
    alice, mallory = roles.alice, roles.mallory
    hers = roles.create(mallory, "hers", f"SELECT id, v FROM {mallory}.src", pooler_compatibility_mode=True)
    roles.create(alice, "mine", f"SELECT id FROM {alice}.orders")
    with roles.service() as db:
        db.refresh([hers])
        from pgtrickle.postgres.connection import is_pooled

        assert is_pooled(db.conn) == (roles.database.pooler is not None)


def test_exponentially_nested_views_are_not_expanded(roles: Roles) -> None:
    """Each reads the previous one twice.

    PostgreSQL computes each once; a plan of pgtrickle would double with every one.
    """
    mallory = roles.mallory
    parts = [f"c0 AS (SELECT id, v FROM {mallory}.src)"]
    parts += [f"c{i} AS (SELECT a.id, b.v FROM c{i - 1} AS a JOIN c{i - 1} AS b USING (id))" for i in range(1, 40)]
    name = roles.create(mallory, "wide", f"WITH {', '.join(parts)} SELECT id, v FROM c39")
    with roles.service() as db:
        assert "unfold to more than" in str(db.stream_table(name).mode_reason)


def test_a_suspended_reader_does_not_keep_changes_forever(roles: Roles) -> None:
    alice = roles.alice
    roles.sql(roles.app, "SELECT pgtrickle.set('max_buffer_rows', '10000')")
    query = f"SELECT id, amount FROM {alice}.orders"
    kept, going_on = roles.create(alice, "kept", query), roles.create(alice, "going_on", query)
    roles.refresh(kept, going_on)
    roles.sql(alice, f"SELECT pgtrickle.alter_stream_table('{kept}', status => 'SUSPENDED')")
    with roles.service() as db:
        db.conn.execute(  # a service is there
            "INSERT INTO pgtrickle.pgt_services (service_id, host, pid, version) VALUES (gen_random_uuid(), 'h', 1, '0')"
        )
    for start in (10_000, 30_000, 50_000):
        roles.sql(
            alice,
            f"INSERT INTO {alice}.orders SELECT i, 'many', 1 FROM generate_series({start}, {start + 15_000}) AS i",
            "SELECT pg_stat_force_next_flush()",
        )
        roles.refresh(going_on)
    reason = roles.value(roles.app, "SELECT reinit_reason FROM pgtrickle.pgt_stream_tables WHERE pgt_name = 'kept'")
    assert "max_buffer_rows" in str(reason)
