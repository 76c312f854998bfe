"""Attacks that a second hostile review found after those of the first were fixed."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.refresh.results import Outcome
from tests.security.hostile_tables import create_hostile_table, create_hostile_table_in
from tests.security.roles import Roles, Worker
from tests.support.database import fresh_database
from tests.support.oracle import assert_equal_to_query
from tests.support.service import until

pytestmark = pytest.mark.pgversions


def attempt(roles: Roles, *names: str) -> Outcome:
    """Refresh like a worker of the service."""
    with roles.service() as db:
        return db.engine.attempt([roles.id_of(name) for name in names], "SCHEDULE")


def refusal(roles: Roles, role: str, *statements: str) -> psycopg.Error | None:
    """The error that statements in one transaction come to."""
    with roles.connect(role) as conn:
        try:
            with conn.transaction():
                for statement in statements:
                    conn.execute(statement.encode())
        except psycopg.Error as error:
            return error
    return None


def gate(action: str, **arguments: Any) -> str:
    return f"SELECT pgtrickle._gate('{action}', $gate${json.dumps(arguments)}$gate$)"


def test_a_built_in_function_that_runs_a_text_runs_it_as_the_owner(roles: Roles) -> None:
    m = roles.mallory
    roles.sql(
        m,
        f"CREATE VIEW {m}.v AS SELECT id, v::text AS v FROM {m}.src",
        f"CREATE FUNCTION {m}.run() RETURNS tsquery LANGUAGE plpgsql AS"
        f" $$ BEGIN PERFORM {m}.evil(); RETURN 'a'::tsquery; END $$",
    )
    name = roles.create(m, "trap", f"SELECT id, v FROM {m}.v")
    rewritten = f"ts_rewrite('a'::tsquery, 'SELECT {m}.run(), ''b''::tsquery')::text || v::text"
    roles.sql(m, f"CREATE OR REPLACE VIEW {m}.v AS SELECT id, {rewritten} AS v FROM {m}.src")
    attempt(roles, name)
    roles.sql(m, f"INSERT INTO {m}.src VALUES (77, 7)")
    attempt(roles, name)
    assert roles.ran_as() == {m}


def test_a_trigger_cannot_hide_what_it_deferred(roles: Roles) -> None:
    m = roles.mallory
    roles.sql(
        m,
        f"CREATE TYPE {m}.k AS (a int)",
        f"CREATE FUNCTION {m}.kint({m}.k) RETURNS int LANGUAGE plpgsql AS $$ BEGIN RAISE LOG 'kint ran as %', current_user;"
        f" EXECUTE format('DECLARE %I CURSOR WITH HOLD FOR SELECT {m}.evil()', 'c' || random()); RETURN 1; END $$",
        f"CREATE CAST ({m}.k AS int) WITH FUNCTION {m}.kint({m}.k) AS IMPLICIT",
        f"CREATE TABLE {m}.pk (t int PRIMARY KEY)",
        f"INSERT INTO {m}.pk VALUES (1), (2)",
        f"CREATE TABLE {m}.fk (k {m}.k CONSTRAINT late REFERENCES {m}.pk (t) DEFERRABLE INITIALLY DEFERRED)",
        f"INSERT INTO {m}.fk VALUES (ROW(1)::{m}.k)",
    )
    body = f"DELETE FROM {m}.pk WHERE t = 2; ALTER TABLE {m}.fk ALTER CONSTRAINT late NOT DEFERRABLE;"
    outcome = attempt(roles, create_hostile_table(roles, body))
    assert "was locked or altered by a trigger" in str(*outcome.failures.values())
    roles.assert_powerless()


def test_analyze_runs_no_function_of_a_range_type(roles: Roles) -> None:
    m = roles.mallory
    roles.sql(
        m,
        f"CREATE FUNCTION {m}.diff(a int, b int) RETURNS float8 LANGUAGE plpgsql IMMUTABLE AS"
        f" $$ BEGIN PERFORM {m}.evil(); RETURN a - b; END $$",
        f"CREATE TYPE {m}.r AS RANGE (subtype = int, subtype_diff = {m}.diff)",
        f"CREATE TABLE {m}.rs (id int PRIMARY KEY, r {m}.r)",
        f"INSERT INTO {m}.rs SELECT i, {m}.r(i, i + 5) FROM generate_series(1, 200) AS i",
    )
    name = roles.create(m, "trap", f"SELECT r, count(*) AS n FROM {m}.rs GROUP BY r")
    attempt(roles, name)
    roles.sql(m, f"INSERT INTO {m}.rs SELECT i, {m}.r(i, i + 5) FROM generate_series(1001, 1200) AS i")
    tables = roles.rows(
        roles.app,
        "SELECT oid::regclass::text FROM pg_class WHERE relkind = 'r' AND relname ~ '^(state|changes|spare)_[0-9a-f]+$'",
    )
    assert len(tables) >= 3
    for (table,) in tables:
        roles.sql(roles.app, f"ANALYZE {table}")
    roles.assert_powerless()


def test_the_id_of_a_dropped_stream_table_is_not_reused(roles: Roles) -> None:
    a, m = roles.alice, roles.mallory
    roles.sql(
        a, f"CREATE TABLE {a}.people (id int, note text)", f"INSERT INTO {a}.people VALUES (1, 'SSN 123-45-6789')"
    )
    mine = roles.create(a, "mine", f"SELECT id, note::int AS n FROM {a}.people")
    former = roles.id_of(mine)
    assert "SSN" in str(attempt(roles, mine).failures)
    roles.sql(a, f"DROP TABLE {mine} CASCADE")
    roles.create(m, "other", f"SELECT id FROM {m}.src")
    register = (
        f"SELECT pgtrickle._gate('register', jsonb_build_object('id', {former}, 'storage', '{m}.t2'::regclass::oid,"
        f" 'view', 'pgtrickle_views.q_{former}'::regclass::oid, 'query', 'SELECT 1', 'schedule', '1h',"
        " 'refresh_mode', 'FULL', 'session_settings', '{}'::jsonb))"
    )
    view = f"CREATE VIEW pgtrickle_views.q_{former} AS SELECT 1 AS id"
    refused = refusal(roles, m, gate("begin_create"), view, f"CREATE TABLE {m}.t2 (id int)", register)
    assert f"no stream table can have id {former}" in str(refused)
    assert "SSN" not in roles.peek(m, "SELECT * FROM pgtrickle.pgt_visible_history")


@pytest.mark.parametrize("storage", [None, 0, 1259])
def test_a_role_cannot_register_objects_of_others(roles: Roles, storage: int | None) -> None:
    a, m = roles.alice, roles.mallory
    mine = roles.create(a, "mine", f"SELECT id, kind FROM {a}.orders")
    (view,) = roles.rows(
        m, f"SELECT view_relid::oid::int FROM pgtrickle.pgt_stream_tables WHERE pgt_id = {roles.id_of(mine)}"
    )
    arguments = {"id": roles.id_of(mine), "storage": storage, "view": view[0], "query": "x", "schedule": "1h"}
    refusal = roles.attempt(m, gate("register", **arguments, refresh_mode="FULL", session_settings={}))
    assert refusal is not None
    assert "may not register" in refusal


def test_default_privileges_of_owners_grant_nothing(roles: Roles) -> None:
    a, m = roles.alice, roles.mallory
    roles.sql(a, f"ALTER DEFAULT PRIVILEGES GRANT EXECUTE ON FUNCTIONS TO {m}")
    roles.sql(roles.app, f"ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO {m}")
    mine = roles.create(a, "mine", f"SELECT id, kind FROM {a}.orders")
    roles.refresh(mine)
    roles.sql(a, f"INSERT INTO {a}.orders VALUES (500, 'private', 1)")
    buffers = roles.rows(roles.app, "SELECT buffer_relid::text FROM pgtrickle.pgt_change_tracking")
    assert buffers
    for (buffer,) in buffers:
        assert roles.peek(m, f"SELECT * FROM {buffer}") == ""
    function = f"pgtrickle_views.write_{roles.id_of(mine)}"
    attempt(
        roles, create_hostile_table(roles, f"PERFORM {function}('INSERT INTO {m}.loot SELECT current_user', NULL);")
    )
    assert roles.rows(m, f"SELECT * FROM {m}.loot") == []


def test_default_privileges_of_the_installing_role_grant_nothing(server: EmbeddedServer) -> None:
    with fresh_database(server, "defaults") as database:
        mallory = database.create_role("mallory")
        with psycopg.connect(database.direct_dsn, autocommit=True) as conn:
            for kind in ("TABLES", "FUNCTIONS", "SEQUENCES"):
                conn.execute(f"ALTER DEFAULT PRIVILEGES GRANT ALL ON {kind} TO {mallory}".encode())
        with pgtrickle.connect(database.dsn) as db:
            db.install()
        with psycopg.connect(database.direct_dsn_as(mallory), autocommit=True) as conn:
            for statement in ("SELECT * FROM pgtrickle.pgt_databases", "SELECT pgtrickle._set('enabled', 'off', 'x')"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    conn.execute(statement.encode())
        with psycopg.connect(database.direct_dsn, autocommit=True) as conn:
            for kind in ("TABLES", "FUNCTIONS", "SEQUENCES"):
                conn.execute(f"ALTER DEFAULT PRIVILEGES REVOKE ALL ON {kind} FROM {mallory}".encode())


def test_names_of_roles_are_not_folded(server: EmbeddedServer) -> None:
    with fresh_database(server, "fold") as database:
        lower = database.create_role("svc")
        upper = lower.capitalize()
        with psycopg.connect(database.superuser_dsn, autocommit=True) as conn:
            conn.execute(f'CREATE ROLE "{upper}" LOGIN'.encode())
            conn.execute(f"CREATE SCHEMA theirs AUTHORIZATION {lower}".encode())
            conn.execute("GRANT USAGE ON SCHEMA theirs TO PUBLIC")
        try:
            with pgtrickle.connect(database.dsn) as db:
                db.install(service_role=upper)
            with psycopg.connect(database.direct_dsn_as(lower), autocommit=True) as conn:
                conn.execute("""
                    CREATE TABLE theirs.loot (what text);
                    CREATE TABLE theirs.src (id int PRIMARY KEY, v int);
                    INSERT INTO theirs.src VALUES (1, 1);
                    GRANT INSERT ON theirs.loot TO PUBLIC;
                    GRANT SELECT ON theirs.src TO PUBLIC;
                    SELECT pgtrickle.create_stream_table('theirs.trap', 'SELECT id, v FROM theirs.src', initialize => false);
                    CREATE FUNCTION theirs.fire() RETURNS trigger LANGUAGE plpgsql AS
                        $$ BEGIN INSERT INTO theirs.loot VALUES (current_user); RETURN NULL; END $$;
                    CREATE TRIGGER fire AFTER INSERT ON theirs.trap EXECUTE FUNCTION theirs.fire();
                    GRANT ALL ON theirs.trap TO PUBLIC
                """)
            with pgtrickle.connect(database.direct_dsn_as(upper)) as db:
                db.engine.attempt([1], "SCHEDULE")
            with psycopg.connect(database.direct_dsn_as(lower), autocommit=True) as conn:
                assert conn.execute("SELECT what FROM theirs.loot").fetchall() == [(lower,)]
        finally:
            with psycopg.connect(database.superuser_dsn, autocommit=True) as conn:
                conn.execute(f'DROP OWNED BY "{upper}" CASCADE'.encode())
                conn.execute(f'DROP ROLE "{upper}"'.encode())


def test_a_service_role_may_have_any_name(roles: Roles) -> None:
    service = roles.database.create_role('My "Svc"')
    with roles.service() as db:
        db.install(service_role=service)
    query = f"SELECT id, kind FROM {roles.alice}.orders"
    mine = roles.create(roles.alice, "mine", query)
    with pgtrickle.connect(roles.database.direct_dsn_as(service)) as db:
        db.refresh(mine)
        roles.sql(roles.alice, f"DELETE FROM {roles.alice}.orders WHERE id < 5")
        assert [result.action for result in db.refresh(mine)] == ["DIFFERENTIAL"]
    with roles.connect(roles.alice) as conn:
        assert_equal_to_query(conn, mine, query)
    with roles.service() as db:
        db.install(service_role=roles.app)


def test_the_message_of_a_job_is_shown_to_those_who_may_see_all_of_it(roles: Roles) -> None:
    """One job refreshes stream tables of several owners, some of which may have been dropped."""
    ids = [
        roles.id_of(roles.create(owner, "mine", f"SELECT id FROM {owner}.orders")) for owner in (roles.alice, roles.bob)
    ]
    jobs = {"both": ids, "alice": ids[:1], "gone": [ids[0], 999]}
    for what, listed in jobs.items():
        roles.rows(
            roles.app,
            "INSERT INTO pgtrickle.pgt_jobs (service_id, kind, pgt_ids, status, error, finished_at)"
            " VALUES (gen_random_uuid(), 'SINGLETON', %s, 'FAILED', %s, now()) RETURNING 1",
            [listed, f"secret of {what}"],
        )

    def seen(role: str) -> set[str]:
        shown = roles.peek(role, "SELECT error FROM pgtrickle.parallel_job_status(3600)")
        return {what for what in jobs if f"secret of {what}" in shown}

    assert seen(roles.app) == set(jobs)
    assert seen(roles.alice) == {"alice"}
    assert seen(roles.bob) == seen(roles.mallory) == set()


@pytest.mark.parametrize("name", ["q_{next}", "state_{next}", "new_{mine}", "extra"])
def test_nothing_else_is_created_together_with_a_stream_table(roles: Roles, name: str) -> None:
    a, m = roles.alice, roles.mallory
    mine = roles.create(a, "mine", f"SELECT id, kind FROM {a}.orders")
    planted = name.format(next=roles.id_of(mine) + 1, mine=roles.id_of(mine))
    with psycopg.connect(roles.database.superuser_dsn, autocommit=True) as conn:
        conn.execute(f"GRANT {roles.bob} TO {m}".encode())  # to whom it can be given away
        conn.execute(f"GRANT CREATE ON DATABASE {roles.database.name} TO {roles.bob}".encode())
    refused = refusal(
        roles,
        m,
        gate("begin_create"),
        f"CREATE TABLE pgtrickle_views.{planted} (id int)",
        f"REASSIGN OWNED BY {m} TO {roles.bob}" if name == "extra" else "SELECT",
        f"SELECT pgtrickle.create_stream_table('{m}.trap', 'SELECT id FROM {m}.src')",
    )
    expected = [f"object {planted} in schema pgtrickle_views was not created by pgtrickle"]
    if name == "extra":  # on PostgreSQL 15, whoever gives away all it owns can create nothing in its former schema
        expected.append(f"permission denied for schema {m}")
    assert any(message in str(refused) for message in expected)
    assert roles.value(m, f"SELECT to_regclass('pgtrickle_views.{planted}')") is None


def test_a_table_behind_a_renamed_schema_is_the_same_table(roles: Roles) -> None:
    a, m = roles.alice, roles.mallory
    with psycopg.connect(roles.database.superuser_dsn, autocommit=True) as conn:
        conn.execute(f"GRANT CREATE ON DATABASE {roles.database.name} TO {m}".encode())
    roles.sql(
        m,
        "CREATE SCHEMA ours",
        "GRANT USAGE ON SCHEMA ours TO PUBLIC",
        "CREATE TABLE ours.t (id int PRIMARY KEY, v int)",
        "INSERT INTO ours.t VALUES (1, 1), (2, 2)",
        f"GRANT SELECT, TRIGGER ON ours.t TO {a}",
    )
    mine = roles.create(a, "mine", f"SELECT o.id, t.v FROM {a}.orders AS o JOIN ours.t AS t USING (id)")
    pgt_id = roles.id_of(mine)
    with roles.service() as db:
        db.engine.attempt([pgt_id], "SCHEDULE")
        roles.sql(
            m,
            "ALTER SCHEMA ours RENAME TO theirs",
            "CREATE SCHEMA ours",
            "GRANT USAGE ON SCHEMA ours TO PUBLIC",
            f"CREATE VIEW ours.t AS SELECT id, {m}.sly(v + 1000) AS v FROM theirs.t",
            f"GRANT SELECT ON ours.t TO {a}",
        )
        roles.sql(a, f"DELETE FROM {a}.orders WHERE id = 2", f"INSERT INTO {a}.orders VALUES (2, 'again', 1)")
        db.engine.attempt([pgt_id], "SCHEDULE")
    roles.assert_powerless()
    assert roles.rows(a, f"SELECT * FROM {mine} ORDER BY 1") == [(1, 1), (2, 2)]


def test_printing_a_value_runs_no_cast_of_its_type(roles: Roles) -> None:
    a, m = roles.alice, roles.mallory
    roles.sql(
        m,
        f"CREATE TYPE {m}.e AS ENUM ('a', 'b')",
        f"CREATE TABLE {m}.es (id int PRIMARY KEY, e {m}.e)",
        f"INSERT INTO {m}.es VALUES (1, 'a')",
        f"GRANT SELECT, TRIGGER ON {m}.es TO {a}",
    )
    mine = roles.create(a, "mine", f"SELECT id, e FROM {m}.es")
    attempt(roles, mine)
    roles.sql(
        m,
        f"CREATE FUNCTION {m}.etext({m}.e) RETURNS text LANGUAGE plpgsql AS"
        f" $$ BEGIN PERFORM {m}.evil(); RETURN 'b'; END $$",
        f"CREATE CAST ({m}.e AS text) WITH FUNCTION {m}.etext({m}.e)",
        f"INSERT INTO {m}.es VALUES (2, 'a'), (3, NULL)",
    )
    attempt(roles, mine)
    roles.assert_powerless()
    assert roles.rows(a, f"SELECT id, e FROM {mine} ORDER BY 1") == [(1, "a"), (2, "a"), (3, None)]


def test_a_better_matching_function_is_not_called(roles: Roles) -> None:
    a, m = roles.alice, roles.mallory
    with psycopg.connect(roles.database.superuser_dsn, autocommit=True) as conn:
        conn.execute("CREATE SCHEMA lib; GRANT USAGE, CREATE ON SCHEMA lib TO PUBLIC")
    roles.sql(
        a,
        "CREATE FUNCTION lib.same(x anyelement) RETURNS anyelement LANGUAGE sql IMMUTABLE AS 'SELECT x'",
        f"CREATE TABLE {a}.t (id int PRIMARY KEY, v int)",
        f"INSERT INTO {a}.t VALUES (1, 1)",
    )
    query = f"SELECT id, lib.same(v) AS w FROM {a}.t"
    mine = roles.create(a, "mine", query)
    attempt(roles, mine)
    roles.sql(
        m,
        f"CREATE FUNCTION lib.same(x int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS"
        f" $$ BEGIN PERFORM {m}.evil(); RETURN -1; END $$",
    )
    roles.sql(a, f"INSERT INTO {a}.t VALUES (2, 2)")
    attempt(roles, mine)
    roles.assert_powerless()
    assert roles.rows(a, f"SELECT * FROM {mine} ORDER BY 1") == [(1, 1), (2, 2)]


def test_errors_do_not_quote_columns_that_the_owner_may_not_read(roles: Roles) -> None:
    a, m = roles.alice, roles.mallory
    roles.sql(
        a,
        f"CREATE TABLE {a}.people (id int PRIMARY KEY, born date)",
        f"INSERT INTO {a}.people VALUES (1, '2000-01-01')",
        f"GRANT SELECT (id), TRIGGER, DELETE ON {a}.people TO {m}",
    )
    attempt(roles, roles.create(a, "mine", f"SELECT id, born FROM {a}.people"))
    trap = roles.create(m, "trap", f"SELECT {m}.sly(id) AS id FROM {a}.people")
    attempt(roles, trap)
    function = f"pgtrickle_views.read_{roles.id_of(trap)}(text, text[])"
    roles.sql(m, f"ALTER FUNCTION {function} SET DateStyle = 'SQL, DMY'")
    roles.sql(a, f"INSERT INTO {a}.people VALUES (2, '1987-12-31')")
    failures = str(attempt(roles, trap).failures)
    # PostgreSQL 15 lets nobody lock a table who may read only a part of it.
    assert "was altered" in failures or "permission denied for table people" in failures
    assert "1987" not in failures


def test_a_replaced_rule_reads_no_more_than_its_owner_may(roles: Roles) -> None:
    a, m = roles.alice, roles.mallory
    attempt(roles, roles.create(a, "mine", f"SELECT id, kind, amount FROM {a}.orders"))
    roles.sql(a, f"GRANT SELECT ON {a}.orders TO {m}")
    trap = roles.create(m, "trap", f"SELECT id, NULL::text AS kind FROM {a}.orders")
    rule = f"AS ON SELECT TO pgtrickle_views.q_{roles.id_of(trap)} DO INSTEAD SELECT id, kind FROM {a}.orders"
    roles.sql(m, f'CREATE OR REPLACE RULE "_RETURN" {rule}')
    attempt(roles, trap)
    roles.sql(
        a,
        f"REVOKE SELECT ON {a}.orders FROM {m}",
        f"GRANT SELECT (id) ON {a}.orders TO {m}",
        f"INSERT INTO {a}.orders VALUES (901, 'private', 1)",
    )
    assert "may not read column kind" in str(attempt(roles, trap).failures)
    assert roles.rows(m, f"SELECT * FROM {trap} WHERE id = 901") == []


def test_an_alter_that_waits_blocks_others_for_a_limited_time(roles: Roles) -> None:
    a, m = roles.alice, roles.mallory
    mine = roles.create(a, "mine", f"SELECT id, kind FROM {a}.orders")
    trap = roles.create(m, "trap", f"SELECT id, v FROM {m}.src")
    roles.sql(roles.app, "SELECT pgtrickle.set('lock_timeout_ms', '1000')")
    with roles.connect(m) as conn, conn.transaction(force_rollback=True):
        conn.execute(gate("update", id=roles.id_of(trap), query=f"SELECT id, v FROM {m}.src").encode())
        other = (
            f"SELECT pgtrickle.alter_stream_table('{mine}', query => 'SELECT id, kind FROM {a}.orders WHERE id > 0')"
        )
        with pytest.raises(psycopg.errors.LockNotAvailable, match=f"role {m}"):
            roles.sql(a, other)


@pytest.mark.parametrize(
    ("setting", "way"),
    [
        ("idle_in_transaction_session_timeout", "query"),
        ("transaction_timeout", "query"),
        ("transaction_timeout", "trigger"),
    ],
)
def test_code_that_ends_the_session_suspends_its_own_stream_table(roles: Roles, setting: str, way: str) -> None:
    """A client that is fast enough outlives a millisecond between two statements, but not every time."""
    known = roles.value(roles.app, f"SELECT current_setting('{setting}', true)")
    if known is None:
        pytest.skip(f"this PostgreSQL has no {setting}")
    m = roles.mallory
    trap = create_hostile_table_in(
        way, roles, f"PERFORM set_config('{setting}', '1ms', false); PERFORM pg_sleep(0.05);"
    )
    id_ = roles.id_of(trap)
    state = f"SELECT status, status_reason FROM pgtrickle.pgt_stream_tables WHERE pgt_id = {id_}"

    def has_ended() -> bool:
        roles.sql(m, f"INSERT INTO {m}.src SELECT coalesce(max(id), 0) + 1, 1 FROM {m}.src")
        worker = Worker(roles.database.dsn)
        worker.refresh(id_)
        worker.close()
        return roles.rows(roles.app, state) == [("SUSPENDED", "its code ended the session that it ran in")]

    until(has_ended)


def test_a_merge_cannot_be_hidden_by_a_comment(roles: Roles) -> None:
    a, m = roles.alice, roles.mallory
    roles.sql(
        a,
        f"CREATE TABLE {a}.p (id int, part int, v int) PARTITION BY LIST (part)",
        f"CREATE TABLE {a}.p1 PARTITION OF {a}.p FOR VALUES IN (1)",
        f"CREATE TABLE {a}.p2 PARTITION OF {a}.p FOR VALUES IN (2)",
        f"INSERT INTO {a}.p SELECT i, 1, i FROM generate_series(1, 10) AS i",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {a}.p TO {m}",
    )
    query = f"SELECT id, part, v FROM {a}.p"
    mine = roles.create(a, "mine", query)
    attempt(roles, mine)
    merge = (
        f'WITH q AS (SELECT 1 AS one /* "\nSQL */) MERGE INTO {a}.p AS p USING (SELECT 3 AS id) AS s ON p.id = s.id'
        " WHEN MATCHED THEN UPDATE SET part = 2, v = 999"
    )
    roles.sql(m, f"DO $do$ BEGIN {merge}; END $do$")
    attempt(roles, mine)
    with roles.connect(a) as conn:
        assert_equal_to_query(conn, mine, query)


def test_a_capture_failure_affects_only_its_owner(roles: Roles) -> None:
    a, m = roles.alice, roles.mallory
    mine = roles.create(a, "mine", f"SELECT id, kind FROM {a}.orders")
    trap = roles.create(m, "trap", f"SELECT id, v FROM {m}.src")
    attempt(roles, trap, mine)
    stable = roles.value(
        m, f"SELECT source_stable_name FROM pgtrickle.pgt_change_tracking WHERE source_relid = '{m}.src'::regclass"
    )
    roles.sql(
        m,
        f"REVOKE TRIGGER ON {m}.src FROM {m}",
        f"ALTER TABLE {m}.src DISABLE TRIGGER pgtrickle_capture_truncate_{stable}",
    )
    roles.sql(a, f"INSERT INTO {a}.orders VALUES (700, 'x', 1)")
    outcome = attempt(roles, trap, mine)
    assert set(outcome.failures) <= {roles.id_of(trap)}
    assert roles.rows(a, f"SELECT kind FROM {mine} WHERE id = 700") == [("x",)]


def test_a_long_message_is_cut(roles: Roles) -> None:
    trap = create_hostile_table(roles, "RAISE EXCEPTION '%', repeat('x', 1000000);")
    assert attempt(roles, trap).failures
    length = roles.value(
        roles.app, f"SELECT max(length(last_error)) FROM pgtrickle.pgt_stream_tables WHERE pgt_id = {roles.id_of(trap)}"
    )
    assert 0 < length <= 4000


@pytest.mark.parametrize("subtransaction", [False, True])
def test_nothing_else_is_created_while_other_transactions_end(roles: Roles, subtransaction: bool) -> None:
    """A later transaction that has ended makes a snapshot take its own transaction for one that was committed."""
    m = roles.mallory
    create = f"SELECT pgtrickle.create_stream_table('{m}.trap', 'SELECT id FROM {m}.src')"
    with roles.connect(m) as conn, roles.connect(roles.bob) as other, conn.transaction(force_rollback=True):
        conn.execute(gate("begin_create").encode())
        if subtransaction:
            conn.execute("SAVEPOINT s")
        conn.execute("CREATE TABLE pgtrickle_views.extra (id int)")
        other.execute("SELECT pg_current_xact_id()")
        with pytest.raises(psycopg.errors.InvalidObjectDefinition):
            conn.execute(create.encode())
