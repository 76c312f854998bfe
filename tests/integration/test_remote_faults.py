"""Remote databases that are lost, restored, moved or registered wrongly: clear errors, exact results, no secrets."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.errors import ConnectionFailedError, DatabaseFailedError
from pgtrickle.sites.remote import connections
from tests.support.remote_shop import QUERIES, RemoteShop
from tests.support.service import running_service, until

Connection = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def _tries_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "RETRY_SECONDS", 0.0)


@pytest.fixture
def db(remote_shop: RemoteShop) -> Iterator[pgtrickle.Database]:
    with pgtrickle.connect(remote_shop.home.dsn) as db:
        yield db


def _exact(remote_shop: RemoteShop, *names: str) -> None:
    remote_shop.load_oracle()
    remote_shop.assert_exact(*names)


def test_stream_tables_stay_readable_while_a_server_is_lost(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    home, stock = remote_shop.conns["home"], remote_shop.databases["stock"].server
    db.create_stream_table("lines", QUERIES["lines"])
    db.create_stream_table("named", QUERIES["named"])
    before = home.execute("SELECT count(*) FROM lines").fetchone()
    home.execute("UPDATE orders SET n = n + 1")
    stock.kill()
    with pytest.raises(DatabaseFailedError, match="database stock"):
        db.refresh(["lines", "named"])
    assert home.execute("SELECT count(*) FROM lines").fetchone() == before
    status = {one.name: one for one in db.status()}
    assert "database stock" in (status["public.lines"].last_error or "")
    assert status["public.lines"].status == "ERROR"
    assert status["public.named"].last_error is None  # who does not read it is refreshed all the same
    stock.start()
    remote_shop.reconnect()
    assert {result.action for result in db.refresh(["lines", "named"])} == {"DIFFERENTIAL", "NO_DATA"}
    _exact(remote_shop, "lines", "named")


def test_a_crash_between_cut_and_apply_loses_and_invents_nothing(remote_shop: RemoteShop) -> None:
    stock = remote_shop.databases["stock"].server
    crash: list[str] = []

    def on_step(step: str) -> None:
        if crash == [step]:
            crash.clear()
            stock.kill()
            stock.start()

    with pgtrickle.connect(remote_shop.home.dsn, on_step=on_step) as db:
        db.create_stream_table("lines", QUERIES["lines"])
        for step in ("spark", "load", "committed"):
            crash[:] = [step]
            # Seen by the cut, and gone with the server unless something makes sure that it is on disk.
            remote_shop.conns["stock"].execute("SET synchronous_commit = off")
            remote_shop.conns["stock"].execute("UPDATE items SET price = price + 1000 WHERE id < 9")
            refused = step == "spark"
            if refused:
                with pytest.raises(DatabaseFailedError, match="database stock"):
                    db.refresh("lines")
            else:
                db.refresh("lines")
            assert crash == []
            remote_shop.reconnect()
            lost = remote_shop.conns["stock"].execute("SELECT count(*) FROM items WHERE price > 1000").fetchone() == (
                0,
            )
            assert lost == refused  # what was not proved is gone, and what was applied is there
            # Other transactions under the numbers of those that went.
            remote_shop.conns["stock"].execute("UPDATE items SET price = price + 1 WHERE id > 5")
            (result,) = db.refresh("lines")
            assert result.action == "DIFFERENTIAL"
            _exact(remote_shop, "lines")


def test_a_server_restored_to_before_the_last_refresh(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    stock = remote_shop.databases["stock"].server
    db.create_stream_table("lines", QUERIES["lines"])
    db.create_stream_table("named", QUERIES["named"])
    with _backup(stock) as restore:
        remote_shop.reconnect()
        remote_shop.conns["stock"].execute("UPDATE items SET price = price + 500 WHERE id < 9")
        db.refresh("lines")
        _exact(remote_shop, "lines")
        remote_shop.close()
        restore()
    remote_shop.reconnect()
    # As many transactions as there were, and others.
    for price in range(5):
        remote_shop.conns["stock"].execute("UPDATE items SET price = %s WHERE id = 3", (price,))
    lines, named = db.refresh(["lines", "named"])
    assert (lines.action, named.action) == ("REINITIALIZE", "NO_DATA")
    assert lines.reason is not None
    assert "database stock was restored" in lines.reason
    _exact(remote_shop, "lines", "named")
    remote_shop.conns["stock"].execute("DELETE FROM items WHERE id = 3")
    assert [result.action for result in db.refresh("lines")] == ["DIFFERENTIAL"]
    _exact(remote_shop, "lines")


def test_a_recently_closed_connection_is_not_used(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    connections, dsn = db.engine.connections, remote_shop.databases["stock"].direct_dsn
    with connections.open("stock", dsn) as conn:
        pid = conn.info.backend_pid
    with psycopg.connect(remote_shop.databases["stock"].server.dsn(), autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))
    with connections.open("stock", dsn) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)


@contextmanager
def _backup(server: EmbeddedServer) -> Iterator[Any]:
    """A copy of the stopped server, and a function that restores it."""
    copy = server.data_dir.with_name("copy")
    server.stop("immediate")
    shutil.copytree(server.data_dir, copy, symlinks=True)
    server.start()

    def restore() -> None:
        server.stop("immediate")
        _replace(copy, server.data_dir)
        server.start()

    try:
        yield restore
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _replace(copy: Path, target: Path) -> None:
    owner = target.stat()
    shutil.rmtree(target)
    shutil.copytree(copy, target, symlinks=True)
    target.chmod(0o700)
    for path in [target, *target.rglob("*")]:
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def test_a_renamed_database_is_reported_and_found_again(remote_shop: RemoteShop, db: pgtrickle.Database) -> None:
    crm = remote_shop.databases["crm"]
    db.create_stream_table("named", QUERIES["named"])
    remote_shop.conns["crm"].close()
    renamed = f"{crm.name}_renamed"
    with psycopg.connect(crm.server.dsn(), autocommit=True) as conn:
        rename = sql.SQL("ALTER DATABASE {} RENAME TO {}")
        db.engine.connections.close()
        conn.execute(rename.format(sql.Identifier(crm.name), sql.Identifier(renamed)))
        with pytest.raises(DatabaseFailedError, match=rf'database crm cannot be reached.*"{crm.name}" does not exist'):
            db.refresh("named")
        with psycopg.connect(crm.server.dsn(renamed, "app"), autocommit=True) as moved:
            moved.execute("UPDATE customers SET region = 'moved' WHERE id = 2")
        db.add_database("crm", crm.server.dsn(renamed, "app"))
        assert [result.action for result in db.refresh("named")] == ["DIFFERENTIAL"]
        db.engine.connections.close()
        conn.execute(rename.format(sql.Identifier(renamed), sql.Identifier(crm.name)))
    db.add_database("crm", crm.dsn)
    remote_shop.reconnect()
    db.refresh("named")
    _exact(remote_shop, "named")


def test_another_database_in_its_place_causes_re_initialization(
    remote_shop: RemoteShop, db: pgtrickle.Database
) -> None:
    crm, stock = remote_shop.conns["crm"], remote_shop.conns["stock"]
    db.create_stream_table("named", QUERIES["named"])
    # A dump restored on the other server: the same table, in another place.
    rows = crm.execute("SELECT id, region, rank, vip FROM customers WHERE id > 3").fetchall()
    stock.execute("CREATE TABLE customers (id int PRIMARY KEY, region text, rank smallint, vip boolean)")
    with stock.cursor() as cursor:
        cursor.executemany("INSERT INTO customers VALUES (%s, %s, %s, %s)", rows)
    db.remove_database("stock")
    db.add_database("crm", remote_shop.databases["stock"].dsn)
    assert [result.action for result in db.refresh("named")] == ["REINITIALIZE"]
    counted = "SELECT count(region) FROM named"
    there = remote_shop.conns["home"].execute(counted).fetchone()
    stock.execute("DELETE FROM customers WHERE id > 5")
    assert [result.action for result in db.refresh("named")] == ["DIFFERENTIAL"]
    assert remote_shop.conns["home"].execute(counted).fetchone() != there
    # Made anew under its name.
    stock.execute("DROP TABLE customers")
    with pytest.raises(psycopg.errors.UndefinedTable, match=r"no longer has a table public\.customers"):
        db.refresh("named")
    stock.execute("CREATE TABLE customers (vip boolean, id int PRIMARY KEY, region text, rank smallint)")
    stock.execute("INSERT INTO customers SELECT NULL, i, 'anew', 1 FROM generate_series(1, 40) AS i")
    assert [result.action for result in db.refresh("named")] == ["REINITIALIZE"]
    found = remote_shop.conns["home"].execute("SELECT DISTINCT region FROM named WHERE region IS NOT NULL").fetchall()
    assert found == [("anew",)]


def test_no_secret_is_stored_or_shown(
    remote_shop: RemoteShop, db: pgtrickle.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = remote_shop.databases["stock"]
    secret = "s3cr3t-Pässword'x"
    role = stock.create_role("guarded")
    with psycopg.connect(stock.superuser_dsn, autocommit=True) as conn:
        conn.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), sql.Literal(secret)))
        conn.execute(sql.SQL("GRANT app TO {}").format(sql.Identifier(role)))
        conn.execute(sql.SQL("ALTER ROLE {} SET role = 'app'").format(sql.Identifier(role)))
        hba = stock.server.data_dir / "pg_hba.conf"
        hba.write_text(f"host all {role} 127.0.0.1/32 scram-sha-256\n" + hba.read_text())
        conn.execute("SELECT pg_reload_conf()")
    plain = f"host=127.0.0.1 port={stock.server.port} dbname={stock.name} user={role}"
    told: list[str] = []
    with pytest.raises(ConnectionFailedError, match="has a password in it") as stored:
        db.add_database("stock2", psycopg.conninfo.make_conninfo(plain, password=secret))
    told.append(str(stored.value))
    guarded = plain + " password=${STOCK_PASSWORD}"
    with pytest.raises(DatabaseFailedError, match="variable STOCK_PASSWORD, which is not set"):
        db.add_database("stock", guarded)
    monkeypatch.setenv("STOCK_PASSWORD", "wrong " + secret)
    until(lambda: _refused(plain))
    with pytest.raises(DatabaseFailedError, match="password authentication failed") as wrong:
        db.add_database("stock", guarded)
    told.append(str(wrong.value))
    monkeypatch.setenv("STOCK_PASSWORD", secret)
    db.add_database("stock", guarded)
    db.create_stream_table("lines", QUERIES["lines"])
    told += [db.explain("lines"), str(db.history("lines")), *db.engine.statements, str(db.databases())]
    monkeypatch.setenv("STOCK_PASSWORD", "wrong " + secret)
    db.engine.connections.close()
    with pytest.raises(DatabaseFailedError, match="password authentication failed") as later:
        db.refresh("lines")
    told.append(str(later.value))
    home = remote_shop.conns["home"]
    for (table,) in home.execute(
        "SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace = 'pgtrickle'::regnamespace AND c.relkind = 'r'"
    ).fetchall():
        told.append(str(home.execute(sql.SQL("SELECT t::text FROM {} t").format(sql.SQL(table))).fetchall()))
    for server in {database.server.log_path for database in remote_shop.databases.values()}:
        told.append(server.read_text(errors="replace"))
    assert not [text for text in told if "s3cr3t" in text]
    db.drop_stream_table("lines")
    monkeypatch.setenv("STOCK_PASSWORD", secret)
    db.add_database("stock", stock.dsn)


def _refused(dsn: str) -> bool:
    """Whether the server already asks for a password."""
    try:
        psycopg.connect(dsn).close()
    except psycopg.OperationalError:
        return True
    return False


def test_a_service_continues_while_a_database_is_lost_and_after_it_returns(
    remote_shop: RemoteShop, db: pgtrickle.Database
) -> None:
    home, stock = remote_shop.conns["home"], remote_shop.databases["stock"].server
    db.create_stream_table("lines", QUERIES["lines"], schedule="1s")
    db.create_stream_table("own", "SELECT n, count(*) AS c FROM orders GROUP BY n", schedule="1s")
    with running_service(remote_shop.home.dsn, remote_shop.home.name):
        stock.kill()
        home.execute("UPDATE orders SET n = 77 WHERE id = 1")
        until(lambda: home.execute("SELECT c FROM own WHERE n = 77").fetchone() == (1,))
        error = "SELECT last_error LIKE '%database stock%' FROM pgtrickle.pgt_stream_tables WHERE pgt_name = 'lines'"
        until(lambda: home.execute(error).fetchone() == (True,))
        until(
            lambda: (
                home.execute("SELECT problem FROM pgtrickle.pgt_databases WHERE name = 'stock'").fetchone() != (None,)
            )
        )
        assert db.check_database("stock") is not None
        stock.start()
        remote_shop.reconnect()
        remote_shop.conns["stock"].execute("UPDATE items SET price = 5555 WHERE id = 1")
        home = remote_shop.conns["home"]
        until(lambda: home.execute("SELECT count(*) > 0 FROM lines WHERE price = 5555").fetchone() == (True,))
        until(
            lambda: (
                home.execute("SELECT problem FROM pgtrickle.pgt_databases WHERE name = 'stock'").fetchone() == (None,)
            )
        )
    db.refresh("lines")
    _exact(remote_shop, "lines")
    assert db.check_database("stock") is None
