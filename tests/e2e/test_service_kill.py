"""Services and servers that are killed, frozen or restarted: the service recovers, and stream tables stay exact."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.service.config import ServerConfig
from tests.support.database import TestDatabase, fresh_database
from tests.support.oracle import assert_equal_to_query
from tests.support.service import fresh, running_service, until
from tests.support.service_process import ServiceProcess
from tests.support.standby import await_replay, standby_of

Connection = psycopg.Connection[Any]

LEASE = 3.0
PATIENCE = 10.0  # what a busy machine may add to a lease
QUERIES = {
    "totals": "SELECT grp, count(*) AS n, sum(val) AS total FROM item GROUP BY grp",
    "named": "SELECT i.id, i.val, k.name FROM item i JOIN kind k ON k.id = i.grp",
    "large": "SELECT name, sum(val) AS total FROM named WHERE val > 10 GROUP BY name",
    "noted": "SELECT id, about FROM note",
}


def prepare(dsn: str) -> None:
    """Sources, and stream tables that wait for a service to populate them; one reads another."""
    with pgtrickle.connect(dsn) as db:
        db.install()
        db.conn.execute("CREATE TABLE item (id serial PRIMARY KEY, grp int, val int)")
        db.conn.execute("CREATE TABLE kind (id int PRIMARY KEY, name text)")
        db.conn.execute("CREATE TABLE note (id serial PRIMARY KEY, about int)")
        db.conn.execute("INSERT INTO kind SELECT i, 'kind ' || i FROM generate_series(0, 6) AS i")
        db.conn.execute("INSERT INTO item (grp, val) SELECT i % 5, i FROM generate_series(1, 60) AS i")
        for name, query in QUERIES.items():
            create = "SELECT pgtrickle.create_stream_table(%s, %s, '100ms')"
            db.conn.execute(create, (name, query))


def change(conn: Connection) -> None:
    """Make changes that affect every stream table."""
    conn.execute("INSERT INTO item (grp, val) VALUES (2, 50), (9, 5), (5, 1)")
    conn.execute("UPDATE item SET grp = (grp + 1) % 7, val = val + 1 WHERE id % 13 = 0")
    conn.execute("DELETE FROM item WHERE id = (SELECT min(id) FROM item)")
    conn.execute("UPDATE kind SET name = name || '!' WHERE id = (SELECT max(id) % 7 FROM item)")
    conn.execute("INSERT INTO note (about) SELECT max(id) FROM item")


def assert_exact(conn: Connection) -> None:
    """Wait until everything that is committed is included, and compare."""
    fresh(conn, *QUERIES)
    for name, query in QUERIES.items():
        assert_equal_to_query(conn, name, query)


def value(conn: Connection, query: str, *parameters: object) -> Any:
    row = conn.execute(query.encode(), parameters or None).fetchone()
    return row[0] if row is not None else None


def claims(conn: Connection, service: object) -> int:
    """The number of stream tables that a service has claimed."""
    count: int = value(conn, "SELECT count(*) FROM pgtrickle.pgt_stream_tables WHERE claimed_by = %s", service)
    return count


@pytest.fixture
def shop(database: TestDatabase, conn: Connection) -> Connection:
    prepare(database.dsn)
    return conn


@pytest.fixture
def filled(database: TestDatabase, shop: Connection) -> Connection:
    """Stream tables that were populated by a service that has ended."""
    with running_service(database.dsn, database.name):
        assert_exact(shop)
    return shop


def watching(database: TestDatabase) -> ServerConfig:
    return ServerConfig("main", database.dsn, (database.name,))


# -- a service that dies or freezes ------------------------------------------------------------------------------------


def _tokens(conn: Connection, service: object) -> set[tuple[int, int]]:
    """The claims of a service: each has its own token, even on the same stream table."""
    query = "SELECT pgt_id, fencing_token FROM pgtrickle.pgt_stream_tables WHERE claimed_by = %s"
    return {(row[0], row[1]) for row in conn.execute(query, (service,))}


@pytest.mark.parametrize("step", ["spark", "load"])
def test_another_service_takes_over_from_one_killed_in_a_refresh(
    step: str, database: TestDatabase, filled: Connection, tmp_path: Path
) -> None:
    change(filled)
    with ServiceProcess(tmp_path, watching(database), step=step, lease_seconds=LEASE) as victim:
        victim.await_step()
        service = victim.service_id(filled)
        held = _tokens(filled, service)
        with running_service(database.dsn, database.name, lease_seconds=LEASE):
            # Slow is not dead: it renews its lease, and nobody takes over what it holds.
            lease = "SELECT lease_expires FROM pgtrickle.pgt_services WHERE service_id = %s"
            since = value(filled, lease, service)
            until(lambda: (value(filled, lease, service) - since).total_seconds() > LEASE)
            assert held & _tokens(filled, service)
            change(filled)
            victim.kill()
            killed = time.monotonic()
            until(lambda: claims(filled, service) == 0)
            assert time.monotonic() - killed < LEASE + PATIENCE
            change(filled)
            assert_exact(filled)


def test_a_frozen_service_that_wakes_after_its_lease_writes_nothing(
    database: TestDatabase, filled: Connection, tmp_path: Path
) -> None:
    change(filled)
    with ServiceProcess(tmp_path, watching(database), step="spark", lease_seconds=LEASE) as zombie:
        zombie.await_step()
        service = zombie.service_id(filled)
        # Its other workers finish first: one that is frozen in a transaction keeps its locks until the server ends it.
        filled.execute("SELECT pgtrickle.pause()")
        unfinished = "SELECT count(*) FROM pgtrickle.pgt_jobs WHERE service_id = %s AND finished_at IS NULL"
        until(lambda: value(filled, unfinished, service) == 1)
        zombie.freeze()
        filled.execute("SELECT pgtrickle.resume()")
        with running_service(database.dsn, database.name, lease_seconds=LEASE):
            until(lambda: claims(filled, service) == 0)
            change(filled)
            assert_exact(filled)
            # From now on nothing is begun: what the zombie still does belongs to the refresh in which it was frozen.
            filled.execute("SELECT pgtrickle.pause()")
            completed = "SELECT count(*) FROM pgtrickle.pgt_refresh_history WHERE status = 'COMPLETED'"
            written = value(filled, completed)
            zombie.thaw()
            zombie.let_go()
            job = "SELECT error FROM pgtrickle.pgt_jobs WHERE service_id = %s AND status = 'FAILED'"
            until(lambda: value(filled, job, service) is not None, "the end of the zombie's refresh")
            assert "another process took over the refresh" in value(filled, job, service)
            assert value(filled, completed) == written
            for name, query in QUERIES.items():
                assert_equal_to_query(filled, name, query)
            assert value(filled, "SELECT max(consecutive_errors) FROM pgtrickle.pgt_stream_tables") == 0
        # Awake again it is as good as any.
        filled.execute("SELECT pgtrickle.resume()")
        change(filled)
        assert_exact(filled)
        assert zombie.total("pgtrickle_rows_total") > 0


# -- several services --------------------------------------------------------------------------------------------------


@dataclass
class Writer:
    """Writes continuously for the duration of a block."""

    dsn: str
    rounds: int = 0
    _over: threading.Event = field(default_factory=threading.Event)
    _errors: list[BaseException] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._write)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        assert self._errors == []

    def _write(self) -> None:
        try:
            with psycopg.connect(self.dsn, autocommit=True) as conn:
                while not self._over.wait(0.05):
                    change(conn)
                    self.rounds += 1
        except BaseException as error:
            self._errors.append(error)


def share_the_work(database: TestDatabase, conn: Connection, directory: Path, seconds: float) -> None:
    """Two services under writes, one of them killed and replaced in the middle."""
    server = watching(database)
    with ServiceProcess(directory, server) as first, ServiceProcess(directory, server) as second:
        doomed, staying = first.service_id(conn), second.service_id(conn)
        assert doomed != staying
        with Writer(database.dsn) as writer:
            begin = time.monotonic()
            until(lambda: first.total("pgtrickle_rows_total") > 0 and second.total("pgtrickle_rows_total") > 0)
            until(lambda: time.monotonic() - begin > seconds / 2)
            until(lambda: claims(conn, doomed) > 0)
            first.kill()
            with ServiceProcess(directory, server) as third:
                until(lambda: third.total("pgtrickle_rows_total") > 0, "a refresh by the replacement")
                until(lambda: time.monotonic() - begin > seconds)
                before = second.total("pgtrickle_rows_total")
                until(lambda: second.total("pgtrickle_rows_total") > before, "a refresh by the one that stayed")
                writer.__exit__()
                assert_exact(conn)
                served = {row[0] for row in conn.execute("SELECT DISTINCT service_id FROM pgtrickle.pgt_jobs")}
                assert served == {doomed, staying, third.service_id(conn)}
    assert writer.rounds > 10 * seconds / 20
    # Each change was applied once: nothing that only grew was inserted twice, and no frontier was reached twice.
    twice = (
        "SELECT pgt_name, frontier ->> 'snapshot', count(*) FROM pgtrickle.pgt_refresh_history"
        " WHERE status = 'COMPLETED' AND action = 'DIFFERENTIAL' GROUP BY 1, 2 HAVING count(*) > 1"
    )
    assert conn.execute(twice).fetchall() == []
    history = (
        "SELECT sum(rows_inserted), sum(rows_deleted), string_agg(DISTINCT action, ' ' ORDER BY action)"
        " FROM pgtrickle.pgt_refresh_history WHERE pgt_name = 'noted' AND status = 'COMPLETED'"
    )
    notes = value(conn, "SELECT count(*) FROM note")
    assert conn.execute(history).fetchone() == (notes, 0, "DIFFERENTIAL REINITIALIZE")


def test_two_services_share_the_work_and_one_is_replaced(
    database: TestDatabase, shop: Connection, tmp_path: Path
) -> None:
    share_the_work(database, shop, tmp_path, 20.0)


@pytest.mark.long
def test_two_services_share_the_work_for_two_minutes(database: TestDatabase, shop: Connection, tmp_path: Path) -> None:
    share_the_work(database, shop, tmp_path, 120.0)


# -- a server that goes away, connections that break, a scheduler that crashes -----------------------------------------


@dataclass(frozen=True)
class Served:
    """A database that a service serves through several tests."""

    database: TestDatabase
    process: ServiceProcess

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        with psycopg.connect(self.database.direct_dsn, autocommit=True) as conn:
            yield conn


@pytest.fixture(scope="module")
def served(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with fresh_database(server, "served") as database:
        prepare(database.dsn)
        with ServiceProcess(tmp_path_factory.mktemp("served"), watching(database)) as process:
            yield Served(database, process)


@contextmanager
def pending(dsn: str) -> Iterator[None]:
    """Changes that are still pending at the end of the block, because nobody could claim the stream tables."""
    with closing(psycopg.connect(dsn)) as holder, psycopg.connect(dsn, autocommit=True) as conn:
        holder.execute("SELECT FROM pgtrickle.pgt_stream_tables FOR NO KEY UPDATE")
        change(conn)
        yield


@pytest.mark.parametrize("crash", [False, True], ids=["restarted", "crashed"])
def test_the_server_restarts(crash: bool, served: Served, server: EmbeddedServer) -> None:
    with served.connect() as conn:
        assert_exact(conn)
    with pending(served.database.dsn):
        if crash:
            server.kill()
        else:
            server.stop()
        until(lambda: served.process.total("pgtrickle_server_up") == 0)
        server.start()
    with served.connect() as conn:
        change(conn)
        assert_exact(conn)
        assert value(conn, "SELECT count(*) FROM pgtrickle.pgt_stream_tables WHERE status <> 'ACTIVE'") == 0
    assert any("the server cannot be reached" in message for message in served.process.messages())


def test_all_connections_of_the_service_are_terminated(served: Served) -> None:
    with served.connect() as conn:
        assert_exact(conn)
        service = served.process.service_id(conn)
        crashes = served.process.total("pgtrickle_crashes_total")
        ours = "FROM pg_stat_activity WHERE application_name LIKE 'pgtrickle %' AND datname = current_database()"
        busy = f"SELECT count(*) {ours} AND application_name LIKE '% worker %' AND state <> 'idle'"
        with Writer(served.database.dsn):
            for _ in range(3):
                until(lambda: value(conn, busy) > 0, "a refresh")
                conn.execute(f"SELECT pg_terminate_backend(pid) {ours}".encode())
        assert_exact(conn)
        assert served.process.total("pgtrickle_crashes_total") > crashes
        until(
            lambda: (
                value(conn, "SELECT count(*) FROM pgtrickle.pgt_jobs WHERE status IN ('QUEUED', 'RUNNING')") == 0
                and claims(conn, service) == 0
            ),
            "the end of what was running when the connections were lost",
        )
        kinds = conn.execute(f"SELECT split_part(application_name, ' ', 2), count(*) {ours} GROUP BY 1".encode())
        counts: dict[str, int] = dict(kinds.fetchall())
        assert (counts["launcher"], counts["scheduler"]) == (1, 1)
        assert counts.get("worker", 0) <= 4


DENIED = "permission denied for table pgt_requests"


def test_a_crashed_scheduler_is_restarted_and_reported(served: Served) -> None:
    name = served.database.name
    with served.connect() as conn:
        assert_exact(conn)
        before = served.process.total("pgtrickle_crashes_total")
        conn.execute("REVOKE ALL ON pgtrickle.pgt_requests FROM app")  # of its own right, by mistake
        try:
            change(conn)
            # It is tried again and crashes again.
            until(lambda: served.process.total("pgtrickle_crashes_total") >= before + 2)
            labels = {"server": "main", "database": name, "reason": f"its scheduler ended: {DENIED}"}
            until(lambda: (labels, 0) in served.process.samples("pgtrickle_database_served"))
            crash = next(entry for entry in served.process.log() if entry["message"] == "a scheduler crashed")
            assert (crash["database"], crash["level"]) == (name, "error")
            assert DENIED in crash["traceback"]
            change(conn)
        finally:
            conn.execute("GRANT ALL ON pgtrickle.pgt_requests TO app")
        assert_exact(conn)
        crashes = [entry["ts"] for entry in served.process.log() if entry["message"] == "a scheduler crashed"]
        assert len(crashes) == 1, "one cause is told once"


# -- a replica -----------------------------------------------------------------------------------------------------------


def test_a_promoted_replica_is_taken_over(
    database: TestDatabase, server: EmbeddedServer, shop: Connection, tmp_path: Path
) -> None:
    names = (database.name,)
    with standby_of(server) as standby:
        replica = ServerConfig("replica", standby.dsn(database.name, "app"), names)
        with ServiceProcess(tmp_path, ServerConfig("primary", database.dsn, names), replica) as process:
            assert_exact(shop)
            with psycopg.connect(replica.dsn, autocommit=True) as there:
                change(shop)
                assert_exact(shop)
                await_replay(shop, there)
                for name, query in QUERIES.items():
                    assert_equal_to_query(there, name, query)
                _assert_sleeps(process, there)
            with pending(database.dsn):
                server.stop()
                _promote(standby)
            with psycopg.connect(replica.dsn, autocommit=True) as there:
                change(there)
                assert_exact(there)
                assert process.samples("pgtrickle_server_up") == [
                    ({"server": "primary"}, 0),
                    ({"server": "replica"}, 1),
                ]
                assert "the server was promoted" in process.messages()
                actions = "SELECT DISTINCT action FROM pgtrickle.pgt_refresh_history WHERE pgt_name = 'totals'"
                assert {row[0] for row in there.execute(actions)} == {"DIFFERENTIAL", "REINITIALIZE"}


def _assert_sleeps(process: ServiceProcess, standby: Connection) -> None:
    """The service does nothing there, and says so; requests for refreshes are refused; status and staleness are shown."""
    assert "the server is a replica: waiting for its promotion" in process.messages()
    assert [labels["server"] for labels, _ in process.samples("pgtrickle_database_served")] == ["primary"]
    kinds = standby.execute("SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'pgtrickle %'")
    assert kinds.fetchall() == [("pgtrickle launcher",)]
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction, match="a standby cannot refresh stream tables"):
        standby.execute("SELECT pgtrickle.refresh_stream_table('totals')")
    assert value(standby, "SELECT count(*) FROM pgtrickle.pgt_status() WHERE status = 'ACTIVE'") == len(QUERIES)
    assert 0 <= value(standby, "SELECT pgtrickle.get_staleness('totals')") < 60


def _promote(standby: EmbeddedServer) -> None:
    with psycopg.connect(standby.dsn(), autocommit=True) as superuser:
        assert value(superuser, "SELECT pg_promote(true, 60)") is True
