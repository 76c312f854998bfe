"""Catalogs of every earlier version can be upgraded, and their stream tables continue to work.

The dumps were made by the last commit with each version. They contain two sources with changes that no refresh has
read, and three stream tables: an aggregate of a join, one without a key, and one that reads the first.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import psycopg
import pytest

import pgtrickle
from pgtrickle.catalog.install import installed_version, latest_version
from pgtrickle.embedded.server import EmbeddedServer
from tests.support.database import TestDatabase, fresh_database
from tests.support.oracle import assert_equal_to_query

pytestmark = pytest.mark.pgversions

DUMPS = sorted((Path(__file__).parents[1] / "fixtures" / "catalogs").glob("*.sql.gz"))
RIGHTS = (Path(__file__).parents[1] / "fixtures" / "rights.sql").read_bytes()
QUERIES = {
    "shop.totals": "SELECT c.region, count(*) AS n, sum(o.amount) AS total FROM shop.orders o"
    " JOIN shop.customers c ON c.id = o.customer GROUP BY c.region",
    "shop.notes": "SELECT note, customer FROM shop.orders WHERE amount > 50",
    "shop.regions": "SELECT region, total FROM shop.totals WHERE n > 0",
}


def restore(database: TestDatabase, dump: Path) -> None:
    lines = gzip.decompress(dump.read_bytes()).decode().splitlines(keepends=True)
    # Without commands of psql, and without a setting that servers before PostgreSQL 17 do not have.
    script = "".join(line for line in lines if not line.startswith(("\\", "SET transaction_timeout")))
    with psycopg.connect(database.superuser_dsn, autocommit=True) as conn:
        conn.execute(script.encode())


@pytest.mark.parametrize("dump", DUMPS, ids=lambda dump: dump.name.removesuffix(".sql.gz"))
def test_a_catalog_of_every_version_is_upgraded(database: TestDatabase, conn: psycopg.Connection, dump: Path) -> None:
    restore(database, dump)
    assert installed_version(conn) == int(dump.name.removesuffix(".sql.gz")) < latest_version()
    with pgtrickle.connect(database.dsn) as db:
        assert db.upgrade() == latest_version()
        db.refresh_all()
        conn.execute("UPDATE shop.orders SET amount = amount + 2, note = note || 'x' WHERE id % 3 = 0")
        assert {result.action for result in db.refresh_all()} == {"DIFFERENTIAL"}
        for name, query in QUERIES.items():
            assert_equal_to_query(conn, name, query)
        db.alter_stream_table("shop.notes", query="SELECT note, customer FROM shop.orders")
        for name in reversed(QUERIES):
            db.drop_stream_table(name)
    assert conn.execute("SELECT count(*) FROM pgtrickle.pgt_change_tracking").fetchone() == (0,)


@pytest.mark.parametrize("dump", [DUMPS[0], DUMPS[-1]], ids=lambda dump: dump.name.removesuffix(".sql.gz"))
def test_an_upgraded_catalog_has_the_rights_of_a_new_one(
    database: TestDatabase, conn: psycopg.Connection, server: EmbeddedServer, dump: Path
) -> None:
    """Only its owner has privileges on a change buffer, and stream tables continue without being created again."""
    restore(database, dump)
    with (
        fresh_database(server, "rights_of_a_new_one") as new,
        psycopg.connect(new.direct_dsn, autocommit=True) as there,
        pgtrickle.connect(new.dsn) as fresh,
        pgtrickle.connect(database.dsn) as db,
    ):
        fresh.install()
        db.upgrade()
        assert set(conn.execute(RIGHTS)) == set(there.execute(RIGHTS))
    shared = "SELECT c.oid::regclass::text FROM pg_class AS c CROSS JOIN LATERAL aclexplode(c.relacl) AS a"
    assert (
        conn.execute(
            f"{shared} WHERE c.relnamespace = 'pgtrickle_changes'::regnamespace AND a.grantee <> c.relowner".encode()
        ).fetchall()
        == []
    )


def test_there_is_a_dump_of_every_version() -> None:
    """`scripts/dump-catalog` writes them, in the last commit with each version."""
    came_with_a_later_one = {11, *range(18, 24)}
    found = {int(dump.name.removesuffix(".sql.gz")) for dump in DUMPS}
    # Version 1 could not refresh.
    assert found == set(range(2, latest_version())) - came_with_a_later_one
