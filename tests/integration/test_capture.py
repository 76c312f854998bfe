"""The change buffer contains exactly the difference for any kind of write: table before + buffer = table after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql

from pgtrickle.catalog.install import install
from pgtrickle.embedded.server import EmbeddedServer
from tests.support.database import TestDatabase, fresh_database

pytestmark = pytest.mark.pgversions

Connection = psycopg.Connection[Any]
ZSet = Counter[str]


@pytest.fixture(scope="module")
def capture_database(server: EmbeddedServer) -> Iterator[TestDatabase]:
    with fresh_database(server, "capture") as database:
        with psycopg.connect(database.direct_dsn, autocommit=True) as conn:
            install(conn)
        yield database


@pytest.fixture
def db(capture_database: TestDatabase) -> Iterator[Connection]:
    """A connection to a database with the catalog, in an empty schema."""
    with psycopg.connect(capture_database.direct_dsn, autocommit=True) as conn:
        conn.execute("DROP SCHEMA IF EXISTS work CASCADE")
        conn.execute("SELECT pgtrickle._untrack_unused()")
        conn.execute("CREATE SCHEMA work")
        conn.execute("SET search_path = work")
        yield conn


@pytest.fixture
def other(capture_database: TestDatabase, db: Connection) -> Iterator[Connection]:
    """A second writer."""
    with psycopg.connect(capture_database.direct_dsn, autocommit=True) as conn:
        conn.execute("SET search_path = work")
        yield conn


def track(conn: Connection, table: str) -> str:
    """Capture all columns of the table, as for a stream table that reads them."""
    columns = (
        "SELECT array_agg(attnum) FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped"
    )
    row = conn.execute(f"SELECT pgtrickle._attach(%s::regclass, ({columns}))", [table, table]).fetchone()
    assert row is not None
    return str(row[0])


def columns_of(conn: Connection, table: str) -> list[tuple[int, str]]:
    return conn.execute(
        "SELECT a.attnum, a.attname FROM pgtrickle.pgt_change_tracking t"
        " JOIN pg_attribute a ON a.attrelid = t.source_relid AND a.attnum = ANY (t.tracked_columns)"
        " WHERE t.source_relid = %s::regclass AND NOT a.attisdropped ORDER BY a.attnum",
        [table],
    ).fetchall()


def contents(conn: Connection, table: str) -> ZSet:
    """The tracked columns of the table's rows, as text, with how often each row occurs."""
    names = sql.SQL(", ").join(sql.Identifier(name) for _, name in columns_of(conn, table))
    rows = conn.execute(
        sql.SQL("SELECT ROW({})::text, count(*) FROM {} GROUP BY 1").format(names, sql.SQL(table))
    ).fetchall()
    return Counter(dict(rows))


def buffered(conn: Connection, table: str) -> ZSet:
    """The sum of the buffer."""
    names = sql.SQL(", ").join(sql.Identifier(f"c{number}") for number, _ in columns_of(conn, table))
    (buffer,) = one(
        conn, "SELECT buffer_relid::text FROM pgtrickle.pgt_change_tracking WHERE source_relid = %s::regclass", [table]
    )
    rows = conn.execute(
        sql.SQL("SELECT ROW({})::text, sum(__pgt_w)::int FROM {} GROUP BY 1").format(names, sql.SQL(buffer))
    ).fetchall()
    return Counter({row: weight for row, weight in rows if weight})


def one(conn: Connection, query: str, parameters: list[Any] | None = None) -> tuple[Any, ...]:
    row = conn.execute(query, parameters).fetchone()
    assert row is not None
    return tuple(row)


def buffer_rows(conn: Connection, stable_name: str) -> int:
    return int(one(conn, f"SELECT count(*) FROM pgtrickle_changes.changes_{stable_name}")[0])


def markers(conn: Connection, stable_name: str) -> list[str]:
    rows = conn.execute(
        "SELECT kind FROM pgtrickle_changes.pgt_markers WHERE source_stable_name = %s ORDER BY xid", [stable_name]
    ).fetchall()
    return [kind for (kind,) in rows]


