"""Refresh groups, whose members are refreshed in one transaction: what they read of each other, what separates them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import pgtrickle
from pgtrickle.refresh.results import Outcome
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query

Connection = psycopg.Connection[Any]

GROUP = {
    "sums": "SELECT grp, sum(val) AS total, count(*) AS n FROM item GROUP BY grp",
    "tops": "SELECT grp, max(val) AS top FROM item GROUP BY grp",
    "both": "SELECT s.grp, s.total, t.top FROM sums AS s JOIN tops AS t USING (grp)",
    "beside": "SELECT i.id, b.total - i.val AS rest FROM item AS i JOIN both_ AS b USING (grp)",
    "last": "SELECT count(*) AS n, sum(rest) AS rest FROM beside",
}
GROUP = {("both_" if name == "both" else name): query for name, query in GROUP.items()}


@pytest.fixture
def db(database: TestDatabase, conn: Connection) -> Iterator[pgtrickle.Database]:
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        conn.execute("CREATE TABLE item (id int PRIMARY KEY, grp int, val int)")
        conn.execute("INSERT INTO item SELECT i, i % 5, i FROM generate_series(1, 60) AS i")
        for name, query in GROUP.items():
            db.create_stream_table(name, query, initialize=False)
        yield db


def attempt(db: pgtrickle.Database) -> Outcome:
    return db.engine.attempt([table.id for table in db.stream_tables()], "SCHEDULE", atomic=True)


def exact(conn: Connection) -> None:
    for name, query in GROUP.items():
        assert_equal_to_query(conn, name, query)


def transactions(conn: Connection) -> int:
    """The number of transactions in which the members were last stored."""
    row = conn.execute(
        "SELECT count(DISTINCT coalesce(frontier ->> 'passed', pgt_name)) FROM pgtrickle.pgt_stream_tables"
    ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.pgversions
def test_all_members_change_in_one_transaction(db: pgtrickle.Database, conn: Connection) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    assert len(attempt(db).results) == len(GROUP)
    exact(conn)
    for i in range(6):
        with conn.transaction():
            for _ in range(5):
                conn.execute(
                    "UPDATE item SET val = %s, grp = %s WHERE id = %s", [chance.randrange(99) for _ in range(3)]
                )
            conn.execute("INSERT INTO item VALUES (%s, %s, %s)", (1000 + i, chance.randrange(7), chance.randrange(99)))
            conn.execute("DELETE FROM item WHERE id = %s", (chance.randrange(60),))
        outcome = attempt(db)
        assert not outcome.failures
        exact(conn)
        assert transactions(conn) == 1
    assert all(result.action == "NO_DATA" for result in attempt(db).results), "nothing comes twice"
    exact(conn)
    conn.execute("TRUNCATE item")
    conn.execute("INSERT INTO item VALUES (1, 1, 1), (2, 1, 5)")
    attempt(db)
    exact(conn)
    assert transactions(conn) == 1


def test_ordinary_refreshes_continue_where_a_group_ended(db: pgtrickle.Database, conn: Connection) -> None:
    """An ordinary refresh can start from a frontier that a group stored, and vice versa."""
    attempt(db)
    for i in range(3):
        conn.execute("UPDATE item SET val = val + 10 WHERE id %% 7 = %s", (i,))
        attempt(db)
        exact(conn)
        conn.execute("UPDATE item SET grp = grp + 1 WHERE id %% 5 = %s", (i,))
        db.refresh_all()
        exact(conn)


def test_a_failing_member_leaves_all_members_unchanged(db: pgtrickle.Database, conn: Connection) -> None:
    db.create_stream_table("ratio", "SELECT grp, 100 / (total - 7777) AS r, n FROM sums", initialize=False)
    attempt(db)
    exact(conn)
    before = conn.execute("SELECT * FROM both_ ORDER BY 1").fetchall()
    conn.execute("UPDATE item SET val = 7777 + val - (SELECT sum(val) FROM item WHERE grp = 1) WHERE id = 1")
    outcome = attempt(db)
    assert [str(error) for error in outcome.failures.values()] == ["division by zero"]
    assert outcome.results == []
    assert conn.execute("SELECT * FROM both_ ORDER BY 1").fetchall() == before
    counted = "SELECT pgt_name FROM pgtrickle.pgt_stream_tables WHERE consecutive_errors > 0 OR claimed_by IS NOT NULL"
    assert conn.execute(counted).fetchall() == [("ratio",)]
    put_off = "SELECT count(*) FROM pgtrickle.pgt_stream_tables WHERE next_due <= clock_timestamp()"
    assert conn.execute(put_off).fetchone() == (0,), "the others would take it along before its time"
    conn.execute("UPDATE item SET val = val + 1 WHERE id = 1")
    assert not attempt(db).failures
    exact(conn)


def test_rows_that_a_trigger_writes_into_a_source_are_refreshed_again(db: pgtrickle.Database, conn: Connection) -> None:
    """The transaction of a group counts as seen; a row that a user's trigger wrote in it was not."""
    conn.execute("CREATE TABLE audit (at int)")
    conn.execute(
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN INSERT INTO public.audit VALUES (1); RETURN NULL; END'"
    )
    conn.execute("CREATE TRIGGER note AFTER INSERT OR UPDATE ON last FOR EACH STATEMENT EXECUTE FUNCTION note()")
    query = "SELECT s.grp, s.total, a.n FROM sums AS s CROSS JOIN (SELECT count(*) AS n FROM audit) AS a"
    db.create_stream_table("audited", query, initialize=False)
    for i in range(3):
        conn.execute("UPDATE item SET val = val + 1 WHERE id = %s", (i + 1,))
        attempt(db)
        attempt(db)
        exact(conn)
        assert_equal_to_query(conn, "audited", query)


