"""DDL on a captured table: until it is noticed, no write fails and none is captured incorrectly."""

from __future__ import annotations

import threading

import psycopg
import pytest

# Pytest finds the fixtures under the names imported here.
from tests.integration.test_capture import (
    SETUPS,
    Connection,
    activity,
    buffer_rows,
    buffered,
    capture_database,
    columns_of,
    contents,
    db,
    difference,
    exactly_captured,
    markers,
    one,
    other,
    track,
)

__all__ = ["capture_database", "db", "other"]

pytestmark = pytest.mark.pgversions

# Whatever the columns are called and typed, these run.
WRITES = (
    "INSERT INTO t SELECT * FROM t LIMIT 3",
    "UPDATE t SET id = id WHERE ctid IN (SELECT ctid FROM t LIMIT 5)",
    "DELETE FROM t WHERE ctid IN (SELECT ctid FROM t LIMIT 2)",
)

# What leaves the tracked columns as they are is captured on.
HARMLESS = {
    "rename of an unused column": "ALTER TABLE t RENAME COLUMN unused TO other_name",
    "drop of an unused column": "ALTER TABLE t DROP COLUMN unused",
    "retype of an unused column": "ALTER TABLE t ALTER COLUMN unused TYPE text",
    "a new column": "ALTER TABLE t ADD COLUMN extra int",
    "a new column with a default": "ALTER TABLE t ADD COLUMN extra int NOT NULL DEFAULT 7",
    "constraints and defaults": "ALTER TABLE t ADD CHECK (id > 0), ALTER used SET DEFAULT 1, ALTER used SET NOT NULL",
    "rewrites": "CLUSTER t USING t_by_used; ALTER TABLE t SET UNLOGGED; ALTER TABLE t SET LOGGED",
    "replica identity, storage": "ALTER TABLE t REPLICA IDENTITY FULL; ALTER TABLE t ALTER words SET STORAGE EXTERNAL",
}
# The rest leaves markers until _retrack().
BREAKING = {
    "rename of a used column": ["ALTER TABLE t RENAME COLUMN used TO renamed"],
    "a used and an unused column swap names": [
        "ALTER TABLE t RENAME COLUMN used TO tmp",
        "ALTER TABLE t RENAME COLUMN unused TO used",
        "ALTER TABLE t RENAME COLUMN tmp TO unused",
    ],
    "two used columns swap names": [
        "ALTER TABLE t RENAME COLUMN used TO tmp",
        "ALTER TABLE t RENAME COLUMN id TO used",
        "ALTER TABLE t RENAME COLUMN tmp TO id",
    ],
    "drop of a used column": ["ALTER TABLE t DROP COLUMN used CASCADE"],
    "drop and return of a used column": ["ALTER TABLE t DROP COLUMN used", "ALTER TABLE t ADD COLUMN used int"],
    "retype to text": ["ALTER TABLE t ALTER COLUMN used TYPE text"],
    "retype to numeric": ["ALTER TABLE t ALTER COLUMN used TYPE numeric(20,5)"],
    "retype of the length": ["ALTER TABLE t ALTER COLUMN words TYPE varchar(1000)"],
}


def prepare(conn: Connection) -> str:
    conn.execute("CREATE TABLE t (id int, used int, words varchar(10), unused int)")
    conn.execute("INSERT INTO t SELECT g, g * 10, 'x' || g, g FROM generate_series(1, 50) g")
    conn.execute("CREATE INDEX t_by_used ON t (used)")
    return str(one(conn, "SELECT pgtrickle._attach('t', '{1,2,3}')")[0])


def write(conn: Connection) -> None:
    for statement in WRITES:
        conn.execute(statement)


@pytest.mark.parametrize("ddl", HARMLESS.values(), ids=list(HARMLESS))
def test_harmless_changes_are_captured_through(db: Connection, other: Connection, ddl: str) -> None:
    name = prepare(db)
    write(other)  # so that its plans are cached
    with exactly_captured(db, "t"):
        with db.transaction():
            db.execute(ddl)
            write(db)
        write(db)
        write(other)
    assert markers(db, name) == []


