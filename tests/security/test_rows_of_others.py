"""pgtrickle does not disclose rows, values or queries of other roles, and no owner can change another owner's rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, product

import psycopg
import pytest

import pgtrickle
from pgtrickle.errors import PgtrickleError
from tests.security.hostile_tables import create_hostile_table_in
from tests.security.roles import Roles
from tests.support.oracle import assert_equal_to_query
from tests.support.service import running_service, until

pytestmark = pytest.mark.pgversions


def buffer_of(roles: Roles, table: str) -> str:
    query = "SELECT buffer_relid::text FROM pgtrickle.pgt_change_tracking WHERE source_relid = %s::regclass"
    return str(roles.value(roles.app, query, [table]))


def assert_exact(roles: Roles, owner: str, name: str, query: str) -> None:
    with roles.connect(owner) as conn:
        assert_equal_to_query(conn, name, query)


# Settings of a session that matter to others, and a query of alice's that depends on each.
SETTINGS = {
    "DateStyle": ("SQL, DMY", "SELECT id, amount FROM {alice}.orders"),  # psycopg reads times from the catalog
    "array_nulls": ("off", "SELECT id, ARRAY[kind, NULL] AS kinds FROM {alice}.orders"),
    "default_text_search_config": (
        "simple",
        "SELECT id, to_tsvector('the dogs walked ' || kind) AS x FROM {alice}.orders",
    ),
    "pg_trickle.fuse_default_ceiling": ("1", "SELECT id, amount FROM {alice}.orders"),  # more changes blow the fuse
}


@pytest.mark.parametrize("way", ["query", "trigger"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_does_not_outlive_the_code_that_changed_it(roles: Roles, setting: str, way: str) -> None:
    value, query = SETTINGS[setting]
    trap = create_hostile_table_in(way, roles, f"PERFORM set_config('{setting}', '{value}', false);")
    roles.assert_withstands(trap, query=query.format(alice=roles.alice))


@pytest.fixture
def payments(roles: Roles) -> str:
    """The name of a table of alice's; her view alice.v shows bob only his own rows."""
    alice, bob = roles.alice, roles.bob
    roles.sql(
        alice,
        f"CREATE TABLE {alice}.pay (id int PRIMARY KEY, who text, secret text)",
        f"INSERT INTO {alice}.pay VALUES (1, 'bob', 'a'), (2, 'carol', 'b')",
        f"CREATE VIEW {alice}.v WITH (security_barrier) AS SELECT id, who, secret FROM {alice}.pay WHERE who = 'bob'",
        f"GRANT SELECT ON {alice}.v TO {bob}",
        f"GRANT TRIGGER ON {alice}.pay TO {bob}",
    )
    # The low cost makes the planner evaluate it before other conditions.
    roles.sql(
        bob,
        f"CREATE FUNCTION {bob}.leak(t text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE STRICT COST 0.0001 AS"
        " $$ BEGIN RAISE LOG 'bob saw %', t; RETURN true; END $$",
    )
    return f"{alice}.pay"


def test_the_reader_of_a_view_does_not_read_the_changes_of_the_table_behind(roles: Roles, payments: str) -> None:
    bob = roles.bob
    query = f"SELECT id, who, secret FROM {roles.alice}.v"
    name = roles.create(bob, "mine", query)
    roles.sql(roles.alice, f"INSERT INTO {payments} VALUES (3, 'bob', 'shown'), (4, 'carol', 'private')")
    assert "private" not in roles.peek(bob, f"SELECT c1, c2, c3 FROM {buffer_of(roles, payments)}")
    roles.refresh(name)
    roles.sql(roles.alice, f"UPDATE {payments} SET secret = secret || '!'", f"DELETE FROM {payments} WHERE id = 1")
    roles.refresh(name)
    assert_exact(roles, bob, name, query)


