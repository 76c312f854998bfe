"""Writers of all kinds against continuous refreshes: no change is lost or duplicated at any cut."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg import sql

import pgtrickle
from tests.support.database import TestDatabase
from tests.support.oracle import Row, assert_equal_to_query, fetch_multiset

Connection = psycopg.Connection[Any]

WRITERS = 6
GROUPS = 8
CUTS = 20

QUERIES = {
    "kept": "SELECT id, grp, val FROM item WHERE val > 20",
    "bag": "SELECT grp, note FROM event WHERE grp <> 3",
    "matched": "SELECT i.id, i.val, e.note FROM item AS i JOIN event AS e ON e.grp = i.grp AND e.note < 'c' WHERE i.val > 50",
    "totals": "SELECT grp, count(*) AS n, sum(val) AS total FROM item GROUP BY grp",
    "extremes": "SELECT grp, min(val) AS low, max(val) AS high FROM item GROUP BY grp",
}

_INSERT_ITEM = "INSERT INTO item SELECT nextval('item_id'), %s::int, %s::int FROM generate_series(1, %s::int)"
_INSERT_EVENT = "INSERT INTO event SELECT %s::int, %s::text FROM generate_series(1, %s::int)"


@dataclass
class _Traffic:
    """State shared by the writers: when to stop, what they did, and their errors."""

    dsn: str
    stop: threading.Event = field(default_factory=threading.Event)
    done: Counter[str] = field(default_factory=Counter)
    errors: list[BaseException] = field(default_factory=list)


def _statements(conn: Connection, rng: random.Random, writer: int) -> None:
    """One to four statements.

    Each writer updates and deletes rows of its own residue class, so that none waits for another.
    """
    for _ in range(rng.randint(1, 4)):
        grp, some = rng.randrange(GROUPS), rng.randrange(11)
        match rng.randrange(6):
            case 0:
                conn.execute(_INSERT_ITEM, [grp, rng.randrange(100), rng.randint(1, 6)])
            case 1:
                conn.execute(_INSERT_EVENT, [grp, rng.choice("abcdef"), rng.randint(1, 3)])
            case 2:
                conn.execute("UPDATE item SET val = val + 1 WHERE id %% 6 = %s AND id %% 11 = %s", [writer, some])
            case 3:
                conn.execute(
                    "UPDATE item SET grp = (grp + 1) %% 8 WHERE id %% 6 = %s AND id %% 11 = %s", [writer, some]
                )
            case 4:
                conn.execute("DELETE FROM item WHERE id %% 6 = %s AND id %% 11 = %s", [writer, some])
            case 5:
                # Two of many equal rows; somebody else may be at the same ones.
                conn.execute(
                    "DELETE FROM event WHERE ctid = ANY (ARRAY("
                    "SELECT ctid FROM event WHERE grp = %s LIMIT 2 FOR UPDATE SKIP LOCKED))",
                    [grp],
                )


def _plain(conn: Connection, rng: random.Random, writer: int, stop: threading.Event) -> None:
    _statements(conn, rng, writer)


def _commit(conn: Connection, rng: random.Random, writer: int, stop: threading.Event) -> None:
    with conn.transaction():
        _statements(conn, rng, writer)
        _statements(conn, rng, writer)


def _rollback(conn: Connection, rng: random.Random, writer: int, stop: threading.Event) -> None:
    with conn.transaction(force_rollback=True):
        _statements(conn, rng, writer)


def _savepoints(conn: Connection, rng: random.Random, writer: int, stop: threading.Event) -> None:
    with conn.transaction():
        _statements(conn, rng, writer)
        with conn.transaction(force_rollback=True):
            _statements(conn, rng, writer)
            with conn.transaction():
                _statements(conn, rng, writer)
        with conn.transaction():
            _statements(conn, rng, writer)


def _prepared(conn: Connection, rng: random.Random, writer: int, stop: threading.Event) -> None:
    """Two-phase commit; between the phases the transaction belongs to no session."""
    gid = f"writer {writer} {rng.random()}"
    conn.execute("BEGIN")
    _statements(conn, rng, writer)
    conn.execute(sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(gid)))
    stop.wait(rng.choice((0, 0.05, 0.5)))
    end = "ROLLBACK" if rng.random() < 0.3 else "COMMIT"
    conn.execute(sql.SQL(end + " PREPARED {}").format(sql.Literal(gid)))


def _long(conn: Connection, rng: random.Random, writer: int, stop: threading.Event) -> None:
    """Open for seconds, over several refreshes, with writes at both ends."""
    with conn.transaction():
        _statements(conn, rng, writer)
        stop.wait(rng.choice((2, 5)))
        _statements(conn, rng, writer)


_HABITS: tuple[Callable[[Connection, random.Random, int, threading.Event], None], ...] = (
    *(_plain, _plain, _commit, _commit, _rollback, _savepoints, _savepoints, _prepared, _prepared),
)


def _write(traffic: _Traffic, writer: int, seed: int) -> None:
    rng = random.Random(seed)
    try:
        with psycopg.connect(traffic.dsn, autocommit=True, application_name=f"writer {writer}") as conn:
            while not traffic.stop.is_set():
                # Two of the writers hold transactions open; with all of them doing so little else would happen.
                habit = _long if writer < 2 and rng.random() < 0.3 else rng.choice(_HABITS)
                habit(conn, rng, writer, traffic.stop)
                traffic.done[habit.__name__.strip("_")] += 1
                # Not a wait for anything: writers that never pause would leave refreshes no processor.
                traffic.stop.wait(rng.random() * 0.1)
    except BaseException as error:
        traffic.errors.append(error)
        traffic.stop.set()


@contextmanager
def _traffic(dsn: str, seed: int) -> Iterator[_Traffic]:
    traffic = _Traffic(dsn)
    threads = [threading.Thread(target=_write, args=(traffic, i, seed + i)) for i in range(WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield traffic
    finally:
        traffic.stop.set()
        for thread in threads:
            thread.join()


class _AtCut:
    """The queries' results at every cut, as another session sees them in the same snapshot."""

    def __init__(self, dsn: str) -> None:
        self._other = psycopg.connect(dsn, autocommit=True)
        self.db = pgtrickle.connect(dsn, on_step=self._on_step)
        self.expected: dict[str, Counter[Row]] = {}

    def _on_step(self, name: str) -> None:
        if name != "cut":
            return
        row = self.db.conn.execute("SELECT pg_export_snapshot()").fetchone()
        assert row is not None
        with self._other.transaction():
            self._other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            self._other.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(row[0])))
            self.expected = {name: fetch_multiset(self._other, query) for name, query in QUERIES.items()}

    def differences(self) -> tuple[int, int]:
        """The number of rows that the stream tables lack, and of rows that they should not have."""
        lost = doubled = 0
        for name, query in QUERIES.items():
            columns = self._columns(query)
            actual = fetch_multiset(self._other, f"SELECT {columns} FROM {name}")
            lost += (self.expected[name] - actual).total()
            doubled += (actual - self.expected[name]).total()
        return lost, doubled

    def _columns(self, query: str) -> str:
        described = self._other.execute(sql.SQL("SELECT * FROM ({}) AS q LIMIT 0").format(_trusted(query))).description
        assert described is not None
        return ", ".join(column.name for column in described)

    def close(self) -> None:
        self.db.close()
        self._other.close()


