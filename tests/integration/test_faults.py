"""Faults around a refresh: each gives a clear error or is repaired, and no change is lost or duplicated."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

import pgtrickle
from pgtrickle.cli.diagnostics import find_problems
from pgtrickle.embedded.account import hand_over, server_account
from pgtrickle.embedded.binaries import ServerVersion, find_binaries
from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.errors import PgtrickleError, PrivilegeError, RefreshConflictError
from tests.support.database import SERVER_SETTINGS, TestDatabase, prepare_server
from tests.support.killable import stopped_at
from tests.support.oracle import assert_equal_to_query

Connection = psycopg.Connection[Any]

KEPT = "SELECT id, grp, val FROM item WHERE val > 10"
TOTALS = "SELECT grp, count(*) AS n, sum(val) AS total FROM item GROUP BY grp"


@pytest.fixture
def db(database: TestDatabase, conn: Connection) -> Iterator[pgtrickle.Database]:
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        conn.execute("CREATE TABLE item (id int PRIMARY KEY, grp int, val int, spare text)")
        conn.execute("CREATE SEQUENCE item_id START 1000")
        conn.execute("INSERT INTO item SELECT i, i % 5, i, 'spare' FROM generate_series(1, 60) AS i")
        yield db


def _expire_claims(conn: Connection) -> None:
    """Expire the lease of the claim's holder, as the catalog's owner may do."""
    conn.execute("UPDATE pgtrickle.pgt_services SET lease_expires = now() - interval '1 second'")


def _action(db: pgtrickle.Database, name: str) -> tuple[str, str]:
    """The last refresh in the history: action and reason."""
    last = db.history(name, 1)[0]
    assert last["status"] == "COMPLETED", last
    return last["action"], last["reason"] or ""


# -- several processes -------------------------------------------------------------------------------------------------


def test_one_of_two_processes_refreshes_and_the_other_gets_an_error(
    database: TestDatabase, db: pgtrickle.Database, conn: Connection
) -> None:
    db.create_stream_table("totals", TOTALS)
    conn.execute("UPDATE item SET val = val + 1")
    with stopped_at(database.dsn, "cut", "totals") as child:
        with pytest.raises(RefreshConflictError, match="totals"):
            db.refresh("totals")
        conn.execute("UPDATE item SET val = val + 1 WHERE id < 10")
        code, output, errors = child.let_go()
        assert code == 0, errors
        assert "DIFFERENTIAL" in output
    db.refresh("totals")
    assert_equal_to_query(conn, "totals", TOTALS)


@pytest.mark.parametrize("step", ["cut", "fetch", "spark"])
def test_a_zombie_whose_claim_was_taken_over_writes_nothing(
    step: str, database: TestDatabase, db: pgtrickle.Database, conn: Connection
) -> None:
    db.create_stream_table("totals", TOTALS)

    def take_over(name: str) -> None:
        if name == step:
            _expire_claims(conn)
            db.refresh("totals")
            conn.execute("UPDATE item SET val = val + 1 WHERE grp = 2")

    with pgtrickle.connect(database.dsn, on_step=take_over) as zombie:
        conn.execute("INSERT INTO item SELECT i, i % 7, i FROM generate_series(100, 120) AS i")
        with pytest.raises(RefreshConflictError, match="over"):
            zombie.refresh("totals")
    db.refresh("totals")
    assert_equal_to_query(conn, "totals", TOTALS)


def test_ctrl_c_during_a_statement_releases_the_claim(
    database: TestDatabase, db: pgtrickle.Database, conn: Connection
) -> None:
    db.create_stream_table("totals", TOTALS)

    def interrupt(name: str) -> None:
        if name == "commit":
            interrupted.conn.pgconn.send_query(b"SELECT pg_sleep(600)")
            raise KeyboardInterrupt

    with pgtrickle.connect(database.dsn, on_step=interrupt) as interrupted:
        conn.execute("UPDATE item SET val = val + 1 WHERE grp = 2")
        with pytest.raises(KeyboardInterrupt):
            interrupted.refresh("totals")
    assert conn.execute("SELECT claimed_by FROM pgtrickle.pgt_stream_tables").fetchall() == [(None,)]
    db.refresh("totals")
    assert_equal_to_query(conn, "totals", TOTALS)


def test_a_claim_is_not_taken_over_during_the_apply(
    database: TestDatabase, db: pgtrickle.Database, conn: Connection
) -> None:
    db.create_stream_table("totals", TOTALS)

    def try_to_take_over(name: str) -> None:
        if name == "load":
            with pytest.raises(RefreshConflictError):
                db.refresh("totals")

    with pgtrickle.connect(database.dsn, on_step=try_to_take_over) as slow:
        conn.execute("UPDATE item SET val = val + 1")
        conn.execute("UPDATE pgtrickle.pgt_services SET lease_expires = now()")
        slow.refresh("totals")
    assert_equal_to_query(conn, "totals", TOTALS)


def test_changes_since_the_cut_of_an_initial_population_are_kept_for_it(
    database: TestDatabase, db: pgtrickle.Database, conn: Connection
) -> None:
    """Another stream table on the same source continues meanwhile, and purges what it no longer needs."""
    db.create_stream_table("totals", TOTALS)

    def go_on(name: str) -> None:
        if name == "spark":
            conn.execute("UPDATE item SET val = val + 100 WHERE grp = 1")
            db.refresh("totals")

    with pgtrickle.connect(database.dsn, on_step=go_on) as slow:
        slow.create_stream_table("kept", KEPT)
    db.refresh_all()
    assert_equal_to_query(conn, "totals", TOTALS)
    assert_equal_to_query(conn, "kept", KEPT)


def test_changes_since_the_cut_of_a_reinitialization_are_kept_for_it(
    database: TestDatabase, db: pgtrickle.Database, conn: Connection
) -> None:
    db.create_stream_table("totals", TOTALS)
    db.create_stream_table("kept", KEPT)

    def go_on(name: str) -> None:
        if name == "spark":
            conn.execute("INSERT INTO item VALUES (200, 1, 200)")
            db.refresh("totals")

    conn.execute("TRUNCATE item")
    db.refresh("totals")
    conn.execute("INSERT INTO item SELECT i, i % 5, i FROM generate_series(100, 110) AS i")
    with pgtrickle.connect(database.dsn, on_step=go_on) as slow:
        slow.refresh("kept")
    db.refresh_all()
    assert_equal_to_query(conn, "totals", TOTALS)
    assert_equal_to_query(conn, "kept", KEPT)


def test_many_rows_change_at_once(db: pgtrickle.Database, conn: Connection) -> None:
    """The sum of inserted and deleted rows exceeds a smallint, but neither number does."""
    db.create_stream_table("kept", KEPT)
    conn.execute("INSERT INTO item SELECT i, 1, 100 FROM generate_series(1000, 21000) AS i")
    db.refresh("kept")
    conn.execute("UPDATE item SET id = -id WHERE id >= 1000")
    db.refresh("kept")
    assert_equal_to_query(conn, "kept", KEPT)


# -- the sources altered while a writer works ----------------------------------------------------------------------------


@contextmanager
def _writer(dsn: str, statements: Sequence[str]) -> Iterator[Callable[[], None]]:
    """A continuous writer; calling the value waits for two more rounds. An error of the writer fails the test."""
    rounds = threading.Condition()
    count, stop, errors = 0, threading.Event(), list[BaseException]()

    def write() -> None:
        nonlocal count
        try:
            with psycopg.connect(dsn, autocommit=True) as conn:
                while not stop.is_set():
                    for statement in statements:
                        conn.execute(statement.encode())
                    with rounds:
                        count += 1
                        rounds.notify_all()
                    stop.wait(0.005)  # leaves the source's lock to those who alter it
        except BaseException as error:
            errors.append(error)
            with rounds:
                rounds.notify_all()

    def two_more() -> None:
        with rounds:
            wanted = count + 2
            assert rounds.wait_for(lambda: count >= wanted or errors, 30)
        assert errors == []

    thread = threading.Thread(target=write)
    thread.start()
    try:
        two_more()
        yield two_more
    finally:
        stop.set()
        thread.join()
    assert errors == []


_BY_NAME = (
    "INSERT INTO item (id, grp, val) VALUES (nextval('item_id'), 2, 50), (nextval('item_id'), 9, 5)",
    "UPDATE item SET grp = (grp + 1) % 7 WHERE id % 13 = 0",
    "DELETE FROM item WHERE id = (SELECT min(id) FROM item)",
)
_BY_POSITION = (
    "INSERT INTO item VALUES (nextval('item_id'), 2, 50), (nextval('item_id'), 9, 5)",
    "UPDATE item SET grp = (grp + 1) % 7 WHERE id % 13 = 0",
    "DELETE FROM item WHERE id = (SELECT min(id) FROM item)",
)


@dataclass(frozen=True)
class _Ddl:
    """An alteration of a source, and the text of the two queries afterwards."""

    name: str
    statements: tuple[str, ...]
    writes: tuple[str, ...] = _BY_NAME
    kept: str = KEPT
    totals: str = TOTALS
    reason: str | None = None  # what the history says if the stream table has to start over


_DDL = (
    _Ddl(
        "used column renamed",
        ("ALTER TABLE item RENAME COLUMN val TO amount",),
        _BY_POSITION,
        "SELECT id, grp, amount AS val FROM item WHERE amount > 10",
        "SELECT grp, count(*) AS n, sum(amount) AS total FROM item GROUP BY grp",
        "renamed",
    ),
    _Ddl("unused column renamed", ("ALTER TABLE item RENAME COLUMN spare TO extra",)),
    _Ddl("unused column dropped", ("ALTER TABLE item DROP COLUMN spare",)),
    _Ddl("column added", ("ALTER TABLE item ADD COLUMN more int DEFAULT 3",)),
    _Ddl("unused column retyped", ("ALTER TABLE item ALTER COLUMN spare TYPE varchar(50)",)),
    _Ddl(
        "neighbours swap their names",
        (
            "ALTER TABLE item RENAME COLUMN grp TO other",
            "ALTER TABLE item RENAME COLUMN val TO grp",
            "ALTER TABLE item RENAME COLUMN other TO val",
        ),
        (
            "INSERT INTO item VALUES (nextval('item_id'), 2, 50), (nextval('item_id'), 9, 5)",
            "DELETE FROM item WHERE id = (SELECT min(id) FROM item)",
        ),
        "SELECT id, val AS grp, grp AS val FROM item WHERE grp > 10",
        "SELECT val AS grp, count(*) AS n, sum(grp) AS total FROM item GROUP BY val",
        "renamed",
    ),
    _Ddl(
        "table replaced by another of its name",
        ("ALTER TABLE item RENAME TO item_old", "CREATE TABLE item (LIKE item_old INCLUDING ALL)"),
        (*_BY_NAME, "UPDATE item SET val = val + 1"),
        KEPT.replace("item", "item_old"),
        TOTALS.replace("item", "item_old"),
    ),
    _Ddl("table moved to another schema", ("CREATE SCHEMA store", "ALTER TABLE item SET SCHEMA store")),
    _Ddl("truncated", ("TRUNCATE item",), reason="truncated"),
)


@pytest.mark.parametrize("ddl", _DDL, ids=lambda ddl: ddl.name.replace(" ", "-"))
def test_a_source_altered_under_a_writer(
    ddl: _Ddl, database: TestDatabase, db: pgtrickle.Database, conn: Connection
) -> None:
    if "SET SCHEMA" in ddl.statements[-1]:
        path = sql.SQL("ALTER ROLE app IN DATABASE {} SET search_path = public, store")
        conn.execute(path.format(sql.Identifier(database.name)))
        conn.execute("SET search_path = public, store")
    db.create_stream_table("kept", KEPT)
    db.create_stream_table("totals", TOTALS)
    with _writer(database.dsn, ddl.writes) as two_more:
        with conn.transaction():
            for statement in ddl.statements:
                conn.execute(statement.encode())
        two_more()
    results = db.refresh_all()
    assert_equal_to_query(conn, "kept", ddl.kept)
    assert_equal_to_query(conn, "totals", ddl.totals)
    if ddl.reason is not None:
        assert {result.action for result in results} == {"REINITIALIZE"}
        assert ddl.reason in _action(db, "kept")[1]
    with _writer(database.dsn, ddl.writes):
        pass
    healed = db.refresh_all()
    assert_equal_to_query(conn, "kept", ddl.kept)
    assert_equal_to_query(conn, "totals", ddl.totals)
    if "replaced" not in ddl.name:  # nobody writes to the table of the new name
        assert {result.action for result in healed} == {"DIFFERENTIAL"}


@pytest.mark.pgversions
@pytest.mark.parametrize("rewrite", ["ALTER TABLE kind ADD COLUMN x float DEFAULT random()", "TRUNCATE kind"])
def test_a_table_rewritten_while_the_cut_waits_for_it(
    rewrite: str, database: TestDatabase, db: pgtrickle.Database, conn: Connection
) -> None:
    """Neither statement respects older snapshots: with one of those the table is empty."""
    conn.execute("CREATE TABLE kind (grp int PRIMARY KEY, name text)")
    conn.execute("INSERT INTO kind SELECT i, 'kind ' || i FROM generate_series(0, 4) AS i")
    query = "SELECT i.id, k.name FROM item AS i JOIN kind AS k USING (grp)"
    db.create_stream_table("named", query)
    conn.execute("INSERT INTO item VALUES (2000, 3, 77, 'committed before the cut')")
    with psycopg.connect(database.direct_dsn) as owner:
        owner.execute(rewrite.encode())
        refresh = threading.Thread(target=db.refresh, args=("named",))  # with a plan that is there already
        refresh.start()
        while conn.execute(
            "SELECT count(*) FROM pg_locks WHERE pid = %s AND NOT granted", (db.conn.info.backend_pid,)
        ).fetchone() == (0,):
            assert refresh.is_alive()
        owner.commit()
        refresh.join()
    assert_equal_to_query(conn, "named", query)


def test_an_expression_that_fails_for_rows_that_the_query_does_not_reach(
    db: pgtrickle.Database, conn: Connection
) -> None:
    conn.execute("CREATE TABLE bin (id int PRIMARY KEY, kind text)")
    conn.execute("INSERT INTO bin VALUES (1, 'used'), (2, 'void')")
    query = (
        "SELECT b.kind, sum(100 / i.val) AS share FROM item i JOIN bin b ON b.id = i.grp WHERE b.kind <> 'void'"
        " GROUP BY b.kind"
    )
    db.create_stream_table("shares", query)
    conn.execute("INSERT INTO item VALUES (9001, 1, 7), (9002, 2, 0)")
    [result] = db.refresh("shares")
    assert result.action == "FULL"
    assert result.reason is not None
    assert "division by zero" in result.reason
    assert_equal_to_query(conn, "shares", query)
    conn.execute("UPDATE item SET val = val + 1 WHERE id = 9001")
    assert db.refresh("shares")[0].action == "DIFFERENTIAL"
    assert_equal_to_query(conn, "shares", query)


def test_a_dropped_key_is_noticed_before_rows_repeat_it(
    database: TestDatabase, db: pgtrickle.Database, conn: Connection
) -> None:
    db.create_stream_table("kept", KEPT)
    with _writer(database.dsn, _BY_NAME) as two_more:
        conn.execute("ALTER TABLE item DROP CONSTRAINT item_pkey")
        two_more()
    conn.execute("INSERT INTO item (id, grp, val) SELECT id, grp, val FROM item WHERE val > 30")
    with pytest.raises(PgtrickleError, match="key") as raised:
        db.refresh("kept")
    assert raised.value.hint


def test_columns_in_use_are_neither_dropped_nor_retyped(db: pgtrickle.Database, conn: Connection) -> None:
    db.create_stream_table("kept", KEPT)
    for statement in ("ALTER TABLE item DROP COLUMN val", "DROP TABLE item"):
        with pytest.raises(psycopg.errors.DependentObjectsStillExist):
            conn.execute(statement.encode())
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        conn.execute("ALTER TABLE item ALTER COLUMN val TYPE bigint")
    conn.execute("UPDATE item SET val = val + 1")
    db.refresh("kept")
    assert_equal_to_query(conn, "kept", KEPT)


def test_a_transaction_with_a_renamed_source_that_commits_late(
    database: TestDatabase, db: pgtrickle.Database, conn: Connection
) -> None:
    """Its rows were not captured, and the marker becomes visible long after it was written."""
    renamed = "SELECT id, grp, amount AS val FROM item WHERE amount > 10"
    conn.execute("CREATE TABLE elsewhere (n int)")
    db.create_stream_table("kept", KEPT)
    with psycopg.connect(database.direct_dsn) as late:
        late.execute("INSERT INTO elsewhere VALUES (1)")  # has its xid before the rename
        conn.execute("ALTER TABLE item RENAME COLUMN val TO amount")
        late.execute("INSERT INTO item VALUES (500, 1, 500)")
        for _ in range(130):
            conn.execute("INSERT INTO elsewhere VALUES (2)")
        db.refresh("kept")
        late.commit()
    db.refresh("kept")
    assert_equal_to_query(conn, "kept", renamed)


def test_partitions_come_and_go(database: TestDatabase, db: pgtrickle.Database, conn: Connection) -> None:
    query = "SELECT grp, count(*) AS n, sum(val) AS total FROM part GROUP BY grp"
    conn.execute("CREATE TABLE part (id int, grp int, val int) PARTITION BY LIST (grp)")
    conn.execute("CREATE TABLE part_1 PARTITION OF part FOR VALUES IN (1)")
    conn.execute("CREATE TABLE part_2 PARTITION OF part FOR VALUES IN (2)")
    conn.execute("CREATE TABLE part_3 (val int, id int, grp int)")  # other column numbers than its parent to be
    conn.execute("CREATE TABLE part_rest PARTITION OF part DEFAULT")
    conn.execute("INSERT INTO part SELECT i, i % 2 + 1, i FROM generate_series(1, 40) AS i")
    conn.execute("INSERT INTO part_3 SELECT i, i, 3 FROM generate_series(1, 10) AS i")
    db.create_stream_table("per_group", query)
    writes = (
        "INSERT INTO part SELECT i, i % 6, i FROM generate_series(1, 6) AS i",
        "UPDATE part SET grp = 5 - grp WHERE id = 4 AND grp < 5",
    )
    for statement in (
        "ALTER TABLE part ATTACH PARTITION part_3 FOR VALUES IN (3)",
        "ALTER TABLE part DETACH PARTITION part_2",
        "DROP TABLE part_3",
        "CREATE TABLE part_3 PARTITION OF part FOR VALUES IN (3)",
        "TRUNCATE part_1",
    ):
        with _writer(database.dsn, writes) as two_more:
            with conn.transaction():
                conn.execute("LOCK TABLE part IN ACCESS EXCLUSIVE MODE")
                # No row of the default partition may belong to a new one.
                conn.execute("CREATE TEMP TABLE homeless ON COMMIT DROP AS SELECT * FROM part_rest WHERE grp IN (2, 3)")
                conn.execute("DELETE FROM part_rest WHERE grp IN (2, 3)")
                conn.execute(statement.encode())
                conn.execute("INSERT INTO part SELECT * FROM homeless")
            two_more()
        db.refresh("per_group")
        assert_equal_to_query(conn, "per_group", query)
        action, reason = _action(db, "per_group")
        assert action == "REINITIALIZE", statement
        assert ("truncated" if "TRUNCATE" in statement else "partitions") in reason
        conn.execute("INSERT INTO part VALUES (1, 1, 1), (2, 2, 2), (3, 3, 3)")
        conn.execute("UPDATE part_1 SET val = val + 1 WHERE id < 3")
        db.refresh("per_group")
        assert_equal_to_query(conn, "per_group", query)
        assert _action(db, "per_group")[0] == "DIFFERENTIAL", statement


def test_a_merge_that_moves_rows_between_partitions(db: pgtrickle.Database, conn: Connection) -> None:
    query = "SELECT grp, count(*) AS n, sum(val) AS total FROM part GROUP BY grp"
    conn.execute("CREATE TABLE part (id int, grp int, val int) PARTITION BY LIST (grp)")
    conn.execute("CREATE TABLE part_1 PARTITION OF part FOR VALUES IN (1)")
    conn.execute("CREATE TABLE part_rest PARTITION OF part DEFAULT")
    conn.execute("INSERT INTO part SELECT i, i % 3, i FROM generate_series(1, 30) AS i")
    db.create_stream_table("per_group", query)
    conn.execute(
        "MERGE INTO part AS p USING generate_series(1, 12) AS n ON p.id = n"
        " WHEN MATCHED THEN UPDATE SET grp = (p.grp + 1) % 3, val = p.val + 1"
    )
    db.refresh("per_group")
    assert_equal_to_query(conn, "per_group", query)


def test_writes_during_a_disabled_trigger_are_noticed(db: pgtrickle.Database, conn: Connection) -> None:
    db.create_stream_table("kept", KEPT)
    conn.execute("ALTER TABLE item DISABLE TRIGGER USER")
    conn.execute("INSERT INTO item VALUES (100, 1, 100)")
    conn.execute("DELETE FROM item WHERE id = 20")
    conn.execute("ALTER TABLE item ENABLE TRIGGER USER")
    conn.execute("INSERT INTO item VALUES (101, 1, 101)")
    db.refresh("kept")
    assert_equal_to_query(conn, "kept", KEPT)
    action, reason = _action(db, "kept")
    assert (action, "triggers" in reason) == ("REINITIALIZE", True)
    conn.execute("INSERT INTO item VALUES (102, 1, 102)")
    db.refresh("kept")
    assert_equal_to_query(conn, "kept", KEPT)


def test_a_trigger_that_stays_disabled_loses_nothing(db: pgtrickle.Database, conn: Connection) -> None:
    db.create_stream_table("kept", KEPT)
    conn.execute("ALTER TABLE item DISABLE TRIGGER USER")
    for i in (100, 101, 102):
        conn.execute("INSERT INTO item VALUES (%s, 1, 100)", [i])
        db.refresh("kept")
        assert_equal_to_query(conn, "kept", KEPT)


def test_a_source_dropped_with_cascade_has_a_clear_error(db: pgtrickle.Database, conn: Connection) -> None:
    conn.execute("CREATE TABLE other (id int PRIMARY KEY)")
    db.create_stream_table("kept", KEPT)
    db.create_stream_table("others", "SELECT id FROM other")
    conn.execute("DROP TABLE item CASCADE")
    conn.execute("INSERT INTO other VALUES (1)")
    with pytest.raises(PgtrickleError, match="kept") as raised:
        db.refresh("kept")
    assert raised.value.hint
    assert conn.execute("SELECT count(*) FROM kept").fetchone() == (50,)
    db.refresh("others")
    assert_equal_to_query(conn, "others", "SELECT id FROM other")
    db.drop_stream_table("kept")
    db.refresh_all()
    assert [table.name.rpartition(".")[2] for table in db.stream_tables()] == ["others"]


@pytest.mark.parametrize("noticed", [False, True], ids=["before a refresh", "after one failed"])
def test_a_new_query_repairs_a_stream_table_after_a_dropped_column(
    noticed: bool, db: pgtrickle.Database, conn: Connection
) -> None:
    conn.execute("CREATE TABLE sale (id int PRIMARY KEY, place text, val int)")
    conn.execute("INSERT INTO sale SELECT i, 'p' || i % 3, i FROM generate_series(1, 20) AS i")
    db.create_stream_table("places", "SELECT place, count(*) AS n FROM sale WHERE val > 3 GROUP BY place")
    conn.execute("ALTER TABLE sale DROP COLUMN val CASCADE")
    [status] = db.status()
    assert status.status_reason == "its query view was dropped, together with something it reads"
    [finding] = [found for found in find_problems(conn, 3600) if found.check == "stream-table"]
    assert "pgtrickle alter public.places --query" in finding.remedy
    if noticed:
        with pytest.raises(PrivilegeError, match="query view was dropped") as raised:
            db.refresh("places")
        assert raised.value.hint == finding.remedy
        assert db.stream_table("places").status == "SUSPENDED"
    query = "SELECT place, count(*) AS n FROM sale WHERE id > 3 GROUP BY place"
    assert db.alter_stream_table("places", query=query).status == "ACTIVE"
    [result] = db.refresh_all()
    assert (result.action, result.reason) == ("REINITIALIZE", "query changed")
    assert_equal_to_query(conn, "places", query)
    conn.execute("DELETE FROM sale WHERE id > 15")
    assert db.refresh("places")[0].action == "DIFFERENTIAL"
    assert_equal_to_query(conn, "places", query)
    assert db.status()[0].status_reason is None
    assert [found for found in find_problems(conn, 3600) if found.check == "stream-table"] == []


# -- costs -------------------------------------------------------------------------------------------------------------


def test_auto_uses_the_whole_query_if_changes_would_cost_more(db: pgtrickle.Database, conn: Connection) -> None:
    db.create_stream_table("totals", TOTALS)
    conn.execute("UPDATE item SET val = val + 1")
    many = "INSERT INTO item SELECT {0} + i, i % 5, 1, NULL FROM generate_series(1, 40000) AS i"
    conn.execute(many.format(10_000).encode())
    assert db.refresh("totals")[0].action == "DIFFERENTIAL"
    measured = "SELECT full_seconds > 0, row_seconds > 0 FROM pgtrickle.pgt_stream_tables"
    assert conn.execute(measured).fetchone() == (True, True)
    conn.execute("UPDATE pgtrickle.pgt_stream_tables SET full_seconds = 0.2, row_seconds = 0.001")
    conn.execute(many.format(100_000).encode())
    (result,) = db.refresh("totals")
    assert result.action == "FULL"
    assert result.reason is not None
    assert result.reason == "40000 changes would take about 40.0 s, and the last refresh in full took 0.2 s"
    assert_equal_to_query(conn, "totals", TOTALS)
    # It is asked anew each time: few changes are cheaper, and the estimate does not stay as it was.
    assert conn.execute("SELECT row_seconds < 0.001 FROM pgtrickle.pgt_stream_tables").fetchone() == (True,)
    conn.execute("UPDATE item SET val = val + 1 WHERE id < 10")
    assert db.refresh("totals")[0].action == "DIFFERENTIAL"
    assert_equal_to_query(conn, "totals", TOTALS)
    # Who wants it differential gets that.
    db.alter_stream_table("totals", refresh_mode="DIFFERENTIAL")
    conn.execute("UPDATE pgtrickle.pgt_stream_tables SET full_seconds = 0.2, row_seconds = 0.001")
    conn.execute(many.format(200_000).encode())
    assert db.refresh("totals")[0].action == "DIFFERENTIAL"
    assert_equal_to_query(conn, "totals", TOTALS)


# -- the stream table altered by hand ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "by_hand",
    [
        "DELETE FROM kept WHERE id IN (40, 41)",
        "UPDATE kept SET val = -1 WHERE id IN (40, 41)",
        "INSERT INTO kept VALUES (300, 1, 300)",
    ],
)
def test_a_stream_table_changed_by_hand_recovers(
    by_hand: str, database: TestDatabase, db: pgtrickle.Database, conn: Connection
) -> None:
    db.create_stream_table("kept", KEPT)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        conn.execute(by_hand.encode())
    with psycopg.connect(database.superuser_dsn) as superuser:
        superuser.execute("ALTER TABLE kept DISABLE TRIGGER ALL")
        superuser.execute(by_hand.encode())
        superuser.execute("ALTER TABLE kept ENABLE TRIGGER ALL")
    conn.execute("DELETE FROM item WHERE id = 40")
    conn.execute("INSERT INTO item VALUES (300, 2, 300)")
    db.refresh("kept")
    assert_equal_to_query(conn, "kept", KEPT)
    conn.execute("UPDATE item SET val = val + 1")
    db.refresh("kept")
    assert_equal_to_query(conn, "kept", KEPT)


# -- the server and the connection -------------------------------------------------------------------------------------


def test_the_server_restarted_between_refreshes(
    server: EmbeddedServer, database: TestDatabase, db: pgtrickle.Database, conn: Connection
) -> None:
    db.create_stream_table("totals", TOTALS)
    conn.execute("UPDATE item SET val = val + 1 WHERE id < 10")
    server.restart()
    with pgtrickle.connect(database.dsn) as again, psycopg.connect(database.direct_dsn, autocommit=True) as writer:
        writer.execute("UPDATE item SET val = val + 1 WHERE id > 50")
        again.refresh("totals")
        assert_equal_to_query(writer, "totals", TOTALS)
        assert _action(again, "totals")[0] == "DIFFERENTIAL"


@pytest.mark.parametrize("step", ["cut", "fetch", "load", "commit"])
def test_the_connection_cut(step: str, database: TestDatabase, db: pgtrickle.Database, conn: Connection) -> None:
    db.create_stream_table("totals", TOTALS)
    conn.execute("UPDATE item SET val = val + 1")

    def cut(name: str) -> None:
        if name == step:
            with psycopg.connect(database.superuser_dsn, autocommit=True) as superuser:
                superuser.execute("SELECT pg_terminate_backend(%s, 10000)", [victim.conn.info.backend_pid])

    with (
        pgtrickle.connect(database.dsn, on_step=cut) as victim,
        pytest.raises((psycopg.OperationalError, PgtrickleError)),
    ):
        victim.refresh("totals")
    _expire_claims(conn)
    conn.execute("UPDATE item SET val = val + 1 WHERE grp = 2")
    db.refresh("totals")
    assert_equal_to_query(conn, "totals", TOTALS)


@contextmanager
def _small_disk(megabytes: int) -> Iterator[Path]:
    """A separate file system that the server's account can write to."""
    if os.geteuid() != 0:
        pytest.skip("a small file system can only be mounted by root")
    directory = Path(tempfile.mkdtemp(prefix="pgtrickle-disk-"))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(directory)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        directory.rmdir()
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        hand_over(directory, server_account())
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)
        directory.rmdir()


