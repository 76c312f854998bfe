"""Purging change buffers: changes that a reader still needs are kept, and the space of the others is freed."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from pgtrickle.catalog.install import install
from pgtrickle.catalog.query_files import load_query
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.frontier.window import since
from tests.support.database import TestDatabase

pytestmark = pytest.mark.pgversions

Connection = psycopg.Connection[Any]

ROWS = 2000  # of about 600 bytes each: more than what makes a buffer change tables
LARGE = 1024 * 1024
WIDE = "x" * 550


@pytest.fixture
def db(conn: Connection) -> Connection:
    install(conn)
    conn.execute("CREATE TABLE item (id int, pad text); CREATE SEQUENCE ids")
    conn.execute("SELECT pgtrickle.create_stream_table('first', 'SELECT id, pad FROM item')")
    conn.execute("SELECT pgtrickle.create_stream_table('second', 'SELECT id, pad FROM item')")
    pass_all(conn, "first")
    pass_all(conn, "second")
    return conn


@pytest.fixture
def other(database: TestDatabase) -> Iterator[Connection]:
    with psycopg.connect(database.direct_dsn) as connection:
        yield connection


def one(conn: Connection, query: str, parameters: list[Any] | None = None) -> Any:
    row = conn.execute(query, parameters).fetchone()
    assert row is not None
    return row[0]


def stable_name(conn: Connection) -> str:
    return str(one(conn, "SELECT source_stable_name FROM pgtrickle.pgt_change_tracking"))


def cut(conn: Connection) -> dict[str, str]:
    """The frontier that a refresh would store now."""
    row = conn.execute(load_query("cut"), {"lock_timeout": "5s"}).fetchone()
    assert row is not None
    return {"node": row[0], "snapshot": row[1], "meaning": ""}


def set_frontier(conn: Connection, name: str, frontier: dict[str, str]) -> None:
    conn.execute(
        "UPDATE pgtrickle.pgt_stream_tables SET frontier = %s, reinit_reason = NULL, claimed_by = NULL WHERE pgt_name = %s",
        [json.dumps(frontier), name],
    )


def pass_all(conn: Connection, *names: str) -> None:
    """Mark everything committed so far as seen by these stream tables."""
    for name in names:
        set_frontier(conn, name, cut(conn))


def purge(conn: Connection) -> int:
    return int(one(conn, "SELECT pgtrickle._purge(%s)", [stable_name(conn)]))


def size(conn: Connection) -> int:
    """Bytes of both tables of the buffer."""
    return int(
        one(
            conn,
            "SELECT pg_relation_size('pgtrickle_changes.changes_' || s) + pg_relation_size('pgtrickle_changes.spare_' || s)"
            " FROM (SELECT source_stable_name FROM pgtrickle.pgt_change_tracking) AS t (s)",
        )
    )


def write(conn: Connection, rows: int = ROWS) -> None:
    conn.execute("INSERT INTO item SELECT nextval('ids'), %s FROM generate_series(1, %s)", [WIDE, rows])


def changes(conn: Connection, frontier: dict[str, str]) -> Counter[int]:
    """The changes that are visible to the connection's snapshot but not to the frontier."""
    window = since(Snapshot.parse(frontier["snapshot"]), "__pgt_xid")
    buffer = sql.Identifier("pgtrickle_changes", f"changes_{stable_name(conn)}")
    rows = conn.execute(sql.SQL("SELECT c1, __pgt_w FROM {} WHERE {}").format(buffer, window)).fetchall()
    found: Counter[int] = Counter()
    for id_, weight in rows:
        found[id_] += weight
    return found


def scans(conn: Connection) -> int:
    """The number of scans of both tables of the buffer, by all sessions."""
    conn.execute("SELECT pg_stat_force_next_flush()")
    counted = "SELECT sum(seq_scan) FROM pg_stat_user_tables WHERE schemaname = 'pgtrickle_changes' AND relname LIKE %s"
    return int(one(conn, counted, [f"%\\_{stable_name(conn)}"]))


def test_changes_that_all_readers_have_passed_are_purged(db: Connection) -> None:
    write(db)
    pass_all(db, "first")
    assert purge(db) == 0  # the second has not seen it
    assert size(db) > LARGE
    pass_all(db, "second")
    assert purge(db) > LARGE
    assert size(db) == 0


def test_a_table_left_by_writers_is_truncated_without_reading_it(db: Connection) -> None:
    """The time when they left it shows that nobody needs it any more."""
    for _ in range(4):
        write(db)
        pass_all(db, "first")
        purge(db)  # changes tables: the second has not seen it
        pass_all(db, "first", "second")
        write(db, 10)
        before = scans(db)
        assert purge(db) > LARGE
        assert scans(db) == before