def activity(conn: Connection, stable_name: str) -> int:
    query = "SELECT count(*) FROM pgtrickle_changes.pgt_activity WHERE source_stable_name = %s"
    return int(one(conn, query, [stable_name])[0])


def difference(after: ZSet, before: ZSet) -> ZSet:
    """after − before, with negative weights kept."""
    result = Counter(after)
    result.subtract(before)
    return Counter({row: weight for row, weight in result.items() if weight})


@contextmanager
def exactly_captured(conn: Connection, *tables: str) -> Iterator[None]:
    """Changes in the block reach the buffers exactly as they reach the tables."""
    before = {table: (contents(conn, table), buffered(conn, table)) for table in tables}
    yield
    for table, (rows, changes) in before.items():
        changed = difference(contents(conn, table), rows)
        assert difference(buffered(conn, table), changes) == changed, table


SETUPS = {
    "plain": """
        CREATE TABLE t (id int PRIMARY KEY, name text, amount numeric(10,2));
        INSERT INTO t SELECT g, 'n' || g, g FROM generate_series(1, 20) g;
    """,
    # t_b has another order of columns, and one that was dropped.
    "partitioned": """
        CREATE TABLE t (id int, region text, amount int) PARTITION BY LIST (region);
        CREATE TABLE t_a PARTITION OF t FOR VALUES IN ('a');
        CREATE TABLE t_b (dropped int, amount int, region text, id int);
        ALTER TABLE t_b DROP COLUMN dropped;
        ALTER TABLE t ATTACH PARTITION t_b FOR VALUES IN ('b');
        CREATE TABLE t_rest PARTITION OF t DEFAULT PARTITION BY RANGE (amount);
        CREATE TABLE t_rest_low PARTITION OF t_rest FOR VALUES FROM (0) TO (100);
        CREATE TABLE t_rest_high PARTITION OF t_rest DEFAULT;
        INSERT INTO t SELECT g, (ARRAY['a', 'b', 'c'])[1 + g % 3], g * 10 FROM generate_series(1, 30) g;
    """,
    "inherited": """
        CREATE TABLE t (id int, name text);
        CREATE TABLE child (extra int) INHERITS (t);
        CREATE TABLE grandchild (more int) INHERITS (child);
        INSERT INTO t VALUES (1, 'p');
        INSERT INTO child VALUES (2, 'c', 0);
        INSERT INTO grandchild VALUES (3, 'g', 0, 0);
    """,
    "trigger that writes": """
        CREATE TABLE t (id int);
        CREATE FUNCTION twice() RETURNS trigger LANGUAGE plpgsql AS
            $$BEGIN INSERT INTO t VALUES (NEW.id + 1000); RETURN NEW; END$$;
        CREATE TRIGGER twice AFTER INSERT ON t FOR EACH ROW WHEN (NEW.id < 1000) EXECUTE FUNCTION twice();
    """,
    "updatable view": """
        CREATE TABLE t (id int, name text);
        INSERT INTO t SELECT g, 'x' FROM generate_series(1, 20) g;
        CREATE VIEW v AS SELECT * FROM t WHERE id < 10;
    """,
    "rule": """
        CREATE TABLE t (id int, name text);
        INSERT INTO t VALUES (1, 'x'), (2, 'y');
        CREATE RULE soft AS ON DELETE TO t DO INSTEAD UPDATE t SET name = 'deleted' WHERE id = old.id;
    """,
    "keyless": "CREATE TABLE t (a int, b text); INSERT INTO t SELECT 1, 'x' FROM generate_series(1, 5)",
    "cascades": """
        CREATE TABLE p (id int PRIMARY KEY);
        CREATE TABLE t (id int, p int REFERENCES p ON DELETE CASCADE ON UPDATE CASCADE);
        INSERT INTO p SELECT generate_series(1, 9);
        INSERT INTO t SELECT g, g % 9 + 1 FROM generate_series(1, 40) g;
    """,
    "set null": """
        CREATE TABLE p (id int PRIMARY KEY);
        CREATE TABLE t (id int, p int REFERENCES p ON DELETE SET NULL);
        INSERT INTO p VALUES (1), (2);
        INSERT INTO t VALUES (1, 1), (2, 2);
    """,
    "generated": """
        CREATE TABLE t (
            id int GENERATED ALWAYS AS IDENTITY, a int, twice int GENERATED ALWAYS AS (a * 2) STORED);
    """,
    "no columns": "CREATE TABLE t ()",
    "quotes and unicode": """
        CREATE TABLE "Täble ""q"" $x$" (
            "Id" int, "a b" text, "(r.x" int, "%1$s" int, "select" text, "it's" text, "$body$" int);
    """,
    "long names": f"CREATE TABLE {'t' * 63} ({'c' * 63} int, {'d' * 63} text)",
    "names of the function's own": """
        CREATE TABLE t (xid int, wanting text, r int, __pgt_xid int, attnum int, tg_op text, fits bool, touched bool);
    """,
}