def test_a_full_disk_at_the_apply(database: TestDatabase, db: pgtrickle.Database, conn: Connection) -> None:
    with _small_disk(2) as disk, psycopg.connect(database.superuser_dsn, autocommit=True) as superuser:
        space = sql.Identifier(f"small_{database.name}")
        superuser.execute(sql.SQL("CREATE TABLESPACE {} LOCATION {}").format(space, sql.Literal(str(disk))))
        try:
            db.create_stream_table("kept", KEPT)
            superuser.execute(sql.SQL("ALTER TABLE kept SET TABLESPACE {}").format(space))
            before = conn.execute("SELECT count(*) FROM kept").fetchone()
            conn.execute("INSERT INTO item SELECT i, 1, 100 FROM generate_series(1000, 80000) AS i")
            with pytest.raises((psycopg.errors.DiskFull, PgtrickleError), match="No space left"):
                db.refresh("kept")
            assert conn.execute("SELECT count(*) FROM kept").fetchone() == before
            failed = db.history("kept", 1)[0]
            assert (failed["status"], failed["sqlstate"]) == ("FAILED", "53100")
            subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
            conn.execute("DELETE FROM item WHERE id % 1000 = 0")
            db.refresh("kept")
            assert_equal_to_query(conn, "kept", KEPT)
        finally:
            superuser.execute("ALTER TABLE kept SET TABLESPACE pg_default")
            superuser.execute(sql.SQL("DROP TABLESPACE {}").format(space))


