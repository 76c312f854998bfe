"""The broker between services in separate processes: both use it, and both continue without it when it is killed."""

from __future__ import annotations

import threading
from pathlib import Path
from uuid import UUID

import psycopg

from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.service.config import ServerConfig
from tests.support.hub import Hub, hub_with
from tests.support.service import until
from tests.support.service_process import ServiceProcess


def elected(shop: Hub) -> UUID | None:
    row = shop.conn.execute("SELECT service_id FROM pgtrickle.pgt_broker WHERE lease_expires > now()").fetchone()
    return row[0] if row is not None else None


def offers_used(service: ServiceProcess) -> list[str]:
    return [line for line in service.messages() if "no offer from the broker" in line]


def test_two_services_share_one_scan_and_survive_the_broker(server: EmbeddedServer, tmp_path: Path) -> None:
    with hub_with(server, 2) as shop:
        configs = [ServerConfig(f"s{i}", home.superuser_dsn, (home.name,)) for i, home in enumerate(shop.homes)]
        with ServiceProcess(tmp_path, configs[0]) as one, ServiceProcess(tmp_path, configs[1]) as two:
            ids = [one.service_id(shop.home_conns[0]), two.service_id(shop.home_conns[1])]
            until(lambda: elected(shop) in ids, "the election")
            for number in range(1, 5):
                shop.change(number)
                shop.await_exact()
            before, tick = shop.scans(), ticks(shop)
            for number in range(5, 11):
                shop.change(number)
                shop.await_exact()
            scanned, ticked = shop.scans() - before, ticks(shop) - tick
            print(f"{scanned} scans in {ticked} ticks")
            assert ticked >= 6
            assert scanned <= ticked + 2  # those of the warm-up are counted late
            assert not offers_used(one)
            assert not offers_used(two)

            # The broker dies while it is at work. The other one goes on at once, and is the broker when the lease is over.
            dying, other = (one, two) if elected(shop) == ids[0] else (two, one)
            left = 1 - ids.index(elected(shop))  # type: ignore[arg-type]
            stop = threading.Event()
            writer = threading.Thread(target=write, args=(shop, stop))
            writer.start()
            dying.kill()
            survivor = Hub(shop.hub, [shop.homes[left]], shop.conn, [shop.home_conns[left]])
            until(lambda: offers_used(other), "the other one to notice")
            until(lambda: elected(shop) == ids[left], "another election")
            stop.set()
            writer.join()
            survivor.await_exact()
            with ServiceProcess(tmp_path, configs[1 - left]):
                shop.change(1000)
                shop.await_exact()


def ticks(shop: Hub) -> int:
    row = shop.conn.execute("SELECT tick FROM pgtrickle.pgt_broker").fetchone()
    assert row is not None
    return int(row[0])


def write(shop: Hub, stop: threading.Event) -> None:
    with psycopg.connect(shop.hub.direct_dsn, autocommit=True) as conn:
        while not stop.wait(0.2):
            conn.execute("UPDATE items SET price = price + 1 WHERE id % 3 = 0")