LEAKY = {
    "filter": "SELECT id, who FROM {alice}.v WHERE {bob}.leak(secret)",
    "count": "SELECT who, count(*) AS n FROM {alice}.v WHERE {bob}.leak(secret) GROUP BY who",
    "max": "SELECT who, max(id) AS last FROM {alice}.v WHERE {bob}.leak(secret) GROUP BY who",
    "join": "SELECT v.id, o.amount FROM {alice}.v AS v JOIN {bob}.orders AS o ON o.id = v.id AND {bob}.leak(v.secret)",
}


@pytest.mark.parametrize("kind", LEAKY)
def test_a_function_in_the_query_sees_only_what_the_view_shows(roles: Roles, payments: str, kind: str) -> None:
    """Bob could read the table when the stream table was filled, then lost that right."""
    alice, bob = roles.alice, roles.bob
    query = LEAKY[kind].format(alice=alice, bob=bob)
    roles.sql(alice, f"GRANT SELECT ON {payments} TO {bob}")
    name = roles.create(bob, "mine", query)
    roles.refresh(name)
    roles.sql(
        alice,
        f"REVOKE SELECT ON {payments} FROM {bob}",
        f"INSERT INTO {payments} VALUES (3, 'bob', 'shown'), (4, 'carol', 'private')",
        f"UPDATE {payments} SET secret = 'private too' WHERE id = 2",
    )
    with suppress(psycopg.errors.InsufficientPrivilege):
        roles.refresh(name)
    assert not {"private", "private too"} & roles.logged("bob saw ")
    assert_exact(roles, bob, name, query)


@pytest.mark.parametrize("dropped", [False, True])
def test_the_right_to_read_changes_ends_with_the_right_to_read_the_table(roles: Roles, dropped: bool) -> None:
    alice, bob = roles.alice, roles.bob
    roles.create(alice, "mine", f"SELECT id, kind, amount FROM {alice}.orders")
    roles.sql(alice, f"GRANT SELECT, TRIGGER ON {alice}.orders TO {bob}")
    name = roles.create(bob, "borrowed", f"SELECT id, kind, amount FROM {alice}.orders")
    if dropped:
        roles.sql(bob, f"SELECT pgtrickle.drop_stream_table('{name}')")
    roles.sql(
        alice, f"REVOKE SELECT ON {alice}.orders FROM {bob}", f"INSERT INTO {alice}.orders VALUES (99, 'private', 1)"
    )
    assert "private" not in roles.peek(bob, f"SELECT c1, c2, c3 FROM {buffer_of(roles, f'{alice}.orders')}")


@pytest.mark.parametrize("mode", ["AUTO", "FULL"])
def test_row_level_security_enabled_later_suspends_the_stream_table(roles: Roles, mode: str) -> None:
    """Before any row is read."""
    alice, bob = roles.alice, roles.bob
    roles.sql(alice, f"GRANT SELECT, TRIGGER ON {alice}.orders TO {bob}")
    roles.sql(
        bob,
        f"CREATE FUNCTION {bob}.leak(t text) RETURNS text LANGUAGE plpgsql IMMUTABLE STRICT AS"
        " $$ BEGIN RAISE LOG 'bob saw %', t; RETURN t; END $$",
    )
    name = roles.create(bob, "borrowed", f"SELECT id, {bob}.leak(kind) AS kind FROM {alice}.orders", refresh_mode=mode)
    roles.refresh(name)
    roles.sql(
        alice,
        f"ALTER TABLE {alice}.orders ENABLE ROW LEVEL SECURITY",
        f"CREATE POLICY few ON {alice}.orders USING (kind LIKE 'for all%')",
        f"INSERT INTO {alice}.orders VALUES (98, 'private', 1), (99, 'for all', 1)",
    )
    with suppress(PgtrickleError):
        roles.refresh(name)
    assert not {"private", "for all"} & roles.logged("bob saw ")
    assert roles.value(bob, f"SELECT count(*) FROM {name}") == 20
    assert roles.value(roles.app, "SELECT status FROM pgtrickle.pgt_stream_tables") == "SUSPENDED"


