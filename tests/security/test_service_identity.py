"""An owner's code never runs with the rights of the service, of an administrator or of another owner."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psycopg
import pytest

import pgtrickle
from tests.security.hostile_tables import create_hostile_table, create_hostile_table_in, plain_query
from tests.security.roles import Roles

pytestmark = pytest.mark.pgversions

# Every function that PUBLIC may execute. Each is an entry point for attacks: think twice before adding one.
PUBLIC_FUNCTIONS = Path(__file__).with_name("public_functions.txt")


# Entrances that take a description of a table: one of an earlier release, and the gate.
STAND_INS = {
    "function": "SELECT pgtrickle._import_table('@1', $json${definition}$json$)",
    "gate": """SELECT pgtrickle._gate('import_table', $json${{"database": "@1", "definition": {definition}}}$json$)""",
    "members": """SELECT pgtrickle._gate('import_set_table', $json${{"database_set": "@1", "schema": "s", "name": "t",
        "members": ["@1"], "definition": {definition}}}$json$)""",
    "resolved": """SELECT pgtrickle._gate('resolve_foreign_table', jsonb_build_object(
        'source', '{table}'::regclass::oid, 'database', '@1', 'definition', $json${definition}$json$::jsonb))""",
}


@pytest.mark.parametrize("way", STAND_INS)
def test_the_default_of_a_domain_is_not_evaluated_by_a_definer(roles: Roles, way: str) -> None:
    """ALTER TABLE … ADD COLUMN evaluates it with the rights of the role that alters the table."""
    mallory = roles.mallory
    roles.sql(mallory, f"CREATE DOMAIN {mallory}.d AS int DEFAULT {mallory}.sly(1)")
    column = {"name": "c", "attnum": 1, "type": f"{mallory}.d", "not_null": False}
    definition = {"schema": "s", "name": "t", "relid": 1, "node": "n", "shape": "x", "columns": [column], "key": None}
    attack = STAND_INS[way].format(definition=json.dumps(definition), table=f"{mallory}.src")
    with pytest.raises(psycopg.Error) as refused:
        roles.sql(mallory, attack)
    roles.assert_powerless()
    if way != "function":
        assert isinstance(refused.value, psycopg.errors.InsufficientPrivilege)


@pytest.mark.parametrize("relation", ["pg_class", "pg_rewrite"])
def test_a_temporary_view_does_not_take_the_place_of_a_system_catalog(roles: Roles, relation: str) -> None:
    """pg_temp is searched first unless search_path names it elsewhere."""
    shadow = f"CREATE OR REPLACE TEMP VIEW {relation} AS SELECT *, xmin FROM pg_catalog.{relation} WHERE {roles.mallory}.evil()"
    name = create_hostile_table(roles, f"EXECUTE '{shadow}'; EXECUTE 'GRANT SELECT ON pg_temp.{relation} TO PUBLIC';")
    roles.assert_withstands(name)


@pytest.mark.parametrize("type_", ["text", "int8", "oid", "regclass"])
def test_a_temporary_domain_does_not_take_the_place_of_a_type(roles: Roles, type_: str) -> None:
    mallory = roles.mallory
    domain = f"CREATE DOMAIN pg_temp.{type_} AS pg_catalog.{type_} CHECK ({mallory}.evil())"
    body = f"IF to_regtype('pg_temp.{type_}') IS NULL THEN EXECUTE '{domain}'; END IF;"
    roles.assert_withstands(create_hostile_table(roles, body))


# Functions and an operator that statements of the service use without a schema.
SHADOWS = """
CREATE FUNCTION {schema}.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS
$$BEGIN PERFORM {schema}.evil(); RETURN pg_catalog.clock_timestamp(); END$$;
CREATE FUNCTION {schema}.pg_get_userbyid(oid) RETURNS name LANGUAGE plpgsql AS
$$BEGIN PERFORM {schema}.evil(); RETURN pg_catalog.pg_get_userbyid($1); END$$;
CREATE FUNCTION {schema}.set_config(text, text, boolean) RETURNS text LANGUAGE plpgsql AS
$$BEGIN PERFORM {schema}.evil(); RETURN pg_catalog.set_config($1, $2, $3); END$$;
CREATE FUNCTION {schema}.same(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS
$$BEGIN PERFORM {schema}.evil(); RETURN $1 OPERATOR(pg_catalog.=) $2; END$$;
CREATE OPERATOR {schema}.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = {schema}.same);
"""


@pytest.mark.parametrize("way", ["query", "trigger"])
def test_a_search_path_does_not_outlive_the_code_that_set_it(roles: Roles, way: str) -> None:
    mallory = roles.mallory
    roles.sql(mallory, SHADOWS.format(schema=mallory))
    hijack = f"PERFORM pg_catalog.set_config('search_path', '{mallory}, pg_catalog', false);"
    roles.assert_withstands(create_hostile_table_in(way, roles, hijack))


def test_prepared_statements_of_the_service_are_not_replaced(roles: Roles) -> None:
    mallory = roles.mallory
    roles.sql(
        mallory,
        f"""
        CREATE FUNCTION {mallory}.replace_prepared() RETURNS void LANGUAGE plpgsql AS $$
        DECLARE
            known record;
        BEGIN
            FOR known IN SELECT name, parameter_types::text[] AS types FROM pg_prepared_statements LOOP
                EXECUTE format('DEALLOCATE %I', known.name);
                EXECUTE format('PREPARE %I %s AS SELECT {mallory}.evil()', known.name,
                               '(' || nullif(array_to_string(known.types, ', '), '') || ')');
            END LOOP;
        END $$""",
    )
    name = create_hostile_table(roles, f"PERFORM {mallory}.replace_prepared();")
    roles.assert_withstands(name, rounds=8)  # psycopg prepares a statement after five executions


DEFERRED = (
    "CREATE CONSTRAINT TRIGGER fire AFTER INSERT ON {} DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {}()"
)


@pytest.mark.parametrize("where", ["stream table", "other table", "deferred again"])
def test_a_deferred_trigger_does_not_run_as_the_service(roles: Roles, where: str) -> None:
    """Before PostgreSQL 18, it runs at COMMIT with the rights of the session."""
    mallory = roles.mallory
    roles.sql(
        mallory,
        f"CREATE TABLE {mallory}.first (x int)",
        f"CREATE TABLE {mallory}.last (x int)",
        f"GRANT INSERT ON {mallory}.first, {mallory}.last TO PUBLIC",  # whichever role fires
        f"CREATE FUNCTION {mallory}.again() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN SET CONSTRAINTS ALL DEFERRED; INSERT INTO {mallory}.last VALUES (1); RETURN NULL; END $$",
        DEFERRED.format(f"{mallory}.last", f"{mallory}.fire"),
    )
    if where == "stream table":
        name = roles.create(mallory, "trap", plain_query(roles))
        roles.sql(mallory, DEFERRED.format(name, f"{mallory}.fire"))
    elif where == "other table":
        name = create_hostile_table(roles, f"INSERT INTO {mallory}.last VALUES (1);")
    else:  # deferred again by a trigger that SET CONSTRAINTS … IMMEDIATE fired
        name = create_hostile_table(roles, f"INSERT INTO {mallory}.first VALUES (1);")
        roles.sql(mallory, DEFERRED.format(f"{mallory}.first", f"{mallory}.again"))
    roles.assert_withstands(name)


def test_a_deferred_constraint_does_not_evaluate_expressions_as_the_service(roles: Roles) -> None:
    """A conflict makes PostgreSQL evaluate the expression of an exclusion constraint again at COMMIT."""
    mallory = roles.mallory
    roles.sql(
        mallory,
        f"CREATE FUNCTION {mallory}.unsteady(id int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS"
        f" $$ BEGIN PERFORM {mallory}.evil(); RETURN id / 2; END $$",
    )
    name = roles.create(mallory, "trap", plain_query(roles))
    roles.sql(
        mallory,
        f"ALTER TABLE {name} ADD EXCLUDE USING btree (({mallory}.unsteady(id)) WITH =) DEFERRABLE INITIALLY DEFERRED",
    )
    roles.assert_withstands(name)


@pytest.mark.parametrize("way", ["query", "trigger", "deferred trigger"])
def test_a_held_cursor_does_not_run_as_the_service(roles: Roles, way: str) -> None:
    """The query of a cursor WITH HOLD is run at COMMIT, with the rights of the session."""
    mallory = roles.mallory
    declare = f"EXECUTE format('DECLARE %I CURSOR WITH HOLD FOR SELECT {mallory}.evil()', 'c' || random()::text);"
    if way == "deferred trigger":
        name = create_hostile_table(roles, f"INSERT INTO {mallory}.later VALUES (1);")
        roles.sql(
            mallory,
            f"CREATE TABLE {mallory}.later (x int)",
            f"CREATE FUNCTION {mallory}.hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {declare} RETURN NULL; END $$",
            DEFERRED.format(f"{mallory}.later", f"{mallory}.hold"),
        )
    else:
        name = create_hostile_table_in(way, roles, declare)
    roles.assert_withstands(name)


FOLDED = {
    "constant": "SELECT id, {m}.bold(1) AS x FROM {m}.src",
    "column": "SELECT id, {m}.bold(v) AS x FROM {m}.src",
    "join": "SELECT a.id, b.v FROM {m}.src AS a JOIN {m}.src AS b ON b.id = {m}.bold(a.v)",
    "sum": "SELECT v, sum({m}.bold(1)) AS x FROM {m}.src GROUP BY v",
    "group": "SELECT {m}.bold(v) AS x, count(*) AS n FROM {m}.src GROUP BY {m}.bold(v)",
    "case": "SELECT id, CASE WHEN v > 0 THEN {m}.bold(1) ELSE {m}.bold(2) END AS x FROM {m}.src",
}


@pytest.mark.parametrize("place", FOLDED)
def test_the_planner_does_not_evaluate_functions_as_the_service(roles: Roles, place: str) -> None:
    """It folds calls of IMMUTABLE functions with constant arguments, even in a query that returns no rows."""
    mallory = roles.mallory
    roles.sql(
        mallory,
        f"CREATE FUNCTION {mallory}.bold(v int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS"
        f" $$ BEGIN PERFORM {mallory}.evil(); RETURN v; END $$",
    )
    roles.assert_withstands(roles.create(mallory, "trap", FOLDED[place].format(m=mallory)), rounds=2)


def test_an_overload_of_an_owners_function_is_not_called(roles: Roles) -> None:
    mallory = roles.mallory
    name = roles.create(mallory, "trap", f"SELECT v, count(*) AS n FROM {mallory}.src GROUP BY v")
    roles.attempt(
        mallory,
        f"CREATE FUNCTION pgtrickle_views.write_{roles.id_of(name)}(text, text) RETURNS bigint[] LANGUAGE plpgsql"
        f" SECURITY INVOKER AS $$ BEGIN PERFORM {mallory}.evil(); RETURN NULL; END $$",
    )
    roles.assert_withstands(name)


# The step of the refresh, and what mallory does at that step to a function that runs with her rights.
CHANGED_FUNCTIONS = {
    "read": ("cut", "ALTER FUNCTION pgtrickle_views.read_{id} SECURITY INVOKER"),
    "write": ("load", "ALTER FUNCTION pgtrickle_views.write_{id} SECURITY INVOKER"),
    "write replaced": (
        "load",
        "CREATE OR REPLACE FUNCTION pgtrickle_views.write_{id}(statement text, args text[]) RETURNS bigint[]"
        " LANGUAGE plpgsql SECURITY INVOKER AS $$ BEGIN PERFORM {mallory}.evil(); RETURN '{{0,0,0,0}}'; END $$",
    ),
}


@pytest.mark.parametrize("change", CHANGED_FUNCTIONS)
def test_an_owners_function_is_not_changed_between_check_and_call(roles: Roles, change: str) -> None:
    mallory = roles.mallory
    name = roles.create(mallory, "trap", f"SELECT id, {mallory}.sly(v) AS v FROM {mallory}.src")
    roles.sql(
        mallory,
        f"CREATE TRIGGER fire AFTER INSERT ON {name} FOR EACH STATEMENT EXECUTE FUNCTION {mallory}.fire()",
        f"GRANT ALL ON {mallory}.src, {name} TO PUBLIC",
    )
    at, statement = CHANGED_FUNCTIONS[change]
    statement = statement.format(id=roles.id_of(name), mallory=mallory)

    def attack(step: str) -> None:
        if step == at:
            roles.attempt(mallory, statement)

    roles.assert_withstands(name, rounds=1, on_step=attack)


# A call reserved to administrators, and a query that is true if it had no effect.
DEPUTIES = {
    "set": ("pgtrickle.set('lock_timeout_ms', '1234')", "SELECT pgtrickle._setting('lock_timeout_ms') <> '1234'"),
    "pause": ("pgtrickle.pause()", "SELECT NOT pgtrickle.is_paused()"),
    "register": (
        "pgtrickle._register_database('evil', 'host=evil.example', '1/1', '{}')",
        "SELECT count(*) = 0 FROM pgtrickle.pgt_databases",
    ),
    "stop": (
        "pgtrickle.emergency_stop()",
        "SELECT count(*) = 0 FROM pgtrickle.pgt_refresh_history WHERE reason = 'emergency stop'",
    ),
}


@pytest.mark.parametrize("action", DEPUTIES)
def test_an_owners_code_is_not_taken_for_an_administrator(roles: Roles, action: str) -> None:
    call, undone = DEPUTIES[action]
    name = create_hostile_table(roles, f"BEGIN PERFORM {call}; EXCEPTION WHEN insufficient_privilege THEN NULL; END;")
    roles.assert_withstands(name, rounds=1)
    assert roles.value(roles.app, undone)


@pytest.mark.parametrize("way", ["query", "trigger"])
@pytest.mark.parametrize(
    "source",
    [
        "pgtrickle._database_dsn('crm')",
        "pgtrickle.pgt_usable_databases",
        "pgtrickle.pgt_databases",
        "pgtrickle._registered_databases()",
    ],
)
def test_an_owners_code_does_not_read_dsns(roles: Roles, way: str, source: str) -> None:
    mallory = roles.mallory
    roles.sql(
        roles.app,
        "INSERT INTO pgtrickle.pgt_databases (name, dsn, node, registered_by)"
        " VALUES ('crm', 'host=crm.internal', '1/1', 'somebody')",
    )
    roles.sql(
        mallory,
        f"""
        CREATE FUNCTION {mallory}.spy(v int) RETURNS text LANGUAGE plpgsql IMMUTABLE STRICT AS $$
        BEGIN
            RETURN (SELECT string_agg(place::text, ' ') FROM {source} AS place);
        EXCEPTION WHEN insufficient_privilege THEN
            RETURN 'refused';
        END $$""",
    )
    if way == "query":
        name = roles.create(mallory, "trap", f"SELECT id, {mallory}.spy(v) AS found FROM {mallory}.src")
        seen = f"SELECT found FROM {name}"
    else:
        name = create_hostile_table(roles, f"INSERT INTO {mallory}.loot VALUES ({mallory}.spy(1));")
        seen = f"SELECT what FROM {mallory}.loot"
    roles.assert_withstands(name, rounds=1)
    shown = roles.rows(mallory, seen)
    assert shown, "the code has not run"
    assert "crm.internal" not in str(shown)


# A call on a stream table of alice's, and a query that is true if it had no effect.
BORROWED = {
    "alter": (
        "pgtrickle.alter_stream_table('{alice}.one', status => 'SUSPENDED')",
        "SELECT status <> 'SUSPENDED' FROM pgtrickle.pgt_stream_tables WHERE pgt_name = 'one'",
    ),
    "drop": (
        "pgtrickle.drop_stream_table('{alice}.one')",
        "SELECT count(*) = 1 FROM pgtrickle.pgt_stream_tables WHERE pgt_name = 'one'",
    ),
    "request": ("pgtrickle.manual_refresh('{alice}.one', 'key')", "SELECT count(*) = 0 FROM pgtrickle.pgt_requests"),
    "group": (
        "pgtrickle.create_refresh_group('g', '{{{alice}.one,{alice}.two}}')",
        "SELECT count(*) = 0 FROM pgtrickle.refresh_groups()",
    ),
}


@pytest.mark.parametrize("action", BORROWED)
def test_a_function_that_alice_calls_does_not_act_in_her_name(roles: Roles, action: str) -> None:
    """A SECURITY DEFINER function has the rights of its owner only."""
    alice, mallory = roles.alice, roles.mallory
    for name in ("one", "two"):
        roles.create(alice, name, f"SELECT id, amount FROM {alice}.orders")
    call, undone = BORROWED[action]
    roles.sql(
        mallory,
        f"CREATE FUNCTION {mallory}.helpful() RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS"
        f" $$ BEGIN PERFORM {call.format(alice=alice)}; END $$",
    )
    roles.attempt(alice, f"SELECT {mallory}.helpful()")
    assert roles.value(roles.app, undone)


OURS = "pronamespace IN ('pgtrickle'::regnamespace, 'pgtrickle_changes'::regnamespace, 'pgtrickle_views'::regnamespace)"
SAFE_PATH = "search_path=pg_catalog, pg_temp"


@pytest.fixture
def grown(roles: Roles) -> Roles:
    """An installation with a service role of its own, and functions of all kinds that are made when stream tables are.

    The functions that capture the shards of a Citus cluster are in test_citus_nodes.py.
    """
    alice, bob = roles.alice, roles.bob
    roles.sql(
        alice,
        f"CREATE TABLE {alice}.parts (id int, v int) PARTITION BY RANGE (id)",
        f"CREATE TABLE {alice}.part PARTITION OF {alice}.parts FOR VALUES FROM (0) TO (1000) PARTITION BY RANGE (id)",
        f"CREATE TABLE {alice}.early PARTITION OF {alice}.part FOR VALUES FROM (0) TO (100)",
        f"CREATE VIEW {alice}.v AS SELECT id, kind FROM {alice}.orders WHERE amount > 3",
        f"GRANT SELECT ON {alice}.v TO {bob}",
        f"GRANT SELECT, TRIGGER ON {alice}.orders TO {bob}",
    )
    with roles.service() as db:
        db.install(service_role=roles.database.create_role("svc"))
    roles.create(alice, "totals", f"SELECT kind, sum(amount) AS s FROM {alice}.orders GROUP BY kind")
    roles.create(alice, "above", f"SELECT kind FROM {alice}.totals WHERE s > 50")
    roles.create(alice, "whole", f"SELECT id, v FROM {alice}.parts")
    roles.create(alice, "part_of_it", f"SELECT id, v FROM {alice}.part")  # captured by rows
    roles.create(bob, "seen", f"SELECT id, kind FROM {alice}.v")
    roles.create(bob, "whole", f"SELECT id, kind FROM {alice}.orders", refresh_mode="FULL")
    roles.create(bob, "dropped", f"SELECT id FROM {bob}.orders")
    roles.sql(bob, f"SELECT pgtrickle.drop_stream_table('{bob}.dropped')")  # leaves a capture function without a body
    query = f"SELECT kind, max(amount) AS s FROM {alice}.orders GROUP BY kind"
    roles.sql(alice, f"SELECT pgtrickle.alter_stream_table('{alice}.totals', query => $q${query}$q$)")
    return roles


def test_every_definer_function_looks_for_temporary_objects_last(grown: Roles) -> None:
    """And in no schema but PostgreSQL's own."""
    service = grown.value(grown.app, "SELECT pgtrickle._service_role()")
    with pgtrickle.connect(grown.database.direct_dsn_as(service)) as db:
        db.refresh_all()
    found = grown.rows(
        grown.app,
        "SELECT oid::regprocedure::text, (SELECT s FROM unnest(proconfig) AS s WHERE s LIKE 'search_path=%')"
        f" FROM pg_proc WHERE prosecdef AND {OURS}",
    )
    kinds = {re.sub(r"[0-9a-f]{16}|\d+", "", name) for name, _ in found}
    assert {f"pgtrickle_views.{kind}_(text,text[])" for kind in ("read", "write")} <= kinds
    assert "pgtrickle_changes.capture_()" in kinds
    assert len(found) > 50
    assert [name for name, path in found if path != SAFE_PATH] == []