CASES = [
    ("plain", "INSERT INTO t VALUES (100, 'x', 1.5)"),
    ("plain", "INSERT INTO t SELECT g, 'x', g FROM generate_series(100, 1100) g"),
    ("plain", "UPDATE t SET amount = amount + 1 WHERE id % 2 = 0"),
    ("plain", "UPDATE t SET id = id + 1000"),
    ("plain", "DELETE FROM t WHERE id > 5"),
    (
        "plain",
        """UPDATE t SET name = 'a' WHERE id = 1; UPDATE t SET name = NULL WHERE id = 1;
           DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (1, 'back', 1)""",
    ),
    (
        "plain",
        """INSERT INTO t VALUES (1, 'new', 1), (200, 'new', 2) ON CONFLICT (id) DO UPDATE SET name = excluded.name;
           INSERT INTO t VALUES (1, 'never', 1) ON CONFLICT DO NOTHING""",
    ),
    (
        "plain",
        """MERGE INTO t USING (SELECT generate_series(15, 25) AS id) s ON s.id = t.id
           WHEN MATCHED AND t.id = 15 THEN DELETE WHEN MATCHED THEN UPDATE SET name = 'm'
           WHEN NOT MATCHED THEN INSERT VALUES (s.id, 'i', 0)""",
    ),
    (
        "plain",
        """WITH d AS (DELETE FROM t WHERE id < 5 RETURNING *),
                u AS (UPDATE t SET amount = 0 WHERE id = 10 RETURNING *)
           INSERT INTO t SELECT id + 500, name, amount FROM d UNION ALL SELECT id + 600, name, amount FROM u""",
    ),
    (
        "plain",
        """BEGIN; INSERT INTO t VALUES (100, 'kept', 1); SAVEPOINT s; DELETE FROM t; ROLLBACK TO s;
           UPDATE t SET name = 'after' WHERE id = 2; COMMIT""",
    ),
    ("plain", "BEGIN; DELETE FROM t; INSERT INTO t VALUES (100, 'x', 1); ROLLBACK"),
    (
        "plain",
        """BEGIN ISOLATION LEVEL REPEATABLE READ; INSERT INTO t VALUES (100, 'x', 1);
           UPDATE t SET name = 'y' WHERE id = 100; DELETE FROM t WHERE id = 1; COMMIT""",
    ),
    ("plain", "BEGIN ISOLATION LEVEL SERIALIZABLE; UPDATE t SET amount = amount * 2; COMMIT"),
    ("trigger that writes", "INSERT INTO t VALUES (1), (2)"),
    (
        "updatable view",
        "UPDATE v SET name = 'view'; DELETE FROM v WHERE id = 3; INSERT INTO v VALUES (400, 'v')",
    ),
    ("rule", "DELETE FROM t WHERE id = 1"),
    (
        "keyless",
        """INSERT INTO t VALUES (1, 'x'), (1, 'x'), (NULL, NULL), (NULL, NULL);
           DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t); UPDATE t SET b = 'y' WHERE a IS NULL""",
    ),
    ("cascades", "DELETE FROM p WHERE id < 3; UPDATE p SET id = id + 100 WHERE id = 4"),
    ("set null", "DELETE FROM p"),
    ("generated", "INSERT INTO t (a) VALUES (1), (2); UPDATE t SET a = 5 WHERE a = 1; DELETE FROM t WHERE a = 2"),
    ("no columns", "INSERT INTO t DEFAULT VALUES; INSERT INTO t DEFAULT VALUES"),
    (
        "partitioned",
        """INSERT INTO t VALUES (100, 'a', 1), (101, 'b', 2), (102, 'zz', 3), (103, 'zz', 300);
           UPDATE t SET amount = amount + 1; DELETE FROM t WHERE id % 5 = 0""",
    ),
    (
        "partitioned",
        """INSERT INTO t_a VALUES (100, 'a', 1); INSERT INTO t_b (id, region, amount) VALUES (101, 'b', 2);
           UPDATE t_b SET amount = id; DELETE FROM t_rest_low WHERE id < 10; UPDATE t_rest_high SET id = id + 1""",
    ),
    (
        "partitioned",
        """INSERT INTO t_rest VALUES (200, 'q', 5), (201, 'q', 500);
           UPDATE t_rest SET amount = 100 - amount WHERE amount < 100; DELETE FROM t_rest WHERE id = 2""",
    ),
    (
        "partitioned",
        """UPDATE t SET region = 'b' WHERE region = 'a'; UPDATE t SET region = 'c', amount = 7 WHERE id < 12;
           UPDATE t_rest SET amount = amount + 95""",
    ),
    (
        "partitioned",
        """MERGE INTO t USING (SELECT generate_series(25, 35) AS id) s ON s.id = t.id
           WHEN MATCHED THEN UPDATE SET amount = t.amount + 1 WHEN NOT MATCHED THEN INSERT VALUES (s.id, 'a', 0)""",
    ),
    ("inherited", "UPDATE t SET name = name || '!'; DELETE FROM t WHERE id = 3; INSERT INTO t VALUES (9, 'new')"),
    (
        "inherited",
        """INSERT INTO child VALUES (4, 'c', 1); UPDATE grandchild SET name = 'gg', more = 1;
           UPDATE ONLY t SET name = 'only'; DELETE FROM child""",
    ),
    (
        "quotes and unicode",
        """INSERT INTO "Täble ""q"" $x$" VALUES (1, 'a', 2, 3, 's', 't', 4);
           UPDATE "Täble ""q"" $x$" SET "a b" = 'b'; DELETE FROM "Täble ""q"" $x$" WHERE "it's" = 'u'""",
    ),
    (
        "quotes and unicode",
        """BEGIN ISOLATION LEVEL REPEATABLE READ; INSERT INTO "Täble ""q"" $x$" VALUES (1, 'a', 2, 3, 's', 't', 4);
           UPDATE "Täble ""q"" $x$" SET "it's" = 'c'; COMMIT""",
    ),
    (
        "long names",
        f"INSERT INTO {'t' * 63} VALUES (1, 'x'), (2, 'y'); DELETE FROM {'t' * 63} WHERE {'c' * 63} = 1",
    ),
    (
        "names of the function's own",
        "INSERT INTO t VALUES (1, 'w', 2, 3, 4, 'op', false, true); UPDATE t SET r = 7",
    ),
]


