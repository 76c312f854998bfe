"""An ordinary role cannot prevent other roles' stream tables from being created, refreshed and exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

import pgtrickle
from tests.security.hostile_tables import create_hostile_table
from tests.security.roles import REFUSED, Roles
from tests.support.database import TestDatabase, fresh_database
from tests.support.oracle import assert_equal_to_query

pytestmark = pytest.mark.pgversions

FIXTURES = Path(__file__).parents[1] / "fixtures"
LIKELY_IDS = range(1, 10)


@pytest.fixture
def query(roles: Roles) -> str:
    return f"SELECT kind, sum(amount) AS total FROM {roles.alice}.orders GROUP BY kind"


def create_by_sql(roles: Roles, name: str, query: str) -> None:
    """Create a stream table as alice, over a connection with short timeouts."""
    roles.sql(
        roles.alice, f"SELECT pgtrickle.create_stream_table('{roles.alice}.{name}', $q${query}$q$, initialize => false)"
    )


def assert_exact(roles: Roles, name: str, query: str) -> None:
    with roles.connect(roles.alice) as conn:
        assert_equal_to_query(conn, name, query)


@contextmanager
def holding(roles: Roles, statement: str) -> Iterator[None]:
    """Mallory keeps a transaction open in which she has run a statement, unless it was refused."""
    with roles.connect(roles.mallory) as conn, conn.transaction(force_rollback=True):
        with suppress(*REFUSED), conn.transaction():
            conn.execute(statement.encode())
        yield


def test_a_captured_change_is_not_lost(roles: Roles, query: str) -> None:
    """A writer deletes the captured copy of its own change."""
    alice = roles.alice
    name = roles.create(alice, "mine", query)
    roles.refresh(name)
    roles.sql(alice, f"GRANT INSERT ON {alice}.orders TO {roles.mallory}")
    roles.attempt(
        roles.mallory,
        "BEGIN ISOLATION LEVEL REPEATABLE READ",
        "SELECT 1",
        f"INSERT INTO {alice}.orders VALUES (99, 'k1', 1)",
        f"SELECT pgtrickle._drop_foreign_changes(pgtrickle.stable_hash('{alice}.orders'))",
        "COMMIT",
    )
    roles.refresh(name)
    assert_exact(roles, name, query)


@pytest.mark.parametrize("kind", ["TABLE", "VIEW"])
def test_a_planted_state_table_does_not_stop_a_refresh(roles: Roles, query: str, kind: str) -> None:
    for number in LIKELY_IDS:
        roles.attempt(roles.mallory, f"CREATE {kind} pgtrickle_views.state_{number} AS SELECT 1 AS x")
    name = roles.create(roles.alice, "mine", query)
    roles.refresh(name)
    assert_exact(roles, name, query)


def test_a_planted_view_does_not_stop_a_new_query(roles: Roles, query: str) -> None:
    for number in LIKELY_IDS:
        roles.attempt(roles.mallory, f"CREATE VIEW pgtrickle_views.new_{number} AS SELECT 1 AS x")
    name = roles.create(roles.alice, "mine", query)
    other = query.replace("sum(amount)", "sum(amount) + 1")
    roles.sql(roles.alice, f"SELECT pgtrickle.alter_stream_table('{name}', query => $q${other}$q$)")
    roles.refresh(name)
    assert_exact(roles, name, other)


def test_a_planted_view_does_not_stop_a_repair(roles: Roles, query: str) -> None:
    """DROP TABLE … CASCADE drops the view of the query as well, which frees its name."""
    alice = roles.alice
    for number in LIKELY_IDS:
        roles.attempt(roles.mallory, f"CREATE VIEW pgtrickle_views.q_{number} AS SELECT 1 AS x")
    name = roles.create(alice, "mine", query)
    roles.sql(alice, f"DROP TABLE {alice}.orders CASCADE")
    roles.attempt(roles.mallory, f"CREATE VIEW pgtrickle_views.q_{roles.id_of(name)} AS SELECT 1 AS x")
    roles.sql(
        alice,
        f"CREATE TABLE {alice}.orders (id int PRIMARY KEY, kind text, amount numeric(10,2))",
        f"INSERT INTO {alice}.orders VALUES (1, 'k', 1)",
        f"SELECT pgtrickle.alter_stream_table('{name}', query => $q${query}$q$)",
    )
    roles.refresh(name)
    assert_exact(roles, name, query)


def test_leftovers_of_a_dropped_table_do_not_stop_the_creation_of_others(roles: Roles, query: str) -> None:
    """Mallory drops the table of her stream table by hand, while another view depends on its query view."""
    mallory = roles.mallory
    name = roles.create(mallory, "gone", f"SELECT id, v FROM {mallory}.src")
    view = f"pgtrickle_views.q_{roles.id_of(name)}"
    roles.attempt(mallory, f"CREATE VIEW {mallory}.dependent AS SELECT * FROM {view}")
    roles.sql(mallory, f"DROP TABLE {name}")
    create_by_sql(roles, "mine", query)


# Requests that lock the row of a source: one of an earlier release, and the gate.
ROW_LOCKS = {
    "function": "SELECT pgtrickle._is_captured('{table}', '{{}}')",
    "gate": "SELECT pgtrickle._gate('{action}', jsonb_build_object('source', '{table}'::regclass::oid, 'columns', ARRAY[1]))",
}


@pytest.mark.parametrize(
    ("way", "action"), [("function", ""), ("gate", "is_captured"), ("gate", "grant_capture"), ("gate", "track")]
)
def test_a_row_lock_does_not_stop_creation(roles: Roles, query: str, way: str, action: str) -> None:
    roles.create(roles.alice, "mine", query)
    with holding(roles, ROW_LOCKS[way].format(action=action, table=f"{roles.alice}.orders")):
        create_by_sql(roles, "too", query)


def purged(roles: Roles) -> bool:
    """Whether changes that all stream tables have seen are gone."""
    return bool(roles.value(roles.app, "SELECT count(*) = 0 FROM pgtrickle_changes.pgt_activity"))


def advisory_lock(key: str) -> str:
    return f"SELECT pg_advisory_lock(hashtextextended({key}, 0))"


def test_an_advisory_lock_does_not_stop_purging(roles: Roles, query: str) -> None:
    alice = roles.alice
    name = roles.create(alice, "mine", query)
    roles.refresh(name)
    for number, lock in enumerate(
        ["SELECT 1", advisory_lock(f"'pgtrickle.purge ' || pgtrickle.stable_hash('{alice}.orders')")]
    ):
        roles.sql(alice, f"INSERT INTO {alice}.orders VALUES ({100 + number}, 'k1', 1)")
        with holding(roles, lock):
            roles.refresh(name)
            assert purged(roles), f"while mallory holds {lock}"


def test_an_advisory_lock_does_not_stop_creation(roles: Roles, query: str) -> None:
    roles.sql(roles.app, "SELECT pgtrickle.set('lock_timeout_ms', '1000')")
    with holding(roles, advisory_lock(f"'pgtrickle.track ' || '{roles.alice}.orders'::regclass::oid")):
        create_by_sql(roles, "mine", query)


@pytest.fixture
def other(database: TestDatabase) -> Iterator[TestDatabase]:
    with fresh_database(database.server, "other") as found:
        yield found


def test_an_advisory_lock_does_not_stop_imports_from_other_databases(roles: Roles, other: TestDatabase) -> None:
    with psycopg.connect(other.direct_dsn, autocommit=True) as conn:
        conn.execute("CREATE TABLE item (id int PRIMARY KEY)")
    with pgtrickle.connect(other.dsn) as db:
        db.install()
    with roles.service() as db:
        db.add_database("shop", other.dsn)
        db.conn.execute("SET lock_timeout = '2s'")
        with holding(roles, advisory_lock("'pgtrickle.stand_in shop'")):
            db.import_table("shop", "public.item")


MANY = 3000


@pytest.mark.parametrize("call", ["manual_refresh('{name}', i::text)", "refresh_stream_table('{name}')"])
def test_requests_are_bounded_for_each_role(roles: Roles, query: str, call: str) -> None:
    name = roles.create(roles.alice, "mine", query)
    theirs = roles.create(roles.bob, "mine", f"SELECT id FROM {roles.bob}.orders")
    with pytest.raises(psycopg.Error) as refused:
        roles.rows(
            roles.alice, f"SELECT count(pgtrickle.{call.format(name=name)}) FROM generate_series(1, {MANY}) AS i"
        )
    assert "request" in (refused.value.diag.message_primary or "")
    roles.sql(roles.bob, f"SELECT pgtrickle.refresh_stream_table('{theirs}')")


def test_a_capture_function_on_another_table_does_not_mark_the_source(roles: Roles, query: str) -> None:
    """Attached under the expected trigger name, in REPEATABLE READ, it marks the source as altered."""
    alice, mallory = roles.alice, roles.mallory
    name = roles.create(alice, "mine", query)
    roles.refresh(name)
    stable = roles.value(mallory, "SELECT pgtrickle.stable_hash(%s)", [f"{alice}.orders"])
    roles.attempt(
        mallory,
        f"CREATE TRIGGER pgtrickle_capture_insert_{stable} AFTER INSERT ON {mallory}.src REFERENCING NEW TABLE AS __pgt_new"
        f" FOR EACH STATEMENT EXECUTE FUNCTION pgtrickle_changes.capture_{stable}()",
        "BEGIN ISOLATION LEVEL REPEATABLE READ",
        f"INSERT INTO {mallory}.src VALUES (99, 1)",
        "COMMIT",
    )
    with roles.service() as db:
        assert [result.action for result in db.refresh([name])] == ["NO_DATA"]


def test_a_row_capture_function_on_another_table_does_not_mark_the_source(roles: Roles) -> None:
    """Everybody may attach that of a partition, because creating a partition copies its triggers."""
    alice, mallory = roles.alice, roles.mallory
    roles.sql(
        alice,
        f"CREATE TABLE {alice}.parts (id int, v int) PARTITION BY RANGE (id)",
        f"CREATE TABLE {alice}.part PARTITION OF {alice}.parts FOR VALUES FROM (0) TO (1000) PARTITION BY RANGE (id)",
        f"CREATE TABLE {alice}.early PARTITION OF {alice}.part FOR VALUES FROM (0) TO (100)",
    )
    query = f"SELECT id, v FROM {alice}.part"
    name = roles.create(alice, "mine", query)
    roles.refresh(name)
    tracking = f"FROM pgtrickle.pgt_change_tracking WHERE source_relid = '{alice}.part'::regclass"
    assert roles.value(alice, f"SELECT capture_kind {tracking}") == "row"
    stable = roles.value(mallory, f"SELECT source_stable_name {tracking}")
    with suppress(psycopg.errors.SerializationFailure):
        roles.attempt(
            mallory,
            f"CREATE TABLE {mallory}.parts (id int, v int)",
            f"CREATE TRIGGER pgtrickle_capture_insert_{stable} AFTER INSERT ON {mallory}.parts FOR EACH ROW"
            f" EXECUTE FUNCTION pgtrickle_changes.capture_{stable}()",
            "BEGIN ISOLATION LEVEL REPEATABLE READ",
            f"INSERT INTO {mallory}.parts VALUES (1, 1)",
            "COMMIT",
        )
    with roles.service() as db:
        assert [result.action for result in db.refresh([name])] == ["NO_DATA"]
    # A partition that is attached after a writer's snapshot has its rows taken into account.
    with roles.connect(alice) as writer:
        writer.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        writer.execute("SELECT 1")
        roles.sql(alice, f"CREATE TABLE {alice}.late PARTITION OF {alice}.part FOR VALUES FROM (100) TO (200)")
        writer.execute(f"INSERT INTO {alice}.late VALUES (150, 1)".encode())
        writer.execute("COMMIT")
    roles.refresh(name)
    assert_exact(roles, name, query)


def test_two_rows_with_the_same_short_hash_are_two_rows(roles: Roles) -> None:
    """These were found in three minutes, because PostgreSQL's hash functions are not collision-resistant."""
    alice = roles.alice
    pair = (FIXTURES / "collision.txt").read_text().splitlines()
    hashes = ", ".join(f'hashtextextended(ROW(note)::text COLLATE "C", {seed})' for seed in (0, 1))
    roles.sql(alice, f"CREATE TABLE {alice}.notes (note text)")
    query = f"SELECT note FROM {alice}.notes"
    name = roles.create(alice, "mine", query)
    roles.refresh(name)
    with roles.connect(alice) as conn:
        conn.execute(f"INSERT INTO {alice}.notes SELECT unnest(%s::text[])".encode(), (pair,))
    assert roles.rows(alice, f"SELECT count(DISTINCT ({hashes})), count(DISTINCT note) FROM {alice}.notes") == [(1, 2)]
    roles.refresh(name)
    assert_exact(roles, name, query)


def test_a_temporary_table_of_an_owner_does_not_stop_the_apply_of_others(roles: Roles) -> None:
    """A delta of more than 10,000 rows passes through a temporary table."""
    alice = roles.alice
    roles.sql(alice, f"INSERT INTO {alice}.orders SELECT i, 'many', 9 FROM generate_series(2000, 13000) AS i")
    trap = create_hostile_table(roles, "CREATE TEMP TABLE IF NOT EXISTS pgt_delta (x int);")
    roles.assert_withstands(trap, rounds=1)
