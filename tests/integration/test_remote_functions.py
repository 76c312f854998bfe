"""User functions in queries over several databases: identical in all of them, or refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.errors import InvalidQueryError, SourceChangedError
from tests.support.oracle import assert_equal_to_query
from tests.support.remote_shop import RemoteShop
from tests.support.tenants import tenants

TWICE = "CREATE OR REPLACE FUNCTION twice(n int) RETURNS int {} LANGUAGE sql AS 'SELECT {} * n'"
QUERY = "SELECT id, twice(rank) AS more, twice(id) AS id2 FROM crm.public.customers WHERE twice(id) > 10"


@pytest.fixture
def db(remote_shop: RemoteShop) -> Iterator[pgtrickle.Database]:
    with pgtrickle.connect(remote_shop.home.dsn) as connected:
        yield connected


def create_function(remote_shop: RemoteShop, *names: str, volatility: str = "IMMUTABLE", factor: int = 2) -> None:
    for name in names:
        remote_shop.conns[name].execute(TWICE.format(volatility, factor).encode())


def assert_exact(remote_shop: RemoteShop) -> None:
    """The stream table equals its query over the customers, all in one database."""
    crm, home = remote_shop.conns["crm"], remote_shop.conns["home"]
    rows = home.execute("SELECT id, more, id2 FROM twofold").fetchall()
    crm.execute("DROP TABLE IF EXISTS stored")
    crm.execute("CREATE TABLE stored (id int, more int, id2 int)")
    with crm.cursor() as cursor:
        cursor.executemany("INSERT INTO stored VALUES (%s, %s, %s)", rows)
    assert_equal_to_query(crm, "stored", QUERY.replace("crm.", ""))


def test_the_same_function_is_evaluated_where_the_rows_are(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    create_function(remote_shop, "home", "crm")
    db.create_stream_table("twofold", QUERY)
    assert_exact(remote_shop)
    remote_shop.conns["crm"].execute("UPDATE customers SET rank = rank + 1 WHERE id % 3 = 0")
    (result,) = db.refresh("twofold")
    assert result.action == "DIFFERENTIAL"
    assert_exact(remote_shop)


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        ({"volatility": "STABLE"}, "it is not the same as here"),
        ({"factor": 3}, "it is not the same as here"),
        (None, "there is none"),
    ],
)
def test_a_different_function_is_refused(
    remote_shop: RemoteShop, db: pgtrickle.Database, there: dict[str, str | int] | None, reason: str
) -> None:
    create_function(remote_shop, "home")
    if there is not None:
        create_function(remote_shop, "crm", **there)  # type: ignore[arg-type]
    with pytest.raises(InvalidQueryError, match=rf"public\.twice\(integer\) in database crm: {reason}"):
        db.create_stream_table("twofold", QUERY)
    assert db.stream_tables() == []
    create_function(remote_shop, "crm")
    db.create_stream_table("twofold", QUERY)
    assert_exact(remote_shop)


def test_sql_asks_for_the_comparison_first(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    create_function(remote_shop, "home", "crm")
    db.import_table("crm", "public.customers")
    create = "SELECT pgtrickle.create_stream_table('twofold', %s, initialize => false)"
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="not compared yet"):
        db.conn.execute(create, (QUERY,))
    db.create_stream_table("first", QUERY)
    db.conn.execute(create, (QUERY,))
    db.refresh("twofold")
    assert_exact(remote_shop)


def test_another_roles_function_is_not_run(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    create_function(remote_shop, "home")
    with psycopg.connect(remote_shop.databases["crm"].superuser_dsn, autocommit=True) as admin:
        admin.execute("DO $$BEGIN CREATE ROLE mallory; EXCEPTION WHEN duplicate_object THEN NULL; END$$")
        admin.execute("GRANT CREATE, USAGE ON SCHEMA public TO mallory")
        admin.execute("SET ROLE mallory")
        admin.execute(TWICE.format("IMMUTABLE", 2).encode())
    with pytest.raises(InvalidQueryError, match="it belongs to role mallory"):
        db.create_stream_table("twofold", QUERY)


def test_a_function_replaced_in_one_database_fails_until_it_is_the_same_again(
    remote_shop: RemoteShop, db: pgtrickle.Database
) -> None:
    create_function(remote_shop, "home", "crm")
    db.create_stream_table("twofold", QUERY)
    create_function(remote_shop, "crm", factor=5)
    remote_shop.conns["crm"].execute("UPDATE customers SET rank = 9 WHERE id % 2 = 0")
    with pytest.raises(SourceChangedError, match=r"public\.twice\(integer\).*crm.*not the same as here"):
        db.refresh("twofold")
    create_function(remote_shop, "home", factor=5)
    (result,) = db.refresh("twofold")
    assert result.action == "REINITIALIZE"
    assert_exact(remote_shop)


def test_a_function_replaced_during_a_read_causes_another_read(remote_shop: RemoteShop) -> None:
    create_function(remote_shop, "home", "crm", factor=2)
    replaced: list[str] = []

    def on_step(step: str) -> None:
        if step == "fetch" and not replaced:
            replaced.append(step)
            create_function(remote_shop, "crm", factor=7)

    with pgtrickle.connect(remote_shop.home.dsn) as db:
        db.create_stream_table("twofold", QUERY)
        db.engine.on_step = on_step
        remote_shop.conns["crm"].execute("UPDATE customers SET rank = 9 WHERE id % 2 = 0")
        with pytest.raises(SourceChangedError, match="not the same as here"):
            db.refresh("twofold")
        assert replaced
        create_function(remote_shop, "home", factor=7)
        db.refresh("twofold")
        assert_exact(remote_shop)


def test_a_database_that_joins_a_set_later_must_have_the_same_function(server: EmbeddedServer) -> None:
    query = "SELECT pgt_database, id, twice(customer) AS more FROM tenants.public.orders"
    with tenants(server, 3) as shop, pgtrickle.connect(shop.home.dsn) as db:
        factors = dict.fromkeys(shop.names[:2], 2) | {shop.names[2]: 3}
        db.conn.execute(TWICE.format("IMMUTABLE", 2).encode())
        for name, factor in factors.items():
            shop.run(name, TWICE.format("IMMUTABLE", factor))
        for name in shop.names[:2]:
            db.add_database(name, shop.dsn(name))
        db.add_database_set("tenants", pattern=f"{shop.prefix}_*")
        db.create_stream_table("twofold", query)
        db.add_database(shop.names[2], shop.dsn(shop.names[2]))
        with pytest.raises(SourceChangedError, match=rf"in database {shop.names[2]}: it is not the same as here"):
            db.refresh("twofold")
        shop.run(shop.names[2], TWICE.format("IMMUTABLE", 2))
        db.refresh("twofold")
        wrong = "SELECT count(*) FROM twofold WHERE more % 2 <> 0"
        assert db.conn.execute(wrong).fetchone() == (0,)
        assert db.conn.execute("SELECT count(DISTINCT pgt_database) FROM twofold").fetchone() == (3,)