@pytest.mark.parametrize(("setup", "statements"), CASES)
def test_buffer_is_the_difference(db: Connection, setup: str, statements: str) -> None:
    db.execute(SETUPS[setup])
    (table,) = one(
        db,
        "SELECT quote_ident(relname) FROM pg_class WHERE relnamespace = 'work'::regnamespace AND relkind IN ('r', 'p')"
        " AND NOT relispartition AND relname <> ALL ('{p,child,grandchild}')",
    )
    name = track(db, table)
    with exactly_captured(db, table):
        db.execute(statements)
    assert markers(db, name) == []


@pytest.mark.parametrize(
    "statements",
    [
        ["{merge}"],
        ["DO $$BEGIN {merge}; END$$"],
        ["CREATE FUNCTION hidden() RETURNS void LANGUAGE sql AS $$ {merge} $$", "SELECT hidden()"],
        ["CREATE FUNCTION update_t() RETURNS void LANGUAGE sql AS $$ {merge} $$", "SELECT update_t()"],
        ["DO $$BEGIN EXECUTE '{quoted}'; END$$"],
        ["PREPARE m AS {merge}", "EXECUTE m", "DEALLOCATE m"],
        ["PREPARE m AS {merge}", "SELECT 'update'; EXECUTE m", "DEALLOCATE m"],
    ],
    ids=["plain", "in a block", "in an SQL function", "called update", "dynamic", "prepared", "prepared, among others"],
)
def test_a_merge_that_moves_rows_is_not_captured_as_an_update(db: Connection, statements: list[str]) -> None:
    """PostgreSQL leaves such rows out of the transition tables.

    They must be marked, because they cannot be captured.
    """
    db.execute(SETUPS["partitioned"])
    name = track(db, "t")
    merge = (
        "MERGE INTO t USING (VALUES (1), (2), (4)) AS s (id) ON s.id = t.id WHEN MATCHED THEN UPDATE SET region = 'a'"
    )
    for command in statements:
        db.execute(command.format(merge=merge, quoted=merge.replace("'", "''")))
    assert markers(db, name) == ["MERGE"]