def _trusted(query: str) -> sql.SQL:
    # psycopg's SQL is meant for literals; the text of a test's own query is as good.
    return sql.SQL(query)


@pytest.fixture
def at_cut(database: TestDatabase, conn: Connection) -> Iterator[_AtCut]:
    at_cut = _AtCut(database.dsn)
    try:
        at_cut.db.install()
        conn.execute("CREATE TABLE item (id int PRIMARY KEY, grp int, val int)")
        conn.execute("CREATE TABLE event (grp int, note text)")
        conn.execute("CREATE SEQUENCE item_id")
        conn.execute("INSERT INTO item SELECT nextval('item_id'), i % 8, i % 100 FROM generate_series(1, 600) AS i")
        conn.execute("INSERT INTO event SELECT i % 8, chr(97 + i % 6) FROM generate_series(1, 60) AS i")
        for name, query in QUERIES.items():
            at_cut.db.create_stream_table(name, query, refresh_mode="DIFFERENTIAL")
        yield at_cut
    finally:
        at_cut.close()


def _refresh_under_traffic(at_cut: _AtCut, database: TestDatabase, conn: Connection, seconds: float) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    cuts, lost, doubled, actions = 0, 0, 0, Counter[str]()
    with _traffic(database.dsn, seed) as traffic:
        deadline = time.monotonic() + seconds
        while (time.monotonic() < deadline or cuts < CUTS) and not traffic.stop.is_set():
            actions.update(result.action for result in at_cut.db.refresh_all())
            missing, unexpected = at_cut.differences()
            cuts, lost, doubled = cuts + 1, lost + missing, doubled + unexpected
    print(f"{cuts} cuts, {lost} rows lost, {doubled} doubled; refreshes {dict(actions)}; writes {dict(traffic.done)}")
    assert traffic.errors == []
    assert (lost, doubled) == (0, 0)
    assert cuts >= CUTS
    assert set(actions) <= {"DIFFERENTIAL", "NO_DATA"}, "a stream table that starts over proves nothing"
    # Everything is committed now: what was open at the last cut is the last to arrive.
    at_cut.db.refresh_all()
    assert at_cut.differences() == (0, 0)
    for name, query in QUERIES.items():
        assert_equal_to_query(conn, name, query)
    assert {"savepoints", "prepared", "rollback", "long", "commit"} <= set(traffic.done)


