"""The refresh broker: one scan for all consumers, and nothing is lost without a broker."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pyarrow as pa
import pytest

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.sites.shared_cut import SharedChanges
from tests.support.hub import QUERIES, Hub, hub_with
from tests.support.service import running_service, until

STATUS = "SELECT database, source, pending_rows, upper_bound, last_tick, broker_alive FROM pgtrickle.broker_status()"


@pytest.fixture
def shop(server: EmbeddedServer) -> Iterator[Hub]:
    with hub_with(server, 2) as made:
        yield made


def is_brokered(shop: Hub) -> bool:
    """Whether the broker has scanned for all home databases."""
    rows = shop.conn.execute(STATUS).fetchall()
    return len(rows) == len(shop.homes) and all(row[4] is not None for row in rows)


def test_one_scan_per_tick_for_all_databases(shop: Hub) -> None:
    with running_service(shop.homes[0].superuser_dsn, *(home.name for home in shop.homes)):
        for number in range(1, 4):  # until everything is known to the broker
            shop.change(number)
            shop.await_exact()
        until(lambda: is_brokered(shop))
        ticks = shop.conn.execute("SELECT tick FROM pgtrickle.pgt_broker").fetchone()
        before = shop.scans()
        for number in range(4, 10):
            shop.change(number)
            shop.await_exact()
        now = shop.conn.execute("SELECT tick FROM pgtrickle.pgt_broker").fetchone()
        rows = shop.conn.execute(STATUS).fetchall()
    assert ticks is not None
    assert now is not None
    scanned, ticked = shop.scans() - before, now[0] - ticks[0]
    print(f"{scanned} scans in {ticked} ticks for {len(shop.homes)} databases of {len(QUERIES)} stream tables")
    assert ticked >= 6
    # Statistics of the last scans may be missing, those of the warm-up come late.
    assert scanned <= ticked + 2
    started_over = (
        "SELECT count(*) FROM pgtrickle.pgt_refresh_history WHERE action = 'REINITIALIZE' AND initiated_by <> 'INITIAL'"
    )
    assert [conn.execute(started_over).fetchone() for conn in shop.home_conns] == [(0,), (0,)]
    assert {(row[0], row[1]) for row in rows} == {(home.name, "public.items") for home in shop.homes}
    assert all(row[2] is not None and row[3] > 0 and row[4] == now[0] and row[5] for row in rows)


def test_without_the_setting_there_is_no_broker(shop: Hub) -> None:
    for conn in shop.home_conns:
        conn.execute("SELECT pgtrickle.set('pg_trickle.enable_refresh_broker', 'off')")
    with running_service(shop.homes[0].superuser_dsn, *(home.name for home in shop.homes)):
        shop.change(1)
        shop.await_exact()
    assert shop.conn.execute("SELECT count(*) FROM pgtrickle.pgt_broker").fetchone() == (0,)


def test_a_full_registry_is_logged_and_refreshes_continue(shop: Hub, caplog: pytest.LogCaptureFixture) -> None:
    shop.conn.execute(
        "INSERT INTO pgtrickle.pgt_broker_entries (home, database, source_stable_name, settings)"
        " SELECT 'far/' || i, 'far', 'nothing', '{}' FROM generate_series(1, 4096) AS i"
    )
    with running_service(shop.homes[0].superuser_dsn, *(home.name for home in shop.homes)):
        for number in (1, 2):
            shop.change(number)
            shop.await_exact()
        assert any("the broker's registry is full" in record.getMessage() for record in caplog.records)
        assert shop.conn.execute("SELECT count(*) FROM pgtrickle.pgt_broker_entries").fetchone() == (4096,)


def test_a_failing_expression_affects_only_its_subscriber(shop: Hub) -> None:
    with running_service(shop.homes[0].superuser_dsn, *(home.name for home in shop.homes)) as service:
        shop.change(1)
        shop.await_exact()
        shop.conn.execute(
            'UPDATE pgtrickle.pgt_broker_entries SET expressions = expressions || \'{"(1 / (c2 - c2))::text": ["text", 0, 0]}\''
        )
        for number in (2, 3):
            shop.change(number)
            shop.await_exact()
        assert service.broker._publishers


def test_a_database_that_drops_its_stream_tables_leaves_the_registry(shop: Hub) -> None:
    with running_service(shop.homes[0].superuser_dsn, *(home.name for home in shop.homes)):
        for number in (1, 2, 3):
            shop.change(number)
            shop.await_exact()
        until(lambda: is_brokered(shop))
    with pgtrickle.connect(shop.homes[0].dsn) as db:
        for name in QUERIES:
            db.drop_stream_table(name)
    rows = shop.conn.execute("SELECT database FROM pgtrickle.broker_status()").fetchall()
    assert rows == [(shop.homes[1].name,)]


def test_only_the_service_role_sees_the_token(shop: Hub) -> None:
    stranger = shop.hub.create_role("stranger")
    with psycopg.connect(shop.hub.direct_dsn_as(stranger), autocommit=True) as conn:
        for table in ("pgt_broker", "pgt_broker_entries"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(f"SELECT * FROM pgtrickle.{table}".encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("SELECT pgtrickle._register_interest('a/1', 'a', 'x', '{}', '[]', '{}')")
        assert conn.execute("SELECT * FROM pgtrickle.broker_status()").fetchall() == []


def test_an_offer_serves_consumers_that_are_not_behind_its_base() -> None:
    rows = pa.table({"xid": [80, 95, 100, 105], "w": [1, 1, -1, 1]})
    brokered = SharedChanges(Snapshot(80, 90, (80,)), {}, rows)
    assert brokered.serves(Snapshot(90, 100, ()))
    assert brokered.changed(Snapshot(90, 100, ())) == 2
    assert brokered.changed(Snapshot(80, 106, (80,))) == 1
    assert brokered.changed(Snapshot(80, 90, (80,))) == 4
    assert not brokered.serves(Snapshot(70, 89, ()))
    assert not brokered.serves(Snapshot(85, 100, (85,)))