@pytest.mark.parametrize(
    "update",
    [
        "/* merged */ {}",
        "DO $$BEGIN {}; END$$",
        "DO $$BEGIN EXECUTE '{}'; END$$",
        "CREATE FUNCTION merge_t() RETURNS void LANGUAGE plpgsql AS $$BEGIN {}; END$$; SELECT merge_t()",
    ],
    ids=["plain", "in a block", "dynamic", "in a function"],
)
def test_an_update_that_moves_rows_is_not_treated_as_a_merge(db: Connection, update: str) -> None:
    db.execute(SETUPS["partitioned"])
    name = track(db, "t")
    moving = "UPDATE t SET region = region || ''a'' WHERE id < 5"
    with exactly_captured(db, "t"):
        db.execute(update.format(moving if "'{}'" in update else moving.replace("''", "'")))
    assert markers(db, name) == []


def test_copy_is_captured(db: Connection) -> None:
    db.execute(SETUPS["plain"])
    track(db, "t")
    with exactly_captured(db, "t"), db.cursor().copy("COPY t FROM STDIN") as copy:
        for number in range(1000, 3000):
            copy.write_row((number, "copied", None))


def test_weights_and_transaction_ids(db: Connection) -> None:
    db.execute("CREATE TABLE t (a int)")
    name = track(db, "t")
    with db.transaction():
        (xid,) = one(db, "SELECT pg_current_xact_id()::text::bigint")
        db.execute("INSERT INTO t VALUES (1); SAVEPOINT s; UPDATE t SET a = 2; RELEASE s")
    rows = db.execute(f"SELECT __pgt_xid, __pgt_w, c1 FROM pgtrickle_changes.changes_{name}").fetchall()
    assert sorted(rows) == [(xid, -1, 1), (xid, 1, 1), (xid, 1, 2)]
    assert activity(db, name) == 2


def test_statements_without_rows_leave_nothing(db: Connection) -> None:
    db.execute("CREATE TABLE t (a int)")
    name = track(db, "t")
    for statement in ("INSERT INTO t SELECT 1 WHERE false", "UPDATE t SET a = 1", "DELETE FROM t"):
        with db.transaction():
            db.execute(statement)
            assert one(db, "SELECT pg_current_xact_id_if_assigned()") == (None,)
    assert (buffer_rows(db, name), activity(db, name), markers(db, name)) == (0, 0, [])


def test_truncate_leaves_a_marker_of_its_transaction(db: Connection) -> None:
    db.execute(SETUPS["partitioned"])
    name = track(db, "t")
    with db.transaction():
        (xid,) = one(db, "SELECT pg_current_xact_id()::text::bigint")
        db.execute("TRUNCATE t_a; TRUNCATE t")
    found = db.execute("SELECT source_stable_name, xid, kind FROM pgtrickle_changes.pgt_markers").fetchall()
    assert found == [(name, xid, "TRUNCATE")]
    assert activity(db, name) == 1
    with db.transaction(force_rollback=True):
        db.execute("TRUNCATE t")
    assert markers(db, name) == ["TRUNCATE"]


