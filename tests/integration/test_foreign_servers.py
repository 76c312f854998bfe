"""Foreign tables of postgres_fdw: captured in the registered database they point to, or polled on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.errors import PgtrickleError
from tests.support.database import TestDatabase, fresh_database
from tests.support.oracle import assert_equal_to_query

pytestmark = pytest.mark.pgversions

QUERY = "SELECT c.region, count(*) AS n, sum(o.total) AS total FROM orders o JOIN crm.customers c USING (customer) GROUP BY 1"


@dataclass
class Pair:
    """A shop here, and its customers in another database, seen here through postgres_fdw."""

    home: TestDatabase
    there: TestDatabase
    db: pgtrickle.Database
    shop: psycopg.Connection[Any]
    crm: psycopg.Connection[Any]

    def alter_server(self, options: str) -> None:
        with psycopg.connect(self.home.superuser_dsn, autocommit=True) as conn:
            conn.execute(f"ALTER SERVER crm OPTIONS ({options})".encode())


@pytest.fixture
def pair(server: EmbeddedServer) -> Iterator[Pair]:
    with ExitStack() as stack:
        home, there = (stack.enter_context(fresh_database(server, name)) for name in ("shop", "crm"))
        shop, crm = (stack.enter_context(psycopg.connect(one.direct_dsn, autocommit=True)) for one in (home, there))
        crm.execute("CREATE TABLE customers (customer int PRIMARY KEY, region text NOT NULL, name varchar(20))")
        crm.execute("INSERT INTO customers SELECT i, 'r' || i % 3, 'c' || i FROM generate_series(1, 20) AS i")
        shop.execute("CREATE TABLE orders (id int PRIMARY KEY, customer int, total int)")
        shop.execute("INSERT INTO orders SELECT i, i % 20 + 1, i FROM generate_series(1, 100) AS i")
        with psycopg.connect(home.superuser_dsn, autocommit=True) as conn:
            point_to(conn, there)
        db = stack.enter_context(pgtrickle.connect(home.dsn))
        db.install()
        yield Pair(home, there, db, shop, crm)


def point_to(conn: psycopg.Connection[Any], there: TestDatabase) -> None:
    if not conn.execute("SELECT FROM pg_available_extensions WHERE name = 'postgres_fdw'").fetchall():
        pytest.skip("this server comes without postgres_fdw (Debian's has it)")
    address = conninfo_to_dict(there.direct_dsn)
    conn.execute("CREATE EXTENSION postgres_fdw")
    conn.execute(
        sql.SQL(
            "CREATE SERVER crm FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host {}, port {}, dbname {});"
            "CREATE USER MAPPING FOR app SERVER crm OPTIONS (user 'app', password_required 'false');"
            "GRANT USAGE ON FOREIGN SERVER crm TO app; CREATE SCHEMA crm AUTHORIZATION app;"
            "SET ROLE app; IMPORT FOREIGN SCHEMA public LIMIT TO (customers) FROM SERVER crm INTO crm"
        ).format(*(sql.Literal(str(address[name])) for name in ("host", "port", "dbname")))
    )


def install_there(there: TestDatabase) -> None:
    with pgtrickle.connect(there.dsn) as db:
        db.install()


def change(pair: Pair, number: int) -> None:
    pair.crm.execute("UPDATE customers SET region = 'r' || %s WHERE customer %% 4 = %s", (number, number % 4))
    pair.crm.execute("INSERT INTO customers VALUES (%s, 'new', 'x')", (1000 + number,))
    pair.shop.execute("INSERT INTO orders VALUES (%s, %s, 5)", (1000 + number, 1000 + number))


def test_changes_are_captured_in_the_database_it_points_to(pair: Pair) -> None:
    install_there(pair.there)
    pair.db.add_database("customers_db", pair.there.dsn)
    created = pair.db.create_stream_table("by_region", QUERY)
    assert created.effective_mode == "DIFFERENTIAL"
    assert_equal_to_query(pair.shop, "by_region", QUERY)
    for number in range(4):
        change(pair, number)
        (result,) = pair.db.refresh("by_region")
        assert result.action == "DIFFERENTIAL"
        assert_equal_to_query(pair.shop, "by_region", QUERY)
    (result,) = pair.db.refresh("by_region")
    assert result.action == "NO_DATA"


def test_a_view_over_a_foreign_table_and_a_column_added_in_its_database(pair: Pair) -> None:
    install_there(pair.there)
    pair.db.add_database("customers_db", pair.there.dsn)
    pair.shop.execute(
        "CREATE VIEW named AS SELECT customer, upper(name) AS name FROM crm.customers WHERE region <> 'r0'"
    )
    query = "SELECT customer, name FROM named"
    pair.db.create_stream_table("names", query)
    pair.crm.execute("ALTER TABLE customers ADD COLUMN vip boolean")
    pair.crm.execute("INSERT INTO customers VALUES (50, 'r1', 'fifty', true)")
    pair.db.refresh("names")
    assert_equal_to_query(pair.shop, "names", query)
    pair.crm.execute("ALTER TABLE customers RENAME COLUMN name TO title")
    pair.crm.execute("UPDATE customers SET title = 'renamed' WHERE customer = 2")
    with pytest.raises(
        PgtrickleError, match=r"foreign table .*customers does not match .* column name is missing there"
    ):
        pair.db.refresh("names")
    pair.shop.execute("ALTER FOREIGN TABLE crm.customers RENAME COLUMN name TO title")
    pair.shop.execute("ALTER FOREIGN TABLE crm.customers ALTER COLUMN title OPTIONS (SET column_name 'title')")
    pair.db.refresh("names")
    assert_equal_to_query(pair.shop, "names", query)


def test_a_foreign_server_that_points_to_another_database(pair: Pair, server: EmbeddedServer) -> None:
    install_there(pair.there)
    pair.db.add_database("first", pair.there.dsn)
    pair.db.create_stream_table("by_region", QUERY)
    with fresh_database(server, "crm2") as other:
        with psycopg.connect(other.direct_dsn, autocommit=True) as conn:
            conn.execute("CREATE TABLE customers (customer int PRIMARY KEY, region text NOT NULL, name varchar(20))")
            conn.execute("INSERT INTO customers SELECT i, 'other', 'c' || i FROM generate_series(1, 10) AS i")
        install_there(other)
        pair.alter_server(f"SET dbname '{other.name}'")
        pair.shop.execute("INSERT INTO orders VALUES (500, 1, 1)")
        with pytest.raises(PgtrickleError, match="points elsewhere now, to no registered database"):
            pair.db.refresh("by_region")
        pair.db.add_database("second", other.dsn)
        (result,) = pair.db.refresh("by_region")
        assert result.action == "REINITIALIZE"
        assert_equal_to_query(pair.shop, "by_region", QUERY)
        with psycopg.connect(other.direct_dsn, autocommit=True) as conn:
            conn.execute("UPDATE customers SET region = 'changed' WHERE customer < 4")
        (result,) = pair.db.refresh("by_region")
        assert result.action == "DIFFERENTIAL"
        assert_equal_to_query(pair.shop, "by_region", QUERY)
        pair.db.remove_database("first")
        pair.db.drop_stream_table("by_region")
        pair.db.remove_database("second")
        assert pair.shop.execute("SELECT count(*) FROM crm.customers").fetchone() == (10,)  # it is not ours to drop


def test_unresolved_foreign_tables_are_polled_only_on_request(pair: Pair) -> None:
    with pytest.raises(
        PgtrickleError, match=r"changes of foreign table crm.customers cannot be captured.*server crm"
    ) as told:
        pair.db.create_stream_table("by_region", QUERY)
    assert "pgtrickle database add NAME DSN" in str(told.value)
    assert "refresh_mode FULL" in str(told.value)
    created = pair.db.create_stream_table("by_region", QUERY, refresh_mode="FULL")
    assert created.effective_mode == "FULL"
    before = dict(pair.shop.execute("SELECT region, xmin::text FROM by_region").fetchall())
    pair.crm.execute("UPDATE customers SET region = 'moved' WHERE customer = 1")
    pair.db.refresh("by_region")
    assert_equal_to_query(pair.shop, "by_region", QUERY)
    after = dict(pair.shop.execute("SELECT region, xmin::text FROM by_region").fetchall())
    assert {region for region in before if after.get(region) == before[region]} == {
        "r0",
        "r2",
    }  # only what differs is written
    with pytest.raises(PgtrickleError, match="cannot be captured"):
        pair.db.alter_stream_table("by_region", refresh_mode="AUTO")
    pair.db.conn.execute("SELECT pgtrickle.set('foreign_table_polling', 'on')")
    pair.db.alter_stream_table("by_region", refresh_mode="AUTO")
    change(pair, 1)
    pair.db.refresh("by_region")
    assert_equal_to_query(pair.shop, "by_region", QUERY)
    install_there(pair.there)
    pair.db.add_database("customers_db", pair.there.dsn)
    assert pair.db.resolve_foreign_table("crm.customers") == "customers_db"
    pair.db.refresh("by_region")
    change(pair, 2)
    (result,) = pair.db.refresh("by_region")
    assert result.action == "DIFFERENTIAL"
    assert_equal_to_query(pair.shop, "by_region", QUERY)


def test_a_foreign_table_that_does_not_match_is_refused(pair: Pair) -> None:
    install_there(pair.there)
    pair.db.add_database("customers_db", pair.there.dsn)
    pair.shop.execute("ALTER FOREIGN TABLE crm.customers ALTER COLUMN region TYPE varchar(5)")
    with pytest.raises(PgtrickleError, match=r"column region is character varying\(5\) here and text there"):
        pair.db.create_stream_table("by_region", QUERY)
    pair.shop.execute("ALTER FOREIGN TABLE crm.customers ALTER COLUMN region TYPE text")
    twice = "SELECT c.customer FROM crm.customers c JOIN customers_db.public.customers d USING (customer)"
    with pytest.raises(PgtrickleError, match=r"uses two names for table customers_db.public.customers"):
        pair.db.create_stream_table("both", twice)


def test_the_database_of_a_foreign_table_is_set_by_hand(pair: Pair) -> None:
    install_there(pair.there)
    pair.db.add_database("customers_db", pair.there.dsn)
    # Behind an address that only the server knows.
    pair.alter_server("SET host 'crm.internal.invalid'")
    assert pair.db.resolve_foreign_table("crm.customers") is None
    assert pair.db.resolve_foreign_table("crm.customers", "customers_db") == "customers_db"
    pair.alter_server("SET host '127.0.0.1'")
    assert pair.db.resolve_foreign_table("crm.customers") == "customers_db"
    with pytest.raises(PgtrickleError, match="no registered database nobody that this role may read"):
        pair.db.resolve_foreign_table("crm.customers", "nobody")