def test_a_rolled_back_switch_of_tables_keeps_unread_changes(db: Connection) -> None:
    """Writers have left a table anyway. What was recorded for an earlier switch does not apply."""
    write(db)
    pass_all(db, "first")
    purge(db)
    pass_all(db, "second")
    assert purge(db) > LARGE
    for _ in range(2):
        frontier = cut(db)
        write(db)
        pass_all(db, "first")
        with db.transaction(force_rollback=True):
            purge(db)
        write(db, 10)
        purge(db)
        assert sum(changes(db, frontier).values()) == ROWS + 10
        pass_all(db, "first", "second")
        assert purge(db) > LARGE


def test_a_small_buffer_is_left_alone(db: Connection) -> None:
    """A TRUNCATE costs more than scanning a few passed rows."""
    write(db, 10)
    pass_all(db, "first", "second")
    assert purge(db) == 0
    assert 0 < size(db) < LARGE


def test_size_stays_bounded_under_a_held_snapshot(db: Connection, other: Connection) -> None:
    """Vacuum could remove nothing, and there is never a moment without unread changes."""
    other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    other.execute("SELECT count(*) FROM item")
    largest = 0
    for _ in range(12):
        write(db)
        frontier = cut(db)
        write(db, 10)
        set_frontier(db, "first", frontier)
        set_frontier(db, "second", frontier)
        purge(db)
        assert sum(changes(db, frontier).values()) == 10
        largest = max(largest, size(db))
    assert one(other, "SELECT count(*) FROM item") == 0
    assert largest < 4 * LARGE  # 12 times 1.2 MB were written


def test_an_open_transaction_elsewhere_keeps_nothing(db: Connection, other: Connection) -> None:
    """It holds back the oldest running transaction of every frontier, but has no changes of this source."""
    other.execute("CREATE TABLE elsewhere (a int)")
    write(db)
    pass_all(db, "first", "second")
    assert purge(db) > LARGE
    assert size(db) == 0


@pytest.mark.parametrize("end", ["commit", "prepare"])
def test_rows_of_an_open_transaction_stay(db: Connection, other: Connection, end: str) -> None:
    """They become visible after frontiers have passed everything around them."""
    write(db)
    write(other, 7)
    frontier = cut(db)
    if end == "prepare":
        other.execute("PREPARE TRANSACTION 'open'")
    for _ in range(3):
        write(db)
        pass_all(db, "first", "second")
        purge(db)
        assert changes(db, cut(db)) == {}
    if end == "prepare":
        db.execute("COMMIT PREPARED 'open'")
    else:
        other.commit()
    purge(db)
    seen = changes(db, frontier)
    assert sum(seen.values()) >= 7
    assert {id_ for (id_,) in db.execute("SELECT id FROM item WHERE id BETWEEN 2001 AND 2007")} <= set(seen)
    pass_all(db, "first", "second")
    purge(db)
    purge(db)
    assert size(db) < 3 * LARGE


def test_a_cut_finds_its_changes_after_the_buffer_was_truncated(db: Connection, other: Connection) -> None:
    """Its snapshot is older than the TRUNCATE, which ignores snapshots, and it had not read the buffer yet."""
    write(db)
    pass_all(db, "first", "second")
    frontier = cut(db)
    write(db, 5)
    other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
    cut(other)
    write(db)
    purge(db)  # changes tables; the five rows keep the first
    pass_all(db, "first")
    purge(db)
    assert sum(changes(other, frontier).values()) == 5
    assert sum(changes(db, frontier).values()) == ROWS + 5


def test_a_reader_in_its_initial_population_keeps_everything(db: Connection) -> None:
    """Its cut is taken, but its frontier is not stored yet."""
    db.execute(
        "UPDATE pgtrickle.pgt_stream_tables SET frontier = NULL, reinit_reason = 'test', claimed_by = gen_random_uuid()"
        " WHERE pgt_name = 'second'"
    )
    frontier = cut(db)
    write(db)
    pass_all(db, "first")
    assert purge(db) == 0
    assert sum(changes(db, frontier).values()) == ROWS
    set_frontier(db, "second", cut(db))
    assert purge(db) > LARGE


def test_a_frontier_of_another_server_is_ignored(db: Connection) -> None:
    """Its reader re-initializes; until then, everything is kept."""
    moved = {"node": "1/1", "snapshot": "9999999:9999999:", "meaning": ""}
    set_frontier(db, "second", moved)
    write(db)
    db.execute("UPDATE pgtrickle.pgt_stream_tables SET claimed_by = gen_random_uuid() WHERE pgt_name = 'second'")
    pass_all(db, "first")
    assert purge(db) == 0
    assert size(db) > LARGE