def test_session_replication_role_does_not_hide_changes(db: Connection, capture_database: TestDatabase) -> None:
    db.execute(SETUPS["plain"])
    track(db, "t")
    with exactly_captured(db, "t"), psycopg.connect(capture_database.superuser_dsn) as replica:
        replica.execute("SET session_replication_role = replica")
        replica.execute("INSERT INTO work.t VALUES (100, 'x', 1); DELETE FROM work.t WHERE id = 1")


def test_prepared_transactions(db: Connection) -> None:
    db.execute(SETUPS["plain"])
    track(db, "t")
    with exactly_captured(db, "t"):
        db.execute("BEGIN; INSERT INTO t VALUES (100, 'x', 1); PREPARE TRANSACTION 'capture'")
        db.execute("COMMIT PREPARED 'capture'")


def test_a_partition_as_source_captures_writes_through_its_parent(db: Connection) -> None:
    db.execute(SETUPS["partitioned"])
    name = track(db, "t_b")
    assert one(db, "SELECT capture_kind FROM pgtrickle.pgt_change_tracking WHERE source_stable_name = %s", [name]) == (
        "row",
    )
    track(db, "t")
    track(db, "t_rest")
    with exactly_captured(db, "t", "t_b", "t_rest"):
        db.execute("INSERT INTO t VALUES (500, 'b', 1), (501, 'a', 1), (502, 'z', 1)")
        db.execute("UPDATE t SET region = 'b' WHERE region = 'a'")
        db.execute("UPDATE t_b SET amount = 0 WHERE id % 2 = 0; UPDATE t_rest SET amount = amount + 90")
        db.execute("DELETE FROM t WHERE id < 10; UPDATE t SET region = 'zz' WHERE id = 500")
    with exactly_captured(db, "t_b", "t_rest"):  # row triggers see what a MERGE moves
        db.execute(
            "MERGE INTO t USING (VALUES (500), (501)) AS s (id) ON s.id = t.id"
            " WHEN MATCHED THEN UPDATE SET region = 'b'"
        )


def test_an_inheritance_child_as_source_captures_writes_through_its_parent(db: Connection) -> None:
    db.execute(SETUPS["inherited"])
    track(db, "t")
    track(db, "child")
    with exactly_captured(db, "t", "child"):
        db.execute("UPDATE t SET name = 'x'; DELETE FROM t WHERE id = 3; INSERT INTO child VALUES (8, 'y', 1)")


def test_unused_columns_cancel_out(db: Connection) -> None:
    db.execute("CREATE TABLE t (id int PRIMARY KEY, used int, unused int); INSERT INTO t VALUES (1, 1, 1)")
    db.execute("SELECT pgtrickle._attach('t', '{1,2}')")
    db.execute("UPDATE t SET unused = 2")
    assert buffered(db, "t") == Counter()


def test_a_second_stream_table_widens_the_buffer(db: Connection) -> None:
    db.execute("CREATE TABLE t (a int, b text, c int)")
    name = one(db, "SELECT pgtrickle._attach('t', '{1}')")[0]
    db.execute("INSERT INTO t VALUES (1, 'x', 1)")
    (signature,) = one(db, "SELECT pgtrickle._capture_signature('t', '{1}')")
    assert one(db, "SELECT pgtrickle._attach('t', '{2}')") == (name,)
    with exactly_captured(db, "t"):
        db.execute("INSERT INTO t VALUES (2, 'y', 2)")
    assert columns_of(db, "t") == [(1, "a"), (2, "b")]
    # The first one goes on as before.
    assert one(db, "SELECT pgtrickle._capture_signature('t', '{1}')") == (signature,)