def test_a_partition_attached_during_a_group_refresh(
    database: TestDatabase, db: pgtrickle.Database, conn: Connection
) -> None:
    """Neither the lock nor the snapshot of the transaction shows it."""
    conn.execute("CREATE TABLE log (id int, grp int) PARTITION BY LIST (grp)")
    conn.execute("CREATE TABLE log_1 PARTITION OF log FOR VALUES IN (1)")
    conn.execute("CREATE TABLE log_2 AS SELECT i AS id, 2 AS grp FROM generate_series(1, 10) AS i")
    logs = "SELECT s.grp, s.total, l.n FROM sums AS s JOIN (SELECT grp, count(*) AS n FROM log GROUP BY grp) AS l USING (grp)"
    db.create_stream_table("logs", logs, initialize=False)
    attempt(db)
    conn.execute("INSERT INTO log VALUES (1, 1)")
    conn.execute("UPDATE item SET val = val + 1")
    attached: list[object] = []

    def attach(step: str) -> None:
        if step == "cut" and not attached:
            attached.append(conn.execute("ALTER TABLE log ATTACH PARTITION log_2 FOR VALUES IN (2)"))

    with pgtrickle.connect(database.dsn, on_step=attach) as other:
        assert not attempt(other).failures
    assert attached
    exact(conn)
    assert_equal_to_query(conn, "logs", logs)


def test_requested_groups_are_created_listed_and_dropped(db: pgtrickle.Database, conn: Connection) -> None:
    conn.execute("SELECT pgtrickle.create_refresh_group('pair', ARRAY['sums', 'tops'], 'repeatable_read')")
    listed = "SELECT group_name, isolation, members FROM pgtrickle.refresh_groups()"
    assert conn.execute(listed).fetchall() == [("pair", "repeatable_read", ["public.sums", "public.tops"])]
    conn.execute("SELECT pgtrickle.drop_refresh_group('pair')")
    assert conn.execute(listed).fetchall() == []


@pytest.mark.parametrize(
    ("name", "members", "isolation", "told"),
    [
        ("pair", ["last"], "repeatable_read", "refresh group pair needs at least two stream tables"),
        ("pair", ["last", "last"], "repeatable_read", "refresh group pair needs at least two stream tables"),
        ("pair", ["last", "nobody"], "repeatable_read", "there is no stream table nobody"),
        ("pair", ["last", "beside"], "read_committed", "isolation cannot be 'read_committed'"),
        ("", ["last", "beside"], "repeatable_read", "a refresh group needs a name"),
        ("taken", ["last", "beside"], "repeatable_read", "there is already a refresh group taken"),
        ("pair", ["last", "sums"], "repeatable_read", "stream table public.sums is in refresh group taken already"),
    ],
)
def test_invalid_groups_are_refused(
    db: pgtrickle.Database, conn: Connection, name: str, members: list[str], isolation: str, told: str
) -> None:
    conn.execute("SELECT pgtrickle.create_refresh_group('taken', ARRAY['sums', 'tops'])")
    with pytest.raises(psycopg.Error) as error:
        conn.execute("SELECT pgtrickle.create_refresh_group(%s, %s, %s)", (name, members, isolation))
    assert error.value.diag.message_primary == told


def test_a_missing_group_cannot_be_dropped(db: pgtrickle.Database, conn: Connection) -> None:
    with pytest.raises(psycopg.errors.UndefinedObject, match="there is no refresh group 'nobody'"):
        conn.execute("SELECT pgtrickle.drop_refresh_group('nobody')")
