"""Staleness against the true commit times of changes."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

import psycopg
import pytest

import pgtrickle
from pgtrickle.service import scheduler as scheduler_module
from pgtrickle.service.connection_budget import Budget
from pgtrickle.service.pool import Pool
from pgtrickle.service.scheduler import Scheduler
from pgtrickle.service.scheduling.ticks import SPACING
from pgtrickle.service.settings import read_settings
from pgtrickle.service.tended import Tended
from pgtrickle.service.worker import Workers
from tests.support.database import TestDatabase

Connection = psycopg.Connection[Any]
STEPS = 300
FILLED = """
UPDATE pgtrickle.pgt_stream_tables SET status = 'ACTIVE', reinit_reason = NULL, data_timestamp = statement_timestamp(),
    frontier = jsonb_build_object('node', pgtrickle._database_identity(), 'snapshot', pg_current_snapshot()::text)
"""


@dataclass
class Writer:
    """A transaction of a writer: when its last statement began, and between which moments it was committed."""

    conn: Connection
    written: datetime | None = None
    committing: datetime | None = None
    committed: datetime | None = None


def now(conn: Connection) -> datetime:
    row = conn.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    return row[0]  # type: ignore[no-any-return]


@pytest.mark.direct("transactions are held open over several connections")
def test_staleness_is_never_too_small_and_its_error_is_bounded(
    database: TestDatabase, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is too large by at most the time from a statement to its commit, and from a tick to the commit."""
    seed = random.randrange(1_000_000)
    print("seed", seed)
    chance = random.Random(seed)
    monkeypatch.setattr(scheduler_module, "BEAT_SECONDS", 0.0)
    with pgtrickle.connect(database.dsn) as db:
        db.install()
    conn.execute("CREATE TABLE item (id int GENERATED ALWAYS AS IDENTITY, v int)")
    conn.execute("SELECT pgtrickle.create_stream_table('items', 'SELECT id, v FROM item', initialize => false)")
    conn.execute(FILLED)
    scheduler = Scheduler(Tended("test", Workers(Budget(database.dsn), database.name, uuid4())), Pool(0), 30.0)
    settings = read_settings(conn)
    scheduler._beat(conn, settings)  # the first heartbeat registers the service and records no tick
    ticks: list[datetime] = []
    lacking: list[Writer] = []
    checks = 0
    with ExitStack() as stack:
        open_ones = [Writer(stack.enter_context(psycopg.connect(database.direct_dsn))) for _ in range(3)]
        for _ in range(STEPS):
            step = chance.choices(["write", "commit", "tick", "fill", "check"], [4, 3, 2, 0.3, 4])[0]
            place = chance.randrange(len(open_ones))
            writer = open_ones[place]
            if step == "write":
                writer.written = now(conn)
                writer.conn.execute("INSERT INTO item (v) VALUES (1)")
            elif step == "commit" and writer.written is not None:
                writer.committing = now(conn)
                writer.conn.commit()
                writer.committed = now(conn)
                lacking.append(writer)
                open_ones[place] = Writer(writer.conn)
            elif step == "tick":
                ticks.append(now(conn))
                scheduler._beat(conn, settings)
            elif step == "fill":
                conn.execute(FILLED)
                lacking.clear()
            elif step == "check":
                checks += 1
                _check(conn, lacking, ticks)
    assert checks > 0


def _check(conn: Connection, lacking: list[Writer], ticks: list[datetime]) -> None:
    before = now(conn)
    row = conn.execute("SELECT pending, known_at FROM pgtrickle._freshness()").fetchone()
    assert row is not None
    pending, known_at = row
    assert pending is bool(lacking)
    if not lacking:
        assert known_at >= before
        return
    oldest = min(lacking, key=lambda writer: writer.committed or before)
    assert oldest.committing is not None
    assert oldest.committed is not None
    assert known_at <= oldest.committed
    assert known_at >= min(writer.written for writer in lacking if writer.written is not None)
    if earlier := [tick for tick in ticks[:-1] if tick < oldest.committing]:
        assert known_at >= earlier[-1] - (before - earlier[-1]) / (SPACING - 1)


def test_a_chain_is_as_stale_as_its_first_stream_table_was(database: TestDatabase, conn: Connection) -> None:
    """A refresh of the first stream table passes changes to the second one that are older than that refresh."""
    known = "SELECT known_at, own_at FROM pgtrickle._freshness(ARRAY[pgtrickle._require_id(%s)])"
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        conn.execute("CREATE TABLE item (id int PRIMARY KEY, v int)")
        db.create_stream_table("first", "SELECT id, v FROM item")
        db.create_stream_table("second", "SELECT id FROM first")
        db.create_stream_table("third", "SELECT id FROM second")
        conn.execute("INSERT INTO item VALUES (1, 1)")
        committed = now(conn)
        db.refresh(["first"])
        refreshed = now(conn)
        db.refresh(["second"])
        row = conn.execute(known, ("third",)).fetchone()
        assert row is not None
        assert row[0] <= committed
        assert row[1] > refreshed  # it has waited only since it could have been refreshed
        db.refresh(["third"])
        done = now(conn)
        row = conn.execute(known, ("third",)).fetchone()
        assert row is not None
        assert row[0] > done