def test_trigger_functions_are_definers_or_read_nothing(grown: Roles) -> None:
    """A trigger function that is no definer runs as the writer, who has no right on our tables and must need none."""
    found = grown.rows(
        grown.app,
        "SELECT DISTINCT tgfoid::regprocedure::text FROM pg_trigger JOIN pg_proc AS p ON p.oid = tgfoid"
        f" WHERE NOT tgisinternal AND NOT prosecdef AND {OURS}",
    )
    assert {name for (name,) in found} <= {"pgtrickle._refuse_stand_in()"}


# Who may execute a function, by the role that a grant names.
GRANTED = (
    "SELECT p.oid::regprocedure::text, p.prosecdef,"
    " CASE a.grantee WHEN 0 THEN 'PUBLIC' WHEN p.proowner THEN 'owner' ELSE a.grantee::regrole::text END AS grantee"
    " FROM pg_proc AS p CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a"
    f" WHERE {OURS}"
)


def test_public_may_execute_only_listed_functions(grown: Roles) -> None:
    """After an intended change, copy the printed list into the file.

    Functions that run with their owner's rights are those to think about twice.
    """
    rights = {True: "with its owner's rights", False: "with its caller's rights"}
    found = grown.rows(grown.app, f"SELECT * FROM ({GRANTED}) AS g WHERE grantee = 'PUBLIC'")
    signatures = {
        re.sub(r"capture_[0-9a-f]{16}", "capture_<hash>", name): rights[definer] for name, definer, _ in found
    }
    listed = [f"{name} {signatures[name]}" for name in sorted(signatures)]
    print("\n".join(listed))
    assert listed == PUBLIC_FUNCTIONS.read_text().splitlines()


