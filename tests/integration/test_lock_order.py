"""Every command concurrently with every other: no deadlocks, no hanging commands, and errors name the stream table."""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from uuid import uuid4

import psycopg
import pytest

import pgtrickle
from pgtrickle.errors import PgtrickleError, StreamTableExistsError, StreamTableNotFoundError
from tests.support.database import TestDatabase
from tests.support.interleave import Command, run_both
from tests.support.oracle import assert_equal_to_query

BASE = "SELECT a.id, b.n FROM a JOIN b ON b.id = a.id"
ABOVE = "SELECT n, count(*) AS c FROM base GROUP BY n"
NAMED = re.compile(r"\b(base|above|made_\w+|a|b|catalog in database \w+|stream table \d+ was dropped)\b")
STORM_SECONDS = float(os.environ.get("PGTRICKLE_STORM_SECONDS", "600"))
STEPS = ("cut", "fetch", "spark", "load", "commit")


def create(db: pgtrickle.Database) -> None:
    query = random.choice(["SELECT id, n FROM b WHERE id > 1", "SELECT n FROM base", BASE])
    db.create_stream_table(f"made_{uuid4().hex[:6]}", query, initialize=False)


def drop(db: pgtrickle.Database) -> None:
    db.drop_stream_table("base", cascade=True)


def drop_reader(db: pgtrickle.Database) -> None:
    db.drop_stream_table("above")


def alter_query(db: pgtrickle.Database) -> None:
    db.alter_stream_table("base", query=f"{BASE} WHERE a.id > {random.randrange(3)}")


def alter_options(db: pgtrickle.Database) -> None:
    db.alter_stream_table("base", refresh_mode=random.choice(["AUTO", "FULL"]), schedule="2m")


def suspend_and_resume(db: pgtrickle.Database) -> None:
    db.alter_stream_table("above", status="SUSPENDED")
    db.alter_stream_table("above", status="ACTIVE")


def refresh(db: pgtrickle.Database) -> None:
    db.refresh(["base", "above"])


def refresh_in_full(db: pgtrickle.Database) -> None:
    db.conn.execute("UPDATE pgtrickle.pgt_stream_tables SET refresh_mode = 'FULL' WHERE pgt_name = 'base'")
    db.refresh(["base", "above"])


def refresh_as_one(db: pgtrickle.Database) -> None:
    ids = [db.id_of("base"), db.id_of("above")]
    outcome = db.engine.attempt(ids, "MANUAL", atomic=True)
    outcome.raise_problems(2)


def upgrade(db: pgtrickle.Database) -> None:
    db.upgrade()


def install(db: pgtrickle.Database) -> None:
    db.install()


def pause_and_resume(db: pgtrickle.Database) -> None:
    db.pause()
    db.resume()


def stop_capture(db: pgtrickle.Database) -> None:
    db.conn.execute("SELECT pgtrickle.emergency_stop()").fetchall()


def write(db: pgtrickle.Database) -> None:
    with db.conn.transaction():
        db.conn.execute("UPDATE b SET n = n + 1")
        db.conn.execute("UPDATE a SET id = id")


REFRESHES: list[Command] = [refresh, refresh_in_full, refresh_as_one]
COMMANDS: list[Command] = [
    create, drop, drop_reader, alter_query, alter_options, suspend_and_resume, *REFRESHES, upgrade, install, pause_and_resume,
    stop_capture, write,
]  # fmt: skip
# The first is held at a step, or before its commit.
PAIRS: list[tuple[Command, str | None, Command]] = [
    (refresh_in_full, "cut", drop),
    (refresh_in_full, "load", drop),
    (drop, None, refresh_in_full),
    (refresh_as_one, "load", drop),
    (refresh_as_one, "cut", alter_query),
    (alter_query, None, refresh),
    (create, None, drop),
    (drop, None, drop_reader),
    (drop_reader, None, suspend_and_resume),
    (upgrade, None, refresh),
    (refresh_as_one, "load", upgrade),
    (create, None, upgrade),
    (stop_capture, None, refresh_as_one),
]


@pytest.fixture
def settle(database: TestDatabase, conn: psycopg.Connection) -> Callable[[], None]:
    """Create missing stream tables again after commands that dropped them."""
    conn.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY, n int)")
    conn.execute(
        "INSERT INTO a SELECT generate_series(1, 5); INSERT INTO b SELECT n, n % 2 FROM generate_series(1, 5) n"
    )
    with pgtrickle.connect(database.direct_dsn) as db:
        db.install()

    def settle() -> None:
        with pgtrickle.connect(database.direct_dsn) as db:
            db.conn.execute("SELECT pgtrickle.resume_capture(), pgtrickle.resume()")
            for name, query in (("base", BASE), ("above", ABOVE)):
                try:
                    db.stream_table(name)
                except StreamTableNotFoundError:
                    db.create_stream_table(name, query, initialize=False)
            for table in db.stream_tables():
                if "made_" in table.name:
                    db.drop_stream_table(table.name, cascade=True)
            db.conn.execute("UPDATE b SET n = n + 1")

    settle()
    with pgtrickle.connect(database.direct_dsn) as db:
        db.refresh_all()  # Spark takes its time to start
    return settle