def test_row_level_security_forced_later_suspends_the_owners_own_stream_table(roles: Roles) -> None:
    alice = roles.alice
    name = roles.create(alice, "mine", f"SELECT id, kind FROM {alice}.orders")
    roles.refresh(name)
    roles.sql(
        alice,
        f"INSERT INTO {alice}.orders VALUES (98, 'private', 1)",
        f"ALTER TABLE {alice}.orders ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
    )
    with suppress(PgtrickleError):
        roles.refresh(name)
    assert roles.value(roles.app, "SELECT status FROM pgtrickle.pgt_stream_tables") == "SUSPENDED"


def test_a_function_that_the_owner_may_no_longer_call_suspends_the_stream_table(roles: Roles) -> None:
    """Called by the query, by an operator of it, or by a view that it reads; before the service runs it for the owner."""
    alice, bob = roles.alice, roles.bob
    roles.sql(alice, f"GRANT SELECT, TRIGGER ON {alice}.orders TO {bob}", f"GRANT USAGE ON SCHEMA {alice} TO {bob}")
    columns = {"direct": "{0}(id)", "operator": "id {1} 1", "view": "{0}(id)"}
    remedies = {}
    for case, column in columns.items():
        function, operator = f"{alice}.{case}", f"OPERATOR({alice}.{'~' * (2 + len(case))})"
        roles.sql(
            alice,
            f"CREATE FUNCTION {function}(int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN $1; END'",
            f"CREATE FUNCTION {function}(int, int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN $1; END'",
            f"CREATE OPERATOR {alice}.{'~' * (2 + len(case))} (FUNCTION = {function}, LEFTARG = int, RIGHTARG = int)",
        )
        query = f"SELECT {column.format(function, operator)} AS id, kind FROM {alice}.orders"
        if case == "view":
            roles.sql(alice, f"CREATE VIEW {alice}.shown AS {query}", f"GRANT SELECT ON {alice}.shown TO {bob}")
            query = f"SELECT id, kind FROM {alice}.shown"
        name = roles.create(bob, case, query)
        roles.refresh(name)
        called = f"{function}({'int, int' if case == 'operator' else 'int'})"
        roles.sql(
            alice,
            f"REVOKE EXECUTE ON FUNCTION {called} FROM PUBLIC",
            f"UPDATE {alice}.orders SET kind = kind || '!' WHERE id = 1",
        )
        with pytest.raises(PgtrickleError, match="may not call"):
            roles.refresh(name)
        state = "SELECT status, status_reason FROM pgtrickle.pgt_stream_tables WHERE pgt_name = %s"
        ((status, reason),) = roles.rows(roles.app, state, [case])
        assert status == "SUSPENDED"
        assert reason.startswith(f"role {bob} may not call {function}(")
        remedies[name] = (called, query)
    for name, (called, query) in remedies.items():
        roles.sql(alice, f"GRANT EXECUTE ON FUNCTION {called} TO {bob}")
        roles.sql(bob, f"SELECT pgtrickle.resume_stream_table('{name}')")
        roles.refresh(name)
        assert_exact(roles, bob, name, query)


SECRETS = ("123-45-6789", "launch code")

# Where errors and queries are shown. The owner and the administrator must still see them there.
TOLD = {
    "pgt_status": "SELECT * FROM pgtrickle.pgt_status()",
    "health_check": "SELECT * FROM pgtrickle.health_check()",
    "events": "SELECT * FROM pgtrickle.events()",
    "refresh_timeline": "SELECT * FROM pgtrickle.refresh_timeline()",
    "diagnose_errors": "SELECT * FROM pgtrickle.diagnose_errors('{name}')",
    "get_refresh_history": "SELECT * FROM pgtrickle.get_refresh_history('{name}')",
    "pg_stat_stream_tables": "SELECT * FROM pgtrickle.pg_stat_stream_tables",
    "export_definition": "SELECT pgtrickle.export_definition('{name}')",
}
# Further places that must not leak.
ALSO = {
    "pgt_stream_tables": "SELECT * FROM pgtrickle.pgt_stream_tables",
    "pgt_refresh_history": "SELECT * FROM pgtrickle.pgt_refresh_history",
    "explain_refresh_mode": "SELECT * FROM pgtrickle.explain_refresh_mode('{name}')",
    "fuse_status": "SELECT * FROM pgtrickle.fuse_status()",
    "dependency_tree": "SELECT * FROM pgtrickle.dependency_tree()",
    "st_refresh_stats": "SELECT * FROM pgtrickle.st_refresh_stats()",
}