def test_others_may_execute_only_what_they_need(grown: Roles) -> None:
    """Administrators and the service: the functions listed for them. Owners: capture, where they may create triggers."""
    alice, bob = grown.alice, grown.bob
    service = grown.value(grown.app, "SELECT pgtrickle._service_role()")
    listed = {name for (name,) in grown.rows(grown.app, "SELECT pgtrickle._callable_by_administrators()::text")}
    found = grown.rows(grown.app, f"SELECT * FROM ({GRANTED}) AS g WHERE grantee NOT IN ('PUBLIC', 'owner')")
    granted: dict[str, set[str]] = {}
    for name, _, grantee in found:
        granted.setdefault(name, set()).add(grantee)
    for name, grantees in granted.items():
        schema, _, rest = name.partition(".")
        if schema == "pgtrickle":
            assert rest.partition("(")[0] in listed, name
            assert grantees == {service, "pg_database_owner"}, name
        elif schema == "pgtrickle_changes":
            assert grantees <= {alice, bob}, name
        else:
            assert grantees == {service}, name
    assert {name.partition("(")[0].removeprefix("pgtrickle.") for name in granted if "pgtrickle._" in name} == listed


def test_an_ordinary_role_executes_nothing_else(grown: Roles) -> None:
    """As PostgreSQL itself answers, memberships included."""
    named = {line.rpartition(" with its ")[0] for line in PUBLIC_FUNCTIONS.read_text().splitlines()}
    may = grown.rows(
        grown.mallory,
        f"SELECT oid::regprocedure::text FROM pg_proc WHERE has_function_privilege(oid, 'EXECUTE') AND {OURS}",
    )
    names = {re.sub(r"capture_[0-9a-f]{16}", "capture_<hash>", name) for (name,) in may}
    assert names == named


@pytest.mark.parametrize("schema", ["pgtrickle", "pgtrickle_changes", "pgtrickle_views"])
def test_ordinary_roles_create_nothing_in_our_schemas(roles: Roles, schema: str) -> None:
    assert roles.attempt(roles.mallory, f"CREATE TABLE {schema}.planted (x int)") is not None
    assert not roles.value(roles.mallory, "SELECT has_schema_privilege(%s, 'CREATE')", [schema])
