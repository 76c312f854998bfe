"""Stream tables over several databases, on two servers of different versions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.errors import InvalidQueryError, NotDifferentiableError, PgtrickleError, PrivilegeError
from tests.support.corpus import load_corpus
from tests.support.database import TestDatabase, fresh_database
from tests.support.remote_corpus import run_remote_corpus
from tests.support.remote_shop import QUERIES, READERS, RemoteShop, change
from tests.support.service import running_service, until

Connection = psycopg.Connection[Any]

DIRECT = [name for name in QUERIES if name not in READERS]


@pytest.fixture
def db(remote_shop: RemoteShop) -> Iterator[pgtrickle.Database]:
    with pgtrickle.connect(remote_shop.home.dsn) as db:
        yield db


@pytest.mark.parametrize("rounds", [4, pytest.param(10, marks=pytest.mark.long)])
def test_exact_at_every_cut(remote_shop: RemoteShop, rounds: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    long = {name: psycopg.connect(database.direct_dsn) for name, database in remote_shop.databases.items()}
    racing = [False]

    def on_step(step: str) -> None:
        # What the cut saw is what is committed now; what is written from now on it did not see.
        if step == "cut" and racing[0]:
            racing[0] = False
            remote_shop.load_oracle()
            for name in remote_shop.databases:
                change(remote_shop.conns[name], name, chance)

    with pgtrickle.connect(remote_shop.home.dsn, on_step=on_step) as db:
        for name, query in QUERIES.items():
            assert db.create_stream_table(name, query, initialize=False).effective_mode == "DIFFERENTIAL"
        for number in range(rounds + 1):
            for name in remote_shop.databases if number else ():
                change(remote_shop.conns[name], name, chance)
                if chance.random() < 0.4:
                    change(long[name], name, chance)  # stays open over some refreshes
                elif chance.random() < 0.3:
                    long[name].rollback()
                else:
                    long[name].commit()
            racing[0] = True
            for result in db.refresh(DIRECT):
                assert number == 0 or result.action in {"DIFFERENTIAL", "NO_DATA"}, result
            assert not racing[0]
            remote_shop.assert_exact(*DIRECT)
        for conn in long.values():
            conn.commit()
            conn.close()
        db.refresh(list(QUERIES))
        remote_shop.load_oracle()
        remote_shop.assert_exact(*QUERIES)


def test_the_corpus_over_two_databases(database: TestDatabase, server: EmbeddedServer) -> None:
    queries = load_corpus()[::8]
    with fresh_database(server, "other") as other:
        accepted, refused = run_remote_corpus(database, other, queries, 20261116, rounds=1)
    assert len(accepted) > 6 * len(refused), refused


@pytest.mark.long
def test_the_whole_corpus_over_two_databases(database: TestDatabase, server: EmbeddedServer) -> None:
    with fresh_database(server, "other") as other:
        accepted, refused = run_remote_corpus(database, other, load_corpus(), 20261117, rounds=8)
    assert len(accepted) > 6 * len(refused), refused


def test_unsupported_queries_are_refused_with_the_reason(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    with pytest.raises(NotDifferentiableError, match=r"reads other databases.*LIMIT"):
        db.create_stream_table("few", "SELECT id FROM crm.public.customers ORDER BY id LIMIT 3")
    with pytest.raises(NotDifferentiableError, match="LIKE"):
        db.create_stream_table(
            "likes", "SELECT o.id FROM orders AS o JOIN stock.public.items AS i ON i.kind LIKE o.day::text"
        )
    # Spark multiplies, but does not know which products PostgreSQL takes for equal.
    with pytest.raises(NotDifferentiableError, match="as a key is PostgreSQL's"):
        db.create_stream_table(
            "products",
            "SELECT o.day, count(DISTINCT o.n * i.price) AS n FROM orders AS o"
            " JOIN stock.public.items AS i ON i.id = o.item GROUP BY o.day",
        )
    with pytest.raises(InvalidQueryError, match=r"database crm has no table public\.nobody"):
        db.create_stream_table("lost", "SELECT * FROM crm.public.nobody")
    with pytest.raises(InvalidQueryError, match="cross-database") as error:
        db.create_stream_table("far", "SELECT * FROM moon.public.craters")
    assert "pgtrickle database add moon" in str(error.value)
    assert db.stream_tables() == []


def test_two_tables_of_one_schema(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    remote_shop.conns["crm"].execute("CREATE TABLE visits (id int PRIMARY KEY, customer int)")
    remote_shop.conns["crm"].execute("INSERT INTO visits SELECT i, i % 30 FROM generate_series(1, 50) AS i")
    db.create_stream_table(
        "seen", "SELECT v.id, c.region FROM crm.public.visits AS v JOIN crm.public.customers AS c ON c.id = v.customer"
    )
    remote_shop.conns["crm"].execute("UPDATE visits SET customer = 1 WHERE id < 20")
    assert db.refresh("seen")[0].action == "DIFFERENTIAL"
    query = "SELECT v.id, c.region FROM visits AS v JOIN customers AS c ON c.id = v.customer"
    expected = remote_shop.conns["crm"].execute(query).fetchall()
    assert sorted(remote_shop.conns["home"].execute("SELECT id, region FROM seen").fetchall()) == sorted(expected)


def test_names_in_three_parts_are_found_where_sql_has_them(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    query = """
    SELECT customers.id, 'crm.public.customers' AS "crm.public.x", -- crm.public.nobody
           crm.public.customers.region, $$ crm.public.nobody $$ AS quoted /* crm.public.nobody /* nested */ crm.public.nobody */
    FROM "crm" . PUBLIC . Customers WHERE E'\\'crm.public.nobody' IS NOT NULL
    """
    db.create_stream_table("odd", query)
    row = remote_shop.conns["home"].execute('SELECT id, "crm.public.x", quoted FROM odd WHERE id = 3').fetchone()
    assert row == (3, "crm.public.customers", " crm.public.nobody ")


def test_databases_are_registered_once_under_a_free_name(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    crm = remote_shop.databases["crm"].dsn
    with pytest.raises(InvalidQueryError, match="crm2 is the same database as crm"):
        db.add_database("crm2", crm)
    with pytest.raises(InvalidQueryError, match="myself is this database itself"):
        db.add_database("myself", remote_shop.home.dsn)
    for name in ("public", remote_shop.home.name, "Upper", "with.dot"):
        with pytest.raises(InvalidQueryError):
            db.add_database(name, crm)
    assert [one.name for one in db.databases()] == ["crm", "stock"]
    db.create_stream_table("named", QUERIES["named"])
    with pytest.raises(PgtrickleError, match=r"stream tables read tables of crm: public\.named"):
        db.remove_database("crm")
    db.drop_stream_table("named")
    db.remove_database("crm")
    assert [one.name for one in db.databases()] == ["stock"]
    schemas = (
        remote_shop.conns["home"].execute("SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'crm.%'").fetchone()
    )
    assert schemas == (0,)


def test_only_authorized_roles_read_a_registered_database(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    role = remote_shop.home.create_role("analyst")
    home = remote_shop.conns["home"]
    home.execute(f"GRANT CREATE, USAGE ON SCHEMA public TO {role}; GRANT SELECT, TRIGGER ON orders TO {role}".encode())
    with pgtrickle.connect(remote_shop.home.dsn_as(role)) as theirs:
        with pytest.raises(PrivilegeError, match="may not read tables of the registered database crm"):
            theirs.create_stream_table("named", QUERIES["named"])
        with pytest.raises(PrivilegeError, match="may not register databases"):
            theirs.add_database("stock2", remote_shop.databases["stock"].dsn)
    db.add_database("crm", remote_shop.databases["crm"].dsn, roles=[role])
    with (
        pgtrickle.connect(remote_shop.home.dsn_as(role)) as theirs,
        pytest.raises(PrivilegeError, match=r"may not import table public\.customers of database crm"),
    ):
        theirs.create_stream_table("named", QUERIES["named"])
    db.import_table("crm", "public.customers")
    with pgtrickle.connect(remote_shop.home.dsn_as(role)) as theirs:
        theirs.create_stream_table("named", QUERIES["named"], initialize=False)
        theirs.conn.execute("GRANT SELECT ON named TO app")
    db.refresh("named")
    remote_shop.load_oracle()
    remote_shop.assert_exact("named")
    # A right that is taken back suspends what needs it.
    db.add_database("crm", remote_shop.databases["crm"].dsn)
    with pytest.raises(PrivilegeError, match=r"may not read .* of \"crm.public\".customers"):
        db.refresh("named")


def test_a_dropped_stream_table_leaves_nothing_in_other_databases(
    remote_shop: RemoteShop, db: pgtrickle.Database
) -> None:
    crm = remote_shop.conns["crm"]
    triggers = "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'customers'::regclass AND tgname LIKE 'pgtrickle%'"
    db.create_stream_table("named", QUERIES["named"])
    db.create_stream_table("buyers", QUERIES["buyers"])
    assert crm.execute(triggers).fetchone() == (4,)
    db.drop_stream_table("named")
    assert crm.execute(triggers).fetchone() == (4,)
    db.drop_stream_table("buyers")
    assert crm.execute(triggers).fetchone() == (0,)
    assert crm.execute("SELECT count(*) FROM pgtrickle.pgt_consumers").fetchone() == (0,)


def test_uninstall_leaves_nothing_of_other_databases(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    db.create_stream_table("named", QUERIES["named"])
    assert db.uninstall() == []
    left = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'crm.%' OR nspname LIKE 'pgtrickle%'"
    assert remote_shop.conns["home"].execute(left).fetchall() == []


def test_changes_are_kept_until_all_readers_have_stored_them(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    crm = remote_shop.conns["crm"]
    waiting = "SELECT count(*) FROM pgtrickle_changes.pgt_activity"
    db.create_stream_table("named", QUERIES["named"])
    db.create_stream_table("buyers", QUERIES["buyers"])
    for number in range(3):
        crm.execute("UPDATE customers SET region = %s", (f"r{number}",))
        db.refresh("named")
    crm.execute("SELECT pgtrickle._purge(source_stable_name) FROM pgtrickle.pgt_change_tracking")
    assert crm.execute(waiting).fetchone() != (0,)  # buyers has seen none of them
    db.refresh("buyers")
    remote_shop.load_oracle()
    remote_shop.assert_exact("named", "buyers")
    for _ in range(2):  # what a refresh has stored is known there with the next one
        crm.execute("UPDATE customers SET vip = NOT vip, region = region || '!'")
        db.refresh(["named", "buyers"])
    assert crm.execute(waiting).fetchone() == (1,)


def test_columns_in_other_databases_are_renamed_added_and_dropped(
    remote_shop: RemoteShop, db: pgtrickle.Database
) -> None:
    crm = remote_shop.conns["crm"]
    db.create_stream_table("named", QUERIES["named"])
    crm.execute("ALTER TABLE customers RENAME COLUMN region TO area")
    crm.execute("ALTER TABLE customers ADD COLUMN more int DEFAULT 7")
    crm.execute("UPDATE customers SET area = 'moved' WHERE id < 5")
    db.refresh("named")
    assert remote_shop.conns["home"].execute("SELECT count(*) FROM named WHERE region = 'moved'").fetchone() != (0,)
    db.create_stream_table("more", "SELECT id, area, more FROM crm.public.customers")
    crm.execute("ALTER TABLE customers RENAME COLUMN area TO region")
    db.refresh(["named", "more"])
    remote_shop.conns["crm"].execute("ALTER TABLE customers DROP COLUMN more")
    with pytest.raises(PgtrickleError, match=r"column more of crm\.public\.customers was dropped"):
        db.refresh("more")
    crm.execute("UPDATE customers SET region = 'again' WHERE id = 7")
    with pytest.raises(PgtrickleError, match="column more"):
        db.refresh(["more", "named"])  # the others are refreshed all the same
    assert remote_shop.conns["home"].execute("SELECT count(*) FROM named WHERE region = 'again'").fetchone() != (0,)
    crm.execute("ALTER TABLE customers RENAME TO clients")
    crm.execute("UPDATE clients SET region = 'renamed' WHERE id = 8")
    db.refresh("named")
    assert remote_shop.conns["home"].execute("SELECT count(*) FROM named WHERE region = 'renamed'").fetchone() != (0,)


def test_a_key_dropped_in_another_database_is_not_used_here(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    crm = remote_shop.conns["crm"]
    db.create_stream_table("plain", "SELECT id, region FROM crm.public.customers")
    crm.execute("ALTER TABLE customers DROP CONSTRAINT customers_pkey")
    crm.execute("INSERT INTO customers VALUES (1, 'twice', 1, true)")
    with pytest.raises(PgtrickleError, match="no longer one of its query"):
        db.refresh("plain")


def test_a_partition_in_another_database_causes_re_initialization(
    remote_shop: RemoteShop, db: pgtrickle.Database
) -> None:
    crm = remote_shop.conns["crm"]
    crm.execute("CREATE TABLE visits (id int, day int) PARTITION BY LIST (day)")
    crm.execute("CREATE TABLE visits_1 PARTITION OF visits FOR VALUES IN (1)")
    crm.execute("INSERT INTO visits SELECT i, 1 FROM generate_series(1, 5) AS i")
    db.create_stream_table("per_day", "SELECT day, count(*) AS n FROM crm.public.visits GROUP BY day")
    crm.execute("CREATE TABLE visits_2 AS SELECT i AS id, 2 AS day FROM generate_series(1, 7) AS i")
    crm.execute("ALTER TABLE visits ATTACH PARTITION visits_2 FOR VALUES IN (2)")
    assert [result.action for result in db.refresh("per_day")] == ["REINITIALIZE"]
    crm.execute("INSERT INTO visits VALUES (9, 2)")
    assert [result.action for result in db.refresh("per_day")] == ["DIFFERENTIAL"]
    found = remote_shop.conns["home"].execute("SELECT day, n FROM per_day ORDER BY 1").fetchall()
    assert found == [(1, 5), (2, 8)]
    crm.execute("TRUNCATE visits")
    (result,) = db.refresh("per_day")
    assert (result.action, result.reason) == ("REINITIALIZE", "crm.public.visits was truncated")


@pytest.mark.parametrize(
    "statements",
    [
        ["ALTER spent TYPE int USING spent + 1000"],
        ["ALTER spent TYPE text USING spent + 1000", "ALTER spent TYPE int USING spent::int"],
        ["ALTER spent TYPE int USING spent + 1000, ALTER region SET NOT NULL"],
    ],
    ids=["same type", "there and back", "among others"],
)
def test_values_recomputed_in_another_database(
    remote_shop: RemoteShop, db: pgtrickle.Database, statements: list[str]
) -> None:
    """No trigger fires, and no view of pgtrickle prevents it."""
    crm, home = remote_shop.conns["crm"], remote_shop.conns["home"]
    crm.execute("CREATE TABLE buyers (id int PRIMARY KEY, region text, spent int)")
    crm.execute("INSERT INTO buyers SELECT i, 'r', i FROM generate_series(1, 10) AS i")
    db.create_stream_table("bought", "SELECT id, spent FROM crm.public.buyers")
    db.create_stream_table("regions", "SELECT region, count(*) AS n FROM crm.public.buyers GROUP BY region")
    for statement in statements:
        crm.execute(f"ALTER TABLE buyers {statement}".encode())
    for action in ("REINITIALIZE", "NO_DATA"):
        (done,) = db.refresh("bought")
        assert home.execute("SELECT sum(spent) FROM bought").fetchone() == (10_055,)
        assert done.action == action
    crm.execute("VACUUM FULL buyers")
    crm.execute("ALTER TABLE buyers ADD COLUMN other int DEFAULT 7")
    for name in ("bought", "regions"):
        (done,) = db.refresh(name)
        assert done.action != "REINITIALIZE" or "region SET" in statements[0], done
    crm.execute("INSERT INTO buyers VALUES (11, 'r', 45)")
    assert [done.action for done in db.refresh(["bought", "regions"])] == ["DIFFERENTIAL", "DIFFERENTIAL"]
    assert home.execute("SELECT sum(spent) FROM bought").fetchone() == (10_100,)


def test_user_defined_types_must_be_the_same_in_both(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    crm, home = remote_shop.conns["crm"], remote_shop.conns["home"]
    crm.execute("CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE DOMAIN code AS varchar(5) CHECK (value <> '')")
    crm.execute("CREATE TABLE moods (id int PRIMARY KEY, mood mood, code code, tags text[], at timestamptz)")
    crm.execute("INSERT INTO moods VALUES (1, 'happy', 'abc', '{a,b}', '2026-01-01'), (2, 'sad', NULL, NULL, NULL)")
    query = "SELECT m.id, m.mood, m.code, m.tags, m.at, o.n FROM crm.public.moods AS m JOIN orders AS o ON o.id = m.id"
    with pytest.raises(InvalidQueryError, match=r"type public\.mood, which does not exist here"):
        db.create_stream_table("moods", query)
    home.execute("CREATE TYPE mood AS ENUM ('happy', 'sad')")
    with pytest.raises(InvalidQueryError, match="has different labels here"):
        db.create_stream_table("moods", query)
    home.execute("DROP TYPE mood; CREATE TYPE mood AS ENUM ('sad', 'happy')")
    db.create_stream_table("moods", query)
    crm.execute("UPDATE moods SET mood = 'happy', code = 'x', tags = '{z}' WHERE id = 2")
    db.refresh("moods")
    assert home.execute("SELECT id, mood::text, code, tags FROM moods ORDER BY id").fetchall() == [
        (1, "happy", "abc", ["a", "b"]),
        (2, "happy", "x", ["z"]),
    ]


def _freshness(conn: psycopg.Connection[Any], name: str) -> tuple[bool, bool]:
    row = conn.execute(
        "SELECT pending, staleness < 600 FROM pgtrickle._freshness(ARRAY[pgtrickle._require_id(%s)])", (name,)
    ).fetchone()
    assert row is not None
    return row[0], row[1]


def test_a_service_polls_other_databases(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    home, crm = remote_shop.conns["home"], remote_shop.conns["crm"]
    db.import_table("crm", "public.customers")
    # In SQL: what is named must be known, and is captured there when it is first read.
    with pytest.raises(psycopg.errors.UndefinedTable, match="has not been imported yet"):
        home.execute("SELECT pgtrickle.create_stream_table('pairs', %s, '1s')", (QUERIES["pairs"],))
    home.execute("SELECT pgtrickle.create_stream_table('named', %s, '1s')", (QUERIES["named"],))
    home.execute("SELECT pgtrickle.create_stream_table('own', 'SELECT n, count(*) AS c FROM orders GROUP BY n', '1s')")
    home.execute("SELECT pgtrickle.create_stream_table('lagging', %s, '1s')", (QUERIES["named"],))
    with running_service(remote_shop.home.dsn, remote_shop.home.name):
        until(lambda: home.execute("SELECT count(*) > 0 FROM named").fetchone() == (True,))
        until(lambda: home.execute("SELECT count(*) > 0 FROM lagging").fetchone() == (True,))
        crm.execute("UPDATE customers SET region = 'followed' WHERE id = 3")
        until(lambda: home.execute("SELECT count(*) > 0 FROM named WHERE region = 'followed'").fetchone() == (True,))
        # It is known to be fresh without a change, as long as the other database is looked at, whoever else lacks
        # something; who does counts from the change.
        home.execute("SELECT pgtrickle.alter_stream_table('lagging', status => 'SUSPENDED')")
        home.execute("UPDATE pgtrickle.pgt_stream_tables SET data_timestamp = now() - interval '1 h'")
        crm.execute("UPDATE customers SET region = 'lacking' WHERE id = 3")
        until(lambda: home.execute("SELECT count(*) > 0 FROM named WHERE region = 'lacking'").fetchone() == (True,))
        home.execute("UPDATE pgtrickle.pgt_stream_tables SET data_timestamp = now() - interval '1 h'")
        until(lambda: _freshness(home, "lagging") == (True, True), "pending, for less than ten minutes")
        until(lambda: _freshness(home, "named") == (False, True))
        assert home.execute("SELECT problem FROM pgtrickle.pgt_databases WHERE name = 'crm'").fetchone() == (None,)
        home.execute("SELECT pgtrickle.drop_stream_table('named')")
        home.execute("UPDATE orders SET n = 99 WHERE id = 1")
        until(lambda: home.execute("SELECT c FROM own WHERE n = 99").fetchone() == (1,))