def test_an_old_snapshot_purges_nothing(db: Connection, other: Connection) -> None:
    """It does not see later changes."""
    other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    other.execute("SELECT 1")
    write(db)
    pass_all(db, "first", "second")
    assert purge(other) == 0
    other.rollback()
    assert purge(db) > LARGE


def test_purging_gives_up_soon_during_reads(db: Connection, other: Connection) -> None:
    """Purging has its own lock timeout, and writers already use the other table."""
    write(db)
    changes(other, cut(other))
    pass_all(db, "first", "second")
    with db.transaction():
        assert purge(db) == 0
        assert one(db, "SHOW lock_timeout") == "0"
        write(db)
    other.rollback()
    pass_all(db, "first", "second")
    assert purge(db) > 0


def test_purging_gives_up_soon_while_the_buffer_is_being_altered(db: Connection, other: Connection) -> None:
    """As when a stream table on more columns is created in a transaction that stays open."""
    write(db)
    pass_all(db, "first", "second")
    other.execute(f"LOCK TABLE pgtrickle_changes.changes_{stable_name(other)}")
    db.execute("SET statement_timeout = '5s'")
    assert purge(db) == 0
    other.rollback()
    assert purge(db) > LARGE


def test_others_may_not_purge(db: Connection, database: TestDatabase) -> None:
    """In a transaction that stays open, it would block refreshes."""
    with (
        psycopg.connect(database.direct_dsn_as(database.create_role("nobody"))) as stranger,
        pytest.raises(psycopg.errors.InsufficientPrivilege, match="purge"),
    ):
        stranger.execute("SELECT pgtrickle._purge('x')")


def test_new_columns_reach_both_tables(db: Connection) -> None:
    """Even while the second is the one that is written."""
    write(db)
    pass_all(db, "first", "second")
    purge(db)
    frontier = cut(db)
    db.execute("ALTER TABLE item ADD COLUMN more int")
    db.execute("SELECT pgtrickle.create_stream_table('third', 'SELECT id, more FROM item')")
    db.execute("INSERT INTO item VALUES (-1, 'pad', 5)")
    assert changes(db, frontier) == {-1: 1}
    buffer = f"changes_{stable_name(db)}"
    assert one(db, f"SELECT c3 FROM pgtrickle_changes.{buffer} WHERE c1 = -1") == 5
    for name in ("first", "second", "third"):
        db.execute("SELECT pgtrickle.drop_stream_table(%s)", [name])
    left = (
        "SELECT relname FROM pg_class WHERE relnamespace = 'pgtrickle_changes'::regnamespace AND relkind IN ('r', 'S')"
    )
    assert {name for (name,) in db.execute(left)} == {"pgt_activity", "pgt_markers"}


def test_no_change_is_lost_or_duplicated_while_tables_switch(db: Connection, database: TestDatabase) -> None:
    """Writers with savepoints, rollbacks and long transactions; two readers that purge after every batch."""
    stop, errors = threading.Event(), []

    def writer(seed: int) -> None:
        rng = random.Random(seed)
        try:
            with psycopg.connect(database.direct_dsn, autocommit=True) as conn:
                while not stop.is_set():
                    with conn.transaction(force_rollback=rng.random() < 0.2):
                        write(conn, rng.randint(1, 300))
                        with conn.transaction(force_rollback=rng.random() < 0.5):
                            write(conn, rng.randint(1, 50))
                        if rng.random() < 0.2:
                            stop.wait(0.3)
                            write(conn, 5)
        except BaseException as error:
            errors.append(error)
            stop.set()

    totals: dict[str, Counter[int]] = {"first": Counter(), "second": Counter()}
    frontiers = {name: cut(db) for name in totals}
    for name, frontier in frontiers.items():
        set_frontier(db, name, frontier)
    freed: list[int] = []

    def batch(conn: Connection, name: str) -> None:
        with conn.transaction():
            conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            now = cut(conn)
            totals[name].update(changes(conn, frontiers[name]))
        set_frontier(conn, name, now)
        frontiers[name] = now
        freed.append(purge(conn))

    def reader(name: str) -> None:
        try:
            with psycopg.connect(database.direct_dsn, autocommit=True) as conn:
                while not stop.is_set():
                    batch(conn, name)
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=writer, args=(seed,)) for seed in range(3)]
    threads += [threading.Thread(target=reader, args=(name,)) for name in totals]
    for thread in threads:
        thread.start()
    stop.wait(6)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    expected = Counter(id_ for (id_,) in db.execute("SELECT id FROM item"))
    for name in totals:
        batch(db, name)
        assert totals[name] == expected
    assert sum(1 for bytes_ in freed if bytes_) >= 3
