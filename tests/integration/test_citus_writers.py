"""Refreshes concurrent with writers on all nodes of a Citus cluster: no partial transactions, losses or duplicates."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest

import pgtrickle
from pgtrickle.embedded.server import HOST, EmbeddedServer
from pgtrickle.errors import DatabaseFailedError, PgtrickleError, RefreshesFailedError
from pgtrickle.sites.remote import connections
from tests.support.citus import Cluster, cluster
from tests.support.citus_shop import needs_citus
from tests.support.oracle import assert_equal_to_query
from tests.support.service import until

pytestmark = needs_citus

ACCOUNTS, EACH = 200, 1000
QUERIES = {
    "total": "SELECT count(*) AS n, sum(bal) AS bal FROM acct",
    "rows": "SELECT id, bal FROM acct",
    "groups": "SELECT grp, sum(bal) AS bal, max(bal) AS most FROM acct GROUP BY grp",
}
PLACEMENTS = {"total": "reference", "rows": "distributed", "groups": "local"}
SUMS = "SELECT (SELECT bal FROM total), (SELECT sum(bal) FROM rows), (SELECT sum(bal) FROM groups)"
SHARDS = (
    "SELECT s.shardid, n.nodeport, n.nodeid, ((s.shardminvalue::int8 + s.shardmaxvalue::int8) / 2)::text"
    " FROM pg_dist_shard AS s JOIN pg_dist_placement AS p USING (shardid) JOIN pg_dist_node AS n USING (groupid)"
    " WHERE s.logicalrelid = 'acct'::regclass ORDER BY 1"
)


@dataclass
class Bank:
    """Accounts whose sum never changes, six writers that move money, and a reader that refreshes continuously."""

    cluster: Cluster
    db: pgtrickle.Database
    conn: psycopg.Connection[Any]
    admin: psycopg.Connection[Any]
    workers: int
    over: threading.Event = field(default_factory=threading.Event)
    written: list[int] = field(default_factory=lambda: [0] * 6)
    refreshes: int = 0
    told: list[PgtrickleError] = field(default_factory=list)  # refreshes that were refused
    broken: list[str] = field(default_factory=list)

    @contextmanager
    def busy(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._write, args=(number,)) for number in range(6)]
        threads.append(threading.Thread(target=self._refresh))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.over.set()
            for thread in threads:
                thread.join()

    def goes_on(self, times: int = 2) -> None:
        """Return after that many more successful refreshes."""
        wanted = self.refreshes + times
        until(lambda: self.refreshes >= wanted or bool(self.broken), "refreshes go on")

    def _refresh(self) -> None:
        with psycopg.connect(self.cluster.dsn(), autocommit=True) as conn:
            while not self.over.is_set():
                try:
                    self.db.refresh(list(QUERIES))
                except PgtrickleError as error:
                    self.told.append(error)
                    self.over.wait(0.2)
                    continue
                sums = conn.execute(SUMS.encode()).fetchone()
                if sums is None or {int(one) for one in sums} != {ACCOUNTS * EACH}:
                    self.broken.append(f"refresh {self.refreshes + 1} shows {sums}")
                    self.over.set()
                self.refreshes += 1

    def _write(self, number: int) -> None:
        """Move money between two accounts, mostly in two shards; the last two writers connect to workers, if there are
        any.
        """
        chance = random.Random(number)
        while not self.over.is_set():
            try:
                with psycopg.connect(self.cluster.dsn(min(self.workers, max(0, number - 3))), autocommit=True) as conn:
                    while not self.over.is_set():
                        self._transfer(conn, chance)
                        self.written[number] += 1
            except psycopg.Error:  # a shard moves, a worker is down: nothing of it was written
                self.over.wait(0.05)

    def _transfer(self, conn: psycopg.Connection[Any], chance: random.Random) -> None:
        one, other = sorted(chance.sample(range(1, ACCOUNTS + 1), 2))
        amount = chance.randrange(50)
        give = "UPDATE acct SET bal = bal - %s WHERE id = %s"
        with conn.transaction(force_rollback=chance.random() < 0.1):
            found = conn.execute(give, (amount, one)).rowcount
            if chance.random() < 0.1:
                self.over.wait(chance.random() / 3)  # stays open for a while
            found += conn.execute(give, (-amount, other)).rowcount
            if found != 2:  # a writer on a worker may look for a shard that has just moved
                raise psycopg.OperationalError("an account was not found")

    def failed_there(self) -> list[Exception]:
        """Errors of single stream tables that were caused by a node."""
        errors = [
            one
            for error in self.told
            for one in (error.failures.values() if isinstance(error, RefreshesFailedError) else [error])
        ]
        return [error for error in errors if isinstance(error, DatabaseFailedError)]

    def assert_exact(self) -> None:
        assert self.broken == []
        assert all(self.written), self.written
        until(self._is_quiet, "transactions that a crash left are recovered")
        self.db.refresh(list(QUERIES))
        for name, query in QUERIES.items():
            assert_equal_to_query(self.conn, name, query)
        assert self.conn.execute("SELECT sum(bal) FROM acct").fetchone() == (ACCOUNTS * EACH,)

    def _is_quiet(self) -> bool:
        for node in range(self.workers + 1):
            with psycopg.connect(self.cluster.superuser_dsn(node), autocommit=True) as conn:
                if conn.execute("SELECT count(*) FROM pg_prepared_xacts").fetchone() != (0,):
                    return False
        return True


@pytest.fixture
def bank(
    nodes: list[EmbeddedServer], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Bank]:
    """With shards on two workers, unless the test requests one node, or shards on the coordinator as well."""
    where = getattr(request, "param", "workers")
    workers = 0 if where == "one node" else 2
    monkeypatch.setattr(connections, "RETRY_SECONDS", 0.0)
    with (
        cluster(nodes, workers) as made,
        psycopg.connect(made.dsn(), autocommit=True) as conn,
        psycopg.connect(made.superuser_dsn(), autocommit=True) as admin,
        pgtrickle.connect(made.dsn()) as db,
    ):
        if where == "all nodes":
            coordinator = (HOST, nodes[0].port)
            admin.execute("SELECT citus_set_node_property(%s, %s, 'shouldhaveshards', true)", coordinator)
        conn.execute("CREATE TABLE acct (id int PRIMARY KEY, grp int, bal bigint)")
        conn.execute("SELECT create_distributed_table('acct', 'id')")
        conn.execute(f"INSERT INTO acct SELECT i, i % 10, {EACH} FROM generate_series(1, {ACCOUNTS}) AS i".encode())
        db.install()
        for name, query in QUERIES.items():
            db.create_stream_table(name, query, st_placement=PLACEMENTS[name])
        yield Bank(made, db, conn, admin, workers)


@pytest.mark.parametrize("bank", ["workers", "one node", "all nodes"], indirect=True)
@pytest.mark.parametrize("seconds", [6.0, pytest.param(60.0, marks=pytest.mark.long)])
def test_no_refresh_shows_a_partial_transaction(bank: Bank, seconds: float) -> None:
    with bank.busy():
        bank.over.wait(seconds)
        bank.goes_on(3)  # however busy the machine is
    print(f"{bank.refreshes} refreshes, {sum(bank.written)} transactions: {bank.written}, {len(bank.told)} put off")
    bank.assert_exact()


@pytest.mark.long
def test_no_refresh_shows_a_partial_transaction_while_shards_and_nodes_move(bank: Bank) -> None:
    third = (HOST, bank.cluster.servers[3].port)
    with bank.busy():
        bank.goes_on()
        for shard, port, _, _ in bank.admin.execute(SHARDS.encode()).fetchall()[:2]:
            (other,) = [node.port for node in bank.cluster.servers[1:3] if node.port != port]
            for way in ("block_writes", "force_logical"):
                move = "SELECT citus_move_shard_placement(%s, %s, %s, %s, %s, %s)"
                bank.admin.execute(move, (shard, HOST, port, HOST, other, way))
                bank.goes_on()
                port, other = other, port
        shard, _, node, middle = bank.admin.execute(SHARDS.encode()).fetchall()[0]
        split = "SELECT citus_split_shard_by_split_points(%s, ARRAY[%s], ARRAY[%s, %s]::int[], 'block_writes')"
        bank.admin.execute(split, (shard, middle, node, node))
        bank.goes_on()
        bank.cluster.add(3)
        bank.goes_on()
        bank.admin.execute("SELECT rebalance_table_shards('acct', shard_transfer_mode := 'block_writes')")
        bank.goes_on()
        placed = bank.admin.execute("SELECT count(*) > 0 FROM citus_shards WHERE nodeport = %s", third[1:]).fetchone()
        assert placed == (True,)
        bank.admin.execute("SELECT citus_drain_node(%s, %s, 'block_writes')", third)
        bank.goes_on()
        bank.admin.execute("SELECT citus_remove_node(%s, %s)", third)
        bank.goes_on()
    print(f"{bank.refreshes} refreshes, {sum(bank.written)} transactions: {bank.written}, {len(bank.told)} put off")
    bank.assert_exact()
    history = bank.conn.execute(
        "SELECT DISTINCT reason FROM pgtrickle.pgt_refresh_history WHERE action = 'REINITIALIZE' AND initiated_by <> 'INITIAL'"
    ).fetchall()
    assert {reason for (reason,) in history} <= {'"@node_3" left the cluster'}, history


def test_a_worker_is_killed_among_its_writers(bank: Bank) -> None:
    worker = bank.cluster.servers[2]
    with bank.busy():
        bank.goes_on()
        worker.kill()
        until(lambda: bool(bank.failed_there()), "a refresh says which node")
        assert "@node_2" in str(bank.failed_there()[0])
        problem = "SELECT problem FROM pgtrickle.citus_status WHERE node = '@node_2'"
        (told,) = bank.conn.execute(problem.encode()).fetchone() or (None,)
        assert told is not None
        assert bank.conn.execute("SELECT count(*) FROM total").fetchone() == (1,)  # readable all the time
        worker.start()
        bank.goes_on()
    print(f"{bank.refreshes} refreshes, {sum(bank.written)} transactions: {bank.written}, {len(bank.told)} put off")
    bank.assert_exact()