def leaks(roles: Roles, role: str, places: dict[str, str], name: str) -> set[str]:
    """The places where a role sees a secret."""
    seen = {place: roles.peek(role, query.format(name=name)) for place, query in places.items()}
    return {place for place, text in seen.items() if any(secret in text for secret in SECRETS)}


@pytest.fixture
def failing(roles: Roles) -> str:
    """The name of a stream table of alice's whose next refresh fails because of a value."""
    alice = roles.alice
    roles.sql(
        alice,
        f"CREATE TABLE {alice}.people (id int PRIMARY KEY, note text)",
        f"INSERT INTO {alice}.people VALUES (1, '1')",
    )
    name = roles.create(alice, "bad", f"SELECT id, note::int AS note FROM {alice}.people WHERE note <> 'launch code'")
    roles.refresh(name)
    roles.sql(alice, f"INSERT INTO {alice}.people VALUES (2, 'SSN 123-45-6789')")
    return name


def test_only_the_owner_and_administrators_see_messages_and_queries(roles: Roles, failing: str) -> None:
    with pytest.raises((psycopg.Error, PgtrickleError)):
        roles.refresh(failing)
    for stranger in (roles.mallory, roles.bob):
        assert leaks(roles, stranger, TOLD | ALSO, failing) == set()
    told = {name: query for name, query in TOLD.items() if name != "events"}  # they are the service's
    assert leaks(roles, roles.alice, told, failing) == set(told)
    assert leaks(roles, roles.app, told, failing) == set(told)
    # The status is public.
    status = "SELECT consecutive_errors, last_status FROM pgtrickle.pgt_status() WHERE pgt_name = 'bad'"
    assert roles.rows(roles.mallory, status) == [(1, "FAILED")]
    assert roles.rows(roles.mallory, "SELECT severity FROM pgtrickle.health_check() WHERE check_name = 'failing'") == [
        ("WARN",)
    ]


def test_the_reason_for_a_refresh_does_not_leak_values(roles: Roles) -> None:
    """An expression fails for a row that the query does not reach, so that the refresh falls back to FULL."""
    alice = roles.alice
    roles.sql(
        alice,
        f"CREATE TABLE {alice}.people (id int PRIMARY KEY, note text)",
        f"INSERT INTO {alice}.people VALUES (1, '1')",
    )
    query = f"SELECT p.id, p.note::int AS note FROM {alice}.people AS p JOIN {alice}.orders AS o ON o.id = p.id"
    name = roles.create(alice, "joined", query)
    roles.refresh(name)
    roles.sql(alice, f"INSERT INTO {alice}.people VALUES (1000, 'SSN 123-45-6789')")
    roles.refresh(name)
    assert_exact(roles, alice, name, query)
    assert leaks(roles, roles.mallory, TOLD | ALSO, name) == set()


def test_the_reason_for_a_mode_does_not_leak_the_query(roles: Roles) -> None:
    alice = roles.alice
    query = f"SELECT id, row_number() OVER (PARTITION BY kind = 'launch code' ORDER BY id) AS n FROM {alice}.orders"
    name = roles.create(alice, "numbered", query)
    roles.refresh(name)
    assert leaks(roles, roles.mallory, TOLD | ALSO, name) == set()