@pytest.mark.parametrize("ddl", BREAKING.values(), ids=list(BREAKING))
def test_breaking_changes_leave_markers_until_retracked(db: Connection, other: Connection, ddl: list[str]) -> None:
    name = prepare(db)
    write(other)
    rows = buffer_rows(db, name)
    with db.transaction():
        for statement in ddl:
            db.execute(statement)
        write(db)
    write(other)
    # One for each transaction, and in each before any row of it could be wrong.
    assert markers(db, name) == ["SCHEMA"] * 4
    assert buffer_rows(db, name) == rows
    db.execute("SELECT pgtrickle._retrack('t')")
    db.execute("DELETE FROM pgtrickle_changes.pgt_markers")
    with exactly_captured(db, "t"):
        write(db)
        write(other)
    assert markers(db, name) == []
    tracked = [number for number, _ in columns_of(db, "t")]
    assert tracked == ([1, 3] if "DROP" in ddl[0] else [1, 2, 3])


@pytest.mark.parametrize("ddl", BREAKING.values(), ids=list(BREAKING))
def test_breaking_changes_leave_markers_with_row_triggers(db: Connection, other: Connection, ddl: list[str]) -> None:
    """Tables with a parent have them; their statements use no transition table that would tie a plan to the source."""
    db.execute("CREATE TABLE up ()")
    db.execute("CREATE TABLE t (id int, used int, words varchar(10), unused int) INHERITS (up)")
    db.execute("INSERT INTO t SELECT g, g * 10, 'x' || g, g FROM generate_series(1, 50) g")
    (name,) = one(db, "SELECT pgtrickle._attach('t', '{1,2,3}')")
    assert one(db, "SELECT capture_kind FROM pgtrickle.pgt_change_tracking WHERE source_relid = 't'::regclass") == (
        "row",
    )
    write(other)
    rows = buffer_rows(db, name)
    for statement in ddl:
        db.execute(statement)
    write(other)
    assert markers(db, name) == ["SCHEMA"] * 3
    assert buffer_rows(db, name) == rows


@pytest.mark.parametrize("ddl", BREAKING.values(), ids=list(BREAKING))
def test_plans_made_with_an_old_snapshot_are_not_reused(db: Connection, other: Connection, ddl: list[str]) -> None:
    """They are made while the catalog looks as before, and used by later transactions."""
    name = prepare(db)
    with other.transaction():
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT 1")
        for statement in ddl:
            db.execute(statement)
        other.execute("INSERT INTO t DEFAULT VALUES")
    captured = buffer_rows(db, name)  # the row, where only a length was changed
    write(other)
    assert markers(db, name) == ["SCHEMA"] * (4 - captured)
    assert buffer_rows(db, name) == captured