def test_a_dump_restored_into_another_server(
    database: TestDatabase, db: pgtrickle.Database, conn: Connection, pg_version: ServerVersion
) -> None:
    db.create_stream_table("kept", KEPT)
    db.create_stream_table("totals", TOTALS)
    conn.execute("UPDATE item SET val = val + 1 WHERE id < 20")  # not refreshed: the dump holds the change, too
    base = Path(tempfile.mkdtemp(prefix="pgtrickle-dump-"))
    try:
        binaries = find_binaries(pg_version)
        dump = str(base / "dump")
        with EmbeddedServer(base / "data", version=pg_version, settings=SERVER_SETTINGS) as other:
            prepare_server(other)
            with psycopg.connect(other.dsn(), autocommit=True) as superuser:
                superuser.execute("SELECT pg_current_xact_id()")
                superuser.execute("CREATE TABLE shifts_the_oids ()")
                superuser.execute("CREATE DATABASE copy OWNER app TEMPLATE template0")
            with psycopg.connect(other.dsn("copy"), autocommit=True) as superuser:
                # A restore gives tables other OIDs than they had; here that is certain.
                superuser.execute(
                    "DO $$ BEGIN FOR i IN 1..50 LOOP CREATE TEMP TABLE t (); DROP TABLE t; END LOOP; END $$"
                )
            _run(binaries / "pg_dump", "-Fc", "-f", dump, "-d", database.superuser_dsn)
            _run(binaries / "pg_restore", "--exit-on-error", "-d", other.dsn("copy"), dump)
            dsn = other.dsn("copy", "app")
            with pgtrickle.connect(dsn) as restored, psycopg.connect(dsn, autocommit=True) as writer:
                for i in range(3):
                    writer.execute("UPDATE item SET val = val + 1 WHERE grp = %s", [i])
                    writer.execute("INSERT INTO item VALUES (%s, 3, 77)", [500 + i])
                    restored.refresh_all()
                    assert_equal_to_query(writer, "kept", KEPT)
                    assert_equal_to_query(writer, "totals", TOTALS)
                    if i == 0:
                        action, reason = _action(restored, "kept")
                        assert (action, "restored" in reason) == ("REINITIALIZE", True)
                assert _action(restored, "kept")[0] == "DIFFERENTIAL"
    finally:
        shutil.rmtree(base)


def _run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