def test_notifications_events_and_jobs_do_not_leak_values(roles: Roles, failing: str) -> None:
    """Any role may listen to notifications."""
    jobs = {"parallel_job_status": "SELECT * FROM pgtrickle.parallel_job_status(3600)", "events": TOLD["events"]}
    with roles.connect(roles.mallory) as conn:
        for channel in ("pgtrickle_alert", "pg_trickle_refresh", "pgtrickle_wake", "pg_trickle_dag_rebuild"):
            conn.execute(f"LISTEN {channel}".encode())
        with running_service(roles.database.dsn, roles.database.name):
            failed = "SELECT count(*) FROM pgtrickle.parallel_job_status(3600) WHERE status = 'FAILED'"
            until(
                lambda: roles.value(roles.app, failed) > 0 and "refresh_failed" in roles.peek(roles.app, TOLD["events"])
            )
        heard = [notice.payload for notice in conn.notifies(timeout=0.5)]
    assert any("refresh_failed" in payload for payload in heard)
    assert not [payload for payload in heard if any(secret in payload for secret in SECRETS)]
    assert leaks(roles, roles.mallory, jobs, failing) == set()
    assert leaks(roles, roles.alice, jobs, failing) == set(jobs)
    assert leaks(roles, roles.app, jobs, failing) == set(jobs)


def test_the_python_api_does_not_leak_messages_and_queries(roles: Roles, failing: str) -> None:
    with pytest.raises((psycopg.Error, PgtrickleError)):
        roles.refresh(failing)
    with pgtrickle.connect(roles.database.dsn_as(roles.mallory)) as db:
        for shown in (str(db.status()), str(db.stream_tables())):
            assert failing in shown
            assert not [secret for secret in SECRETS if secret in shown]


# Every one holds a password as libpq understands it.
SECRET_DSNS = [
    "postgresql://u:hush@h/db",
    "postgresql://u@h/db?password=hush",
    "postgresql://u@h/db?pass%77ord=hush",
    "host=h password=hush",
    "host=h password = 'hush'",
    "host=h password=${PART}hush",
    "host=h sslpassword=hush",
    "host='h'password=hush",
    "host=h user='password=${OK}' password=hush",
]


def test_a_password_is_not_stored(roles: Roles) -> None:
    register = "SELECT pgtrickle._register_database('crm', %s, '1/1', '{}')"
    for dsn in SECRET_DSNS:
        with pytest.raises(psycopg.Error) as refused:
            roles.rows(roles.app, register, [dsn])
        assert "hush" not in str(refused.value)
        assert roles.rows(roles.app, "SELECT * FROM pgtrickle.pgt_databases") == [], dsn
    for dsn in ("postgresql://u@h/db", "host=h user=u password=${CRM_PASSWORD}"):
        roles.rows(roles.app, register, [dsn])
        assert roles.value(roles.app, "SELECT dsn FROM pgtrickle.pgt_databases") == dsn


def test_strangers_do_not_see_the_addresses_of_cluster_nodes(roles: Roles) -> None:
    roles.sql(
        roles.app,
        "INSERT INTO pgtrickle.pgt_databases (name, dsn, node, registered_by, citus_group)"
        " VALUES ('@1', 'host=node1.internal', '1/1', 'somebody', 1)",
    )
    former = ("_known_nodes()", "_usable_databases()")  # of earlier releases
    for source in (*former, "_dsn_of('@1')", "_followed_nodes()", "_node_report()", "pgt_usable_databases"):
        assert "node1.internal" not in roles.peek(roles.mallory, f"SELECT * FROM pgtrickle.{source}"), source


ADDRESSES = ("crm.internal", "node1.internal")

_READABLE = """
SELECT format('SELECT %s FROM %s', string_agg(quote_ident(a.attname), ', '), c.oid::regclass)
FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace IN ('pgtrickle'::regnamespace, 'pgtrickle_changes'::regnamespace, 'pgtrickle_views'::regnamespace)
  AND c.relkind IN ('r', 'v', 'p', 'S') AND has_column_privilege(c.oid, a.attnum, 'SELECT')
GROUP BY c.oid
"""
_CALLABLE = """
SELECT p.oid::regprocedure::text, p.oid::regproc::text, ARRAY(SELECT t::regtype::text FROM unnest(p.proargtypes) AS t),
       p.prokind::text
FROM pg_proc AS p
WHERE p.pronamespace IN ('pgtrickle'::regnamespace, 'pgtrickle_changes'::regnamespace, 'pgtrickle_views'::regnamespace)
  AND p.prorettype <> 'trigger'::regtype AND has_function_privilege(p.oid, 'EXECUTE')
"""