def test_a_cascade_whose_snapshot_is_older_than_the_alteration(db: Connection, other: Connection) -> None:
    """The outer statement takes its snapshot before the cascade locks the table, and the trigger is planned with it."""
    db.execute("CREATE TABLE parent (id int PRIMARY KEY); INSERT INTO parent VALUES (1)")
    db.execute("CREATE TABLE t (id int REFERENCES parent ON DELETE CASCADE, used int); INSERT INTO t VALUES (1, 1)")
    db.execute(
        "CREATE FUNCTION pause() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN PERFORM pg_advisory_xact_lock(1); RETURN OLD; END';"
        " CREATE TRIGGER pause BEFORE DELETE ON parent FOR EACH ROW EXECUTE FUNCTION pause()"
    )
    name = track(db, "t")
    db.execute("SELECT pg_advisory_lock(1)")
    errors: list[BaseException] = []

    def delete() -> None:
        try:
            other.execute("DELETE FROM parent")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=delete)
    thread.start()
    while not one(db, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")[0]:
        assert thread.is_alive()
    db.execute("ALTER TABLE t RENAME COLUMN used TO renamed")
    db.execute("SELECT pg_advisory_unlock(1)")
    thread.join()
    assert errors == []
    assert markers(db, name) == ["SCHEMA"]
    assert one(db, "SELECT count(*) FROM t") == (0,)


@pytest.mark.parametrize("ddl", BREAKING.values(), ids=list(BREAKING))
def test_breaking_changes_rolled_back_leave_nothing(db: Connection, ddl: list[str]) -> None:
    name = prepare(db)
    with db.transaction(force_rollback=True):
        for statement in ddl:
            db.execute(statement)
        write(db)
    with exactly_captured(db, "t"):
        write(db)
    assert markers(db, name) == []


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("ddl", BREAKING.values(), ids=list(BREAKING))
def test_a_snapshot_older_than_the_alteration(db: Connection, other: Connection, ddl: list[str], level: str) -> None:
    """Such a transaction uses the altered table but sees the old catalog."""
    name = prepare(db)
    other.execute(f"BEGIN ISOLATION LEVEL {level}")
    other.execute("SELECT 1 FROM pg_class LIMIT 1")
    for statement in ddl:
        db.execute(statement)
    other.execute("INSERT INTO t DEFAULT VALUES")
    other.execute("COMMIT")
    # Only the length of a string changed: what cannot be seen from there does no harm, for the view forbids it.
    if "varchar" not in ddl[0]:
        assert markers(db, name) == ["SCHEMA"]
        assert buffer_rows(db, name) == 0


@pytest.mark.parametrize("ddl", [*([ddl] for ddl in HARMLESS.values()), *BREAKING.values()], ids=[*HARMLESS, *BREAKING])
def test_a_writer_that_does_not_pause(db: Connection, other: Connection, ddl: list[str]) -> None:
    name = prepare(db)
    stop = threading.Event()
    failures: list[psycopg.Error] = []

    def keep_writing() -> None:
        while not stop.is_set() and not failures:
            try:
                write(other)
            except psycopg.Error as error:
                failures.append(error)

    def await_writes(number: int) -> None:
        goal = activity(db, name) + number
        while activity(db, name) < goal and not failures:
            db.execute("SELECT pg_sleep(0.001)")

    before = contents(db, "t"), buffered(db, "t")
    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        await_writes(10)
        with db.transaction():  # in between, the writer's own statement could miss its column
            for statement in ddl:
                db.execute(statement)
        await_writes(10)
    finally:
        stop.set()
        writer.join()
    assert failures == []
    if not markers(db, name):
        changed = difference(contents(db, "t"), before[0])
        assert difference(buffered(db, "t"), before[1]) == changed
    assert bool(markers(db, name)) == (ddl in BREAKING.values())


def test_a_renamed_table_is_still_captured(db: Connection, other: Connection) -> None:
    name = prepare(db)
    db.execute("ALTER TABLE t RENAME TO t2; CREATE SCHEMA IF NOT EXISTS moved; ALTER TABLE t2 SET SCHEMA moved")
    with exactly_captured(db, "moved.t2"):
        other.execute("INSERT INTO moved.t2 SELECT * FROM moved.t2 LIMIT 3")
    assert markers(db, name) == []
    db.execute("DROP SCHEMA moved CASCADE")


def test_rename_and_swap_does_not_merge_two_tables(db: Connection) -> None:
    name = prepare(db)
    db.execute("SELECT pgtrickle.create_stream_table('reader', 'SELECT id FROM t')")
    db.execute("ALTER TABLE t RENAME TO t_old; CREATE TABLE t (LIKE t_old); INSERT INTO t SELECT * FROM t_old")
    rows = buffer_rows(db, name)
    write(db)
    assert buffer_rows(db, name) == rows
    assert track(db, "t") != name
    with exactly_captured(db, "t_old"), exactly_captured(db, "t"):
        db.execute("DELETE FROM t_old; DELETE FROM t")


def test_a_source_without_readers_does_not_keep_its_name(db: Connection) -> None:
    """The remains of a stream table that was dropped by hand, on a table that has a new name."""
    prepare(db)
    db.execute("SELECT pgtrickle.create_stream_table('reader', 'SELECT id FROM t')")
    db.execute("DROP TABLE reader")
    db.execute("ALTER TABLE t RENAME TO former; CREATE TABLE t (id int PRIMARY KEY)")
    db.execute("SELECT pgtrickle.create_stream_table('another', 'SELECT id FROM t')")
    assert db.execute("SELECT source_relid::text FROM pgtrickle.pgt_change_tracking").fetchall() == [("t",)]


def test_a_dropped_table_makes_room_for_its_successor(db: Connection) -> None:
    name = prepare(db)
    write(db)
    db.execute("DROP TABLE t CASCADE; CREATE TABLE t (id int, other text)")
    assert track(db, "t") == name
    assert buffer_rows(db, name) == 0
    with exactly_captured(db, "t"):
        db.execute("INSERT INTO t VALUES (1, 'x')")


def signature(conn: Connection, table: str = "t") -> str:
    return str(one(conn, "SELECT pgtrickle._capture_signature(%s::regclass)", [table])[0])


UNSEEN = {
    "trigger disabled and enabled": (
        "plain",
        "ALTER TABLE t DISABLE TRIGGER USER; DELETE FROM t; ALTER TABLE t ENABLE TRIGGER USER",
    ),
    "trigger disabled": ("plain", "ALTER TABLE t DISABLE TRIGGER USER"),
    "partition attached": ("partitioned", "CREATE TABLE t_c PARTITION OF t FOR VALUES IN ('x')"),
    "partition detached": ("partitioned", "ALTER TABLE t DETACH PARTITION t_a"),
    "partition detached and attached": (
        "partitioned",
        """ALTER TABLE t DETACH PARTITION t_a; INSERT INTO t_a VALUES (77, 'a', 1);
           ALTER TABLE t ATTACH PARTITION t_a FOR VALUES IN ('a')""",
    ),
    "partition dropped": ("partitioned", "DROP TABLE t_a"),
    "partition of a partition": (
        "partitioned",
        "CREATE TABLE t_rest_mid PARTITION OF t_rest FOR VALUES FROM (1000) TO (2000)",
    ),
    "child added": ("inherited", "CREATE TABLE child2 () INHERITS (t)"),
    "child removed": ("inherited", "ALTER TABLE grandchild NO INHERIT child"),
    "becomes a partition": (
        "plain",
        """CREATE TABLE root (id int NOT NULL, name text, amount numeric(10,2)) PARTITION BY RANGE (id);
           ALTER TABLE root ATTACH PARTITION t FOR VALUES FROM (0) TO (10000)""",
    ),
}


@pytest.mark.parametrize(("setup", "ddl"), UNSEEN.values(), ids=list(UNSEEN))
def test_events_that_hide_rows_change_the_signature(db: Connection, setup: str, ddl: str) -> None:
    db.execute(SETUPS[setup])
    track(db, "t")
    before = signature(db)
    db.execute("INSERT INTO t SELECT * FROM t LIMIT 0; ANALYZE t")
    assert signature(db) == before
    db.execute(ddl)
    after = signature(db)
    assert after != before
    db.execute("SELECT pgtrickle._retrack('t')")
    columns = "(100, 'new', 1)" if setup == "plain" else "(100, 'x', 1)" if setup == "partitioned" else "(100, 'x')"
    with exactly_captured(db, "t"):
        db.execute(f"INSERT INTO t VALUES {columns}")
        db.execute("UPDATE t SET id = id + 1000 WHERE id < 5")


NEW = "CREATE TABLE new PARTITION OF t FOR VALUES IN ('x')"
CHILD = "CREATE TABLE new () INHERITS (t); INSERT INTO new SELECT * FROM ONLY t"
OLD = psycopg.IsolationLevel.REPEATABLE_READ


@pytest.mark.parametrize(
    ("setup", "new", "write", "level"),
    [
        ("partitioned", NEW, "INSERT INTO t VALUES (500, 'x', 1)", None),
        ("partitioned", NEW, "INSERT INTO t VALUES (500, 'x', 1)", OLD),
        ("partitioned", NEW, "UPDATE t SET region = 'x' WHERE id < 5", None),
        ("partitioned", NEW, "UPDATE t SET region = 'x' WHERE id < 5", OLD),
        ("inherited", CHILD, "UPDATE t SET id = id + 1", None),
    ],
    ids=["inserted", "inserted, old snapshot", "moved", "moved, old snapshot", "child"],
)
def test_a_partition_attached_and_detached_between_refreshes_leaves_a_marker(
    db: Connection, other: Connection, setup: str, new: str, write: str, level: psycopg.IsolationLevel | None
) -> None:
    """Rows that were captured and disappeared with their partition before a refresh: only the marker shows it."""
    db.execute(SETUPS[setup])
    name = track(db, "t")
    before = signature(db)
    other.autocommit = False
    other.isolation_level = level
    other.execute("SELECT count(*) FROM pg_class" if level else "UPDATE t SET id = id WHERE false")
    if level is None:
        other.commit()
    db.execute(new)
    other.execute(write.encode())
    other.commit()
    assert markers(db, name) == ["SCHEMA"]
    db.execute("DROP TABLE new")
    assert signature(db) == before
    db.execute(new)
    db.execute("SELECT pgtrickle._retrack('t')")
    with exactly_captured(db, "t"):  # by a session whose plan was made for the other state
        other.execute(write.encode())
        other.commit()


def test_new_partitions_and_children_are_captured_after_retracking(db: Connection) -> None:
    db.execute(SETUPS["partitioned"])
    track(db, "t")
    db.execute("CREATE TABLE t_new PARTITION OF t FOR VALUES IN ('new'); SELECT pgtrickle._retrack('t')")
    with exactly_captured(db, "t"):
        db.execute("INSERT INTO t_new VALUES (900, 'new', 1); UPDATE t_new SET amount = 2")


def test_a_table_that_became_a_partition_captures_writes_through_its_parent(db: Connection) -> None:
    db.execute(SETUPS["plain"])
    track(db, "t")
    db.execute(UNSEEN["becomes a partition"][1])
    db.execute("SELECT pgtrickle._retrack('t')")
    with exactly_captured(db, "t"):
        db.execute("INSERT INTO root VALUES (500, 'through the parent', 1); UPDATE t SET name = 'direct' WHERE id = 1")


def test_detached_partitions_are_not_captured(db: Connection) -> None:
    db.execute(SETUPS["partitioned"])
    name = track(db, "t")
    db.execute("ALTER TABLE t DETACH PARTITION t_a")
    rows = buffer_rows(db, name)
    db.execute("INSERT INTO t_a VALUES (1, 'a', 1)")
    assert buffer_rows(db, name) == rows
    db.execute("SELECT pgtrickle._retrack('t')")
    assert one(db, "SELECT count(*) FROM pg_trigger WHERE tgrelid = 't_a'::regclass") == (0,)


def test_retyping_one_column_does_not_disturb_types_in_use(db: Connection) -> None:
    """An enum that grows, a domain that gets a constraint: the types are the same, so capture continues."""
    db.execute("CREATE TYPE mood AS ENUM ('ok'); CREATE DOMAIN small AS int; CREATE TABLE t (m mood, s small)")
    name = track(db, "t")
    db.execute("INSERT INTO t VALUES ('ok', 99)")
    db.execute("ALTER TYPE mood ADD VALUE 'great'")
    with exactly_captured(db, "t"):
        db.execute("INSERT INTO t VALUES ('great', 1); UPDATE t SET s = 50")
        # The old value, which violates the new constraint, is written to the buffer all the same.
        db.execute("ALTER DOMAIN small ADD CHECK (VALUE < 10) NOT VALID; DELETE FROM t")
    assert markers(db, name) == []


def test_signatures_are_cheap(db: Connection) -> None:
    db.execute(SETUPS["partitioned"])
    track(db, "t")
    for _ in range(10):
        signature(db)
    (milliseconds,) = one(
        db,
        """WITH timed AS MATERIALIZED (SELECT clock_timestamp() AS started),
                work AS MATERIALIZED (SELECT count(pgtrickle._capture_signature('t', ARRAY[g - g]::smallint[]))
                                      FROM timed, generate_series(1, 50) g)
           SELECT extract(epoch FROM clock_timestamp() - started) * 20 FROM work, timed""",
    )
    print(f"one signature takes {float(milliseconds):.2f} ms")
    assert float(milliseconds) < 5  # 0.7 ms measured while the machine was busy