def test_capturing_captured_columns_again_needs_no_lock(db: Connection, other: Connection) -> None:
    db.execute(SETUPS["plain"])
    name = track(db, "t")
    with other.transaction():
        other.execute("INSERT INTO t VALUES (100, 'x', 1)")
        assert track(db, "t") == name


def test_waiting_for_a_writer_names_it(db: Connection, other: Connection) -> None:
    db.execute(SETUPS["plain"])
    db.execute("SELECT pgtrickle.set('lock_timeout_ms', '50')")
    try:
        with other.transaction():
            other.execute("INSERT INTO t VALUES (100, 'x', 1)")
            with pytest.raises(psycopg.errors.LockNotAvailable, match=str(other.info.backend_pid)):
                track(db, "t")
    finally:
        db.execute("SELECT pgtrickle.set('lock_timeout_ms', NULL)")
    track(db, "t")


def test_overflow_leaves_a_marker_instead_of_rows(db: Connection) -> None:
    db.execute("CREATE TABLE t (a int)")
    name = track(db, "t")
    db.execute("SELECT pgtrickle.set('max_buffer_rows', '10000')")
    try:
        db.execute("INSERT INTO t SELECT generate_series(1, 10001)")
        db.execute("SELECT pg_stat_force_next_flush()")
        db.execute("SELECT 1")  # the counters are written at the end of a command
        rows = buffer_rows(db, name)
        for _ in range(3):
            db.execute("INSERT INTO t VALUES (0); UPDATE t SET a = 1 WHERE a = 0")
        assert buffer_rows(db, name) == rows
        assert markers(db, name) == ["OVERFLOW"] * 3
        # A service at work will read the rows.
        db.execute("INSERT INTO pgtrickle.pgt_services VALUES (gen_random_uuid(), 'here', 1, 'test')")
        db.execute("INSERT INTO t VALUES (0)")
        assert buffer_rows(db, name) == rows + 1
    finally:
        db.execute("DELETE FROM pgtrickle.pgt_services")
        db.execute("SELECT pgtrickle.set('max_buffer_rows', NULL)")


def test_a_capture_function_attached_to_another_table_captures_nothing(db: Connection) -> None:
    db.execute("CREATE TABLE t (a int); CREATE TABLE alien (a int)")
    name = track(db, "t")
    for table, trigger in (("alien", f"pgtrickle_capture_insert_{name}"), ("t", "again")):
        db.execute(
            f"CREATE TRIGGER {trigger} AFTER INSERT ON {table} REFERENCING NEW TABLE AS __pgt_new"
            f" FOR EACH STATEMENT EXECUTE FUNCTION pgtrickle_changes.capture_{name}()"
        )
    with exactly_captured(db, "t"):
        db.execute("INSERT INTO alien VALUES (1); INSERT INTO t VALUES (2)")
    assert buffer_rows(db, name) == 1


def test_capture_ends_with_the_last_user(db: Connection) -> None:
    db.execute("CREATE TABLE t (a int)")
    name = track(db, "t")
    assert db.execute("SELECT pgtrickle._untrack_unused()").fetchall() == []
    assert one(db, "SELECT to_regclass(%s)", [f"pgtrickle_changes.changes_{name}"]) == (None,)
    assert one(db, "SELECT count(*) FROM pg_trigger WHERE tgrelid = 't'::regclass") == (0,)


def test_ending_capture_of_a_busy_table_does_not_wait_for_long(db: Connection, other: Connection) -> None:
    db.execute("CREATE TABLE t (a int)")
    name = track(db, "t")
    with other.transaction():
        other.execute("INSERT INTO t VALUES (1)")
        assert db.execute("SELECT pgtrickle._untrack_unused()::text").fetchall() == [("t",)]
        other.execute("INSERT INTO t VALUES (2)")
    assert buffer_rows(db, name) <= 2
    rows = buffer_rows(db, name)
    db.execute("INSERT INTO t VALUES (3)")
    assert buffer_rows(db, name) == rows
    assert db.execute("SELECT pgtrickle._untrack_unused()").fetchall() == []
    assert one(db, "SELECT to_regclass(%s)", [f"pgtrickle_changes.changes_{name}"]) == (None,)
