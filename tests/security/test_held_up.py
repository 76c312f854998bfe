"""Locks and notifications of other roles delay only what they concern."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import pgtrickle
from pgtrickle.service import scheduler as scheduler_module
from pgtrickle.service.connection_budget import Budget
from pgtrickle.service.pool import Pool
from pgtrickle.service.scheduler import Scheduler
from pgtrickle.service.settings import read_settings
from pgtrickle.service.tended import Tended
from pgtrickle.service.worker import Workers
from pgtrickle.sites.remote import connections
from tests.security.roles import Roles
from tests.support.database import TestDatabase, fresh_database
from tests.support.service import until

pytestmark = pytest.mark.pgversions

NEEDED = "-c statement_timeout=30s"  # a test that would wait for ever fails instead


@pytest.fixture
def scheduler(roles: Roles) -> Scheduler:
    """Without a worker, so that submitted units stay visible."""
    database = roles.database
    return Scheduler(Tended("test", Workers(Budget(database.dsn), database.name, uuid.uuid4())), Pool(0), 30.0)


@pytest.fixture
def member(roles: Roles) -> Iterator[TestDatabase]:
    with fresh_database(roles.database.server, "member") as database:
        _prepare_member(database, roles.mallory)
        yield database


def _prepare_member(database: TestDatabase, owner: str) -> None:
    with psycopg.connect(database.superuser_dsn, autocommit=True) as conn:
        conn.execute(f"CREATE SCHEMA s AUTHORIZATION {owner}; GRANT USAGE ON SCHEMA s TO PUBLIC".encode())
        # PostgreSQL locks the table to show the expression of a virtual column.
        kind = "VIRTUAL" if conn.info.server_version >= 180000 else "STORED"
        conn.execute(
            f"SET ROLE {owner}; CREATE TABLE s.t (id int PRIMARY KEY, a int, c int GENERATED ALWAYS AS (a * 2) {kind});"
            " GRANT SELECT, TRIGGER ON s.t TO app".encode()
        )
    with pgtrickle.connect(database.dsn) as db:
        db.install()


def test_a_statement_to_a_registered_database_does_not_wait_forever(
    roles: Roles, member: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REMOTE_LOCK_TIMEOUT", "200ms")
    with (
        roles.service() as db,
        psycopg.connect(member.direct_dsn_as(roles.mallory)) as lock,
    ):
        db.add_database("crm", make_conninfo(member.direct_dsn, options=NEEDED))
        lock.execute("LOCK TABLE s.t IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            db.engine.remote.ask("crm", "SELECT FROM s.t", ())


def test_a_locked_member_does_not_keep_others_from_joining(
    roles: Roles, member: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REMOTE_LOCK_TIMEOUT", "200ms")
    with (
        fresh_database(member.server, "first") as first,
        fresh_database(member.server, "last") as last,
        roles.service() as db,
        psycopg.connect(member.direct_dsn_as(roles.mallory)) as lock,
    ):
        for other in (first, last):
            _prepare_member(other, roles.mallory)
        db.add_database("t_a", first.direct_dsn)
        db.add_database_set("ts", pattern="t_*")
        db.import_table("ts", "s.t")
        lock.execute("LOCK TABLE s.t IN ACCESS EXCLUSIVE MODE")
        for name, one in (("t_b", member), ("t_c", last)):
            with pgtrickle.connect(one.dsn) as there:
                node = there.conn.execute("SELECT pgtrickle._database_identity()").fetchone()
            assert node is not None
            dsn = make_conninfo(one.direct_dsn, options=NEEDED)
            db.conn.execute("SELECT pgtrickle._register_database(%s, %s, %s, '{}')", (name, dsn, node[0]))
        db.engine.sets.update_members()
        joined = {row[0] for row in db.conn.execute("SELECT database FROM pgtrickle.pgt_shards").fetchall()}
        assert {"t_a", "t_c"} <= joined
        if lock.info.server_version >= 180000:
            assert "t_b" not in joined
            assert "lock timeout" in str(db.database_sets()[0].problem)
        lock.rollback()
        db.engine.sets.update_members()
        joined = {row[0] for row in db.conn.execute("SELECT database FROM pgtrickle.pgt_shards").fetchall()}
        assert joined == {"t_a", "t_b", "t_c"}


def test_a_locked_row_does_not_stop_the_scheduler(roles: Roles, scheduler: Scheduler) -> None:
    hers = roles.create(roles.mallory, "hers", f"SELECT id, v FROM {roles.mallory}.src", schedule="1m")
    mine = roles.create(roles.alice, "mine", f"SELECT id, kind FROM {roles.alice}.orders", schedule="1m")
    hers_id, mine_id = roles.id_of(hers), roles.id_of(mine)
    # Its row has to be written, and is locked.
    roles.sql(roles.app, f"UPDATE pgtrickle.pgt_stream_tables SET every = '1 day' WHERE pgt_id = {hers_id}")
    with (
        roles.connect(roles.app) as lock,
        lock.transaction(force_rollback=True),
        psycopg.connect(roles.database.dsn, autocommit=True, options=NEEDED) as conn,
    ):
        lock.execute("SELECT FROM pgtrickle.pgt_stream_tables WHERE pgt_id = %s FOR UPDATE", (hers_id,))
        scheduler.tick(conn, read_settings(conn))
        scheduler.tick(conn, read_settings(conn))
        begun = conn.execute("SELECT unnest(pgt_ids) FROM pgtrickle.pgt_jobs").fetchall()
    assert (mine_id,) in begun
    with psycopg.connect(roles.database.dsn, autocommit=True) as conn:
        scheduler.tick(conn, read_settings(conn))
        row = conn.execute("SELECT every::text FROM pgtrickle.pgt_stream_tables WHERE pgt_id = %s", (hers_id,))
        assert row.fetchone() == ("00:01:00",)


def test_locked_cron_schedules_do_not_stop_the_scheduler(roles: Roles, scheduler: Scheduler) -> None:
    names = [
        roles.create(owner, f"cron_{owner}", f"SELECT 1 AS a FROM {table}", schedule="0 4 * * *")
        for owner, table in ((roles.mallory, f"{roles.mallory}.src"), (roles.alice, f"{roles.alice}.orders"))
    ]
    hers, mine = (roles.id_of(name) for name in names)
    with (
        roles.connect(roles.app) as lock,
        lock.transaction(force_rollback=True),
        psycopg.connect(roles.database.dsn, autocommit=True, options=NEEDED) as conn,
    ):
        conn.execute("UPDATE pgtrickle.pgt_stream_tables SET next_due = 'infinity'")
        lock.execute("SELECT FROM pgtrickle.pgt_stream_tables WHERE pgt_id = %s FOR UPDATE", (hers,))
        scheduler._settle_cron(conn)
        rows = conn.execute("SELECT pgt_id FROM pgtrickle.pgt_stream_tables WHERE isfinite(next_due)").fetchall()
    assert rows == [(mine,)]


def test_notifications_are_answered_together(
    roles: Roles, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody can send notifications: a tick for each would keep the service and the server busy."""
    monkeypatch.setattr(scheduler_module, "PAUSE_SECONDS", 2.0)
    roles.sql(roles.app, "SELECT pgtrickle.pause()")
    scheduler.start()
    try:
        until(lambda: scheduler.counters.ticks > 0, "the first tick")
        before, sent = scheduler.counters.ticks, 150
        with roles.connect(roles.mallory) as conn:
            for number in range(sent):
                conn.execute("SELECT pg_notify('pgtrickle_wake', %s)", (f"{number}",))
                time.sleep(0.02)  # so that each could wake it
        assert scheduler.counters.ticks - before < sent / 4
        assert scheduler.failure is None
    finally:
        scheduler.stop()
        scheduler.join(30)