def calls(roles: Roles, names: list[str], id_: int) -> Iterator[str]:
    """Every function that an ordinary role may execute, with arguments that name what belongs to others."""
    storage = f"'{names[0]}'::regclass"
    known = {
        "text": [f"'{name}'" for name in names],
        "name": [f"'{roles.alice}'"],
        "bigint": [str(id_)],
        "integer": [str(id_), "3600"],
        "smallint": ["1"],
        "oid": [f"{storage}::oid", f"'{roles.alice}'::regrole::oid"],
        "regclass": [storage, f"'{roles.alice}.people'::regclass", f"'pgtrickle_views.q_{id_}'::regclass"],
        "boolean": ["true"],
        "interval": ["interval '1 ms'"],
        "timestamp with time zone": ["timestamptz '-infinity'", "clock_timestamp()"],
        "jsonb": ["'{}'"],
        "text[]": [f"ARRAY['{name}']" for name in names],
        "bigint[]": [f"ARRAY[{id_}]"],
        "oid[]": [f"ARRAY[{storage}::oid]"],
        "smallint[]": ["'{1,2}'"],
        "pgtrickle.pgt_visible_history": ["(SELECT h FROM pgtrickle.pgt_visible_history AS h LIMIT 1)"],
    }
    for signature, name, types, kind in roles.rows(roles.mallory, _CALLABLE):
        assert set(types) <= known.keys(), f"say what {signature} is called with"
        for arguments in islice(product(*(known[type_] for type_ in types)), 50):
            listed = ", ".join(f"{value}::{type_}" for value, type_ in zip(arguments, types, strict=True))
            yield f"CALL {name}({listed})" if kind == "p" else f"SELECT x::text FROM {name}({listed}) AS x"


def test_other_roles_do_not_see_the_addresses_of_cluster_nodes(roles: Roles, failing: str) -> None:
    """Nor does an error message of it."""
    alice = roles.alice
    with pytest.raises((psycopg.Error, PgtrickleError)):
        roles.refresh(failing)
    roles.sql(
        roles.app,
        "INSERT INTO pgtrickle.pgt_databases (name, dsn, node, registered_by, citus_group)"
        " VALUES ('crm', 'host=crm.internal', '1/1', 'somebody', NULL), ('@1', 'host=node1.internal', '1/2', 'somebody', 1)",
    )
    roles.sql(alice, f"SELECT pgtrickle.manual_refresh('{failing}', 'the key of a request')")
    secrets = (*ADDRESSES, *SECRETS, "the key of a request")
    readable = {role: [query for (query,) in roles.rows(role, _READABLE)] for role in (roles.app, roles.mallory)}
    called = calls(roles, [failing, "crm", "@1"], roles.id_of(failing))
    assert set().union(*told(roles, roles.app, readable[roles.app], secrets).values()) == set(secrets)
    assert told(roles, roles.mallory, [*readable[roles.mallory], *called], secrets) == {}


def told(roles: Roles, role: str, statements: Iterable[str], secrets: Sequence[str]) -> dict[str, set[str]]:
    """Which statements show a role which secrets, in their results or errors."""
    found = {}
    with roles.connect(role) as conn:
        for statement in statements:
            try:
                with conn.transaction(force_rollback=True):
                    cursor = conn.execute(statement.encode())
                    shown = str(cursor.fetchall()) if cursor.description else ""
            except psycopg.Error as error:
                shown = str(error)
            if seen := {secret for secret in secrets if secret in shown}:
                found[statement] = seen
    return found