def test_nothing_is_lost_or_duplicated(at_cut: _AtCut, database: TestDatabase, conn: Connection) -> None:
    _refresh_under_traffic(at_cut, database, conn, 15)


@pytest.mark.long
def test_nothing_is_lost_or_duplicated_in_a_minute(at_cut: _AtCut, database: TestDatabase, conn: Connection) -> None:
    _refresh_under_traffic(at_cut, database, conn, 60)


def test_a_change_of_a_transaction_open_at_the_cut_arrives_later(
    at_cut: _AtCut, database: TestDatabase, conn: Connection
) -> None:
    """A transaction that began before the cut commits after one that began later."""
    with psycopg.connect(database.direct_dsn) as old, psycopg.connect(database.direct_dsn, autocommit=True) as prepared:
        old.execute("INSERT INTO item VALUES (-1, 1, 1000), (-2, 99, 5)")
        prepared.execute("BEGIN")
        prepared.execute("DELETE FROM item WHERE grp = 4")
        prepared.execute("PREPARE TRANSACTION 'open at the cut'")
        conn.execute("UPDATE item SET val = -5 WHERE id = 1")
        at_cut.db.refresh_all()
        assert at_cut.differences() == (0, 0)
        assert conn.execute("SELECT count(*) FROM totals WHERE grp = 99").fetchone() == (0,)
        at_cut.db.refresh_all()  # the window goes on without them once more
        conn.execute("UPDATE item SET val = -6 WHERE id = 1")
        at_cut.db.refresh_all()
        old.commit()
        at_cut.db.refresh_all()
        assert at_cut.differences() == (0, 0)
        assert conn.execute("SELECT n, total FROM totals WHERE grp = 99").fetchone() == (1, 5)
        prepared.execute("COMMIT PREPARED 'open at the cut'")
        at_cut.db.refresh_all()
        assert at_cut.differences() == (0, 0)
        assert conn.execute("SELECT count(*) FROM totals WHERE grp = 4").fetchone() == (0,)