def assert_named(errors: list[Exception], what: str) -> None:
    for error in errors:
        assert isinstance(error, PgtrickleError), f"{what}: {error!r}"
        assert NAMED.search(error.message), f"{what}: {error!r}"
        assert "deadlock" not in error.message, f"{what}: {error!r}"


def test_commands_do_not_lock_each_other_out(database: TestDatabase, settle: Callable[[], None]) -> None:
    for first, step, second in PAIRS:
        settle()
        what = f"{first.__name__} held at {step or 'its end'}, with {second.__name__}"
        assert_named(run_both(database, first, second, step), what)


@pytest.mark.long
def test_two_hundred_pairs_of_commands(database: TestDatabase, settle: Callable[[], None]) -> None:
    seed = random.randrange(1 << 32)
    random.seed(seed)
    for number in range(200):
        settle()
        first, second = random.choice(COMMANDS), random.choice(COMMANDS)
        step = random.choice(STEPS) if first in REFRESHES else None
        what = f"seed {seed}, round {number}: {first.__name__} held at {step or 'its end'}, with {second.__name__}"
        assert_named(run_both(database, first, second, step), what)


def verify(db: pgtrickle.Database) -> None:
    db.verify(["base", "above"])


def reinitialize(db: pgtrickle.Database) -> None:
    db.reinitialize("base", "by a test")


def create_base(db: pgtrickle.Database) -> None:
    for name, query in (("base", BASE), ("above", ABOVE)):
        with suppress(StreamTableExistsError):
            db.create_stream_table(name, query)


def drop_made(db: pgtrickle.Database) -> None:
    for table in db.stream_tables():
        if "made_" in table.name:
            db.drop_stream_table(table.name, cascade=True)


STORM: list[Command] = [
    create, create_base, create_base, drop, drop_reader, drop_made, alter_query, alter_options, suspend_and_resume, refresh,
    refresh_as_one, upgrade, install, pause_and_resume, verify, reinitialize,
]  # fmt: skip


@pytest.mark.long
def test_commands_concurrent_with_writers(database: TestDatabase, settle: Callable[[], None]) -> None:
    """Three sessions of random commands and two of writers.

    Nothing hangs, no writer fails, and all is exact at the end.
    """
    seed = random.randrange(1 << 32)
    print(f"seed {seed}, {STORM_SECONDS:.0f} seconds")
    end = time.monotonic() + STORM_SECONDS
    done: Counter[str] = Counter()
    refused: Counter[str] = Counter()

    def commands(number: int) -> None:
        chance = random.Random(f"{seed}:{number}")
        with pgtrickle.connect(database.direct_dsn) as db:
            while time.monotonic() < end:
                command = chance.choice(STORM)
                try:
                    command(db)
                    done[command.__name__] += 1
                except PgtrickleError as error:
                    assert_named([error], command.__name__)
                    refused[f"{command.__name__}: {type(error).__name__}"] += 1

    def writes(number: int) -> None:
        chance = random.Random(f"{seed}:writer {number}")
        with psycopg.connect(database.direct_dsn, autocommit=True) as conn:
            while time.monotonic() < end:
                with conn.transaction():
                    # In the order of keys, for writers deadlock by themselves.
                    for key in sorted(chance.sample(range(100 * number + 10, 100 * number + 60), 3)):
                        conn.execute("INSERT INTO a VALUES (%s) ON CONFLICT DO NOTHING", (key,))
                        conn.execute(
                            "INSERT INTO b VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET n = b.n + 1", (key, key % 3)
                        )
                        if chance.random() < 0.4:
                            conn.execute("DELETE FROM a WHERE id = %s", (key,))
                done["write"] += 1

    with ThreadPoolExecutor(5) as pool:
        sessions = [*(pool.submit(commands, i) for i in range(3)), *(pool.submit(writes, i) for i in (1, 2))]
        for session in sessions:
            session.result(timeout=STORM_SECONDS + 600)
    settle()
    with pgtrickle.connect(database.direct_dsn) as db, psycopg.connect(database.direct_dsn, autocommit=True) as conn:
        db.refresh_all()
        for table in db.stream_tables():
            assert table.query is not None
            assert_equal_to_query(conn, table.name, table.query)
    print(f"{sum(done.values())} done: {dict(done)}; refused: {dict(refused)}")
    assert all(done[command.__name__] for command in STORM), done
