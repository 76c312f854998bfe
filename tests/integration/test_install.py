"""Installing, upgrading and removing the catalog: in one transaction, repeatedly, as an ordinary role."""

from __future__ import annotations

import threading

import psycopg
import pytest

import pgtrickle
from pgtrickle import __version__
from pgtrickle.catalog.install import install, installed_version, latest_version, uninstall, upgrade
from pgtrickle.errors import (
    ExtensionPresentError,
    InstallError,
    NotInstalledError,
    PrivilegeError,
    UnsupportedServerError,
)
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query

pytestmark = pytest.mark.pgversions


def objects(conn: psycopg.Connection) -> set[str]:
    """Everything in the database that PostgreSQL itself did not create."""
    rows = conn.execute(
        "SELECT pg_describe_object(classid, objid, 0) FROM ("
        " SELECT 'pg_class'::regclass AS classid, oid AS objid FROM pg_class WHERE relnamespace::regnamespace::text"
        "  !~ '^(pg_|information_schema)'"
        " UNION ALL SELECT 'pg_proc'::regclass, oid FROM pg_proc WHERE pronamespace::regnamespace::text"
        "  !~ '^(pg_|information_schema)'"
        " UNION ALL SELECT 'pg_namespace'::regclass, oid FROM pg_namespace"
        " UNION ALL SELECT 'pg_trigger'::regclass, oid FROM pg_trigger) AS o"
    ).fetchall()
    return {name for (name,) in rows}


def test_install_creates_the_catalog_and_returns_its_version(conn: psycopg.Connection) -> None:
    assert installed_version(conn) is None
    assert install(conn) == latest_version() == installed_version(conn)
    assert conn.execute("SELECT pgtrickle.version()").fetchone() == (__version__,)
    assert conn.execute("SELECT count(*) FROM pgtrickle.pgt_stream_tables").fetchone() == (0,)


def test_install_twice_changes_nothing(conn: psycopg.Connection) -> None:
    install(conn)
    before = objects(conn)
    conn.execute("SELECT pgtrickle.set('placement', 'spark')")
    assert install(conn) == latest_version()
    assert objects(conn) == before
    assert conn.execute("SELECT pgtrickle._setting('placement')").fetchone() == ("spark",)


def test_uninstall_leaves_nothing_behind(conn: psycopg.Connection) -> None:
    conn.execute("CREATE SCHEMA s; CREATE TABLE s.t (a int PRIMARY KEY)")
    before = objects(conn)
    install(conn)
    conn.execute("SELECT pgtrickle.create_stream_table('s.st', 'SELECT a FROM s.t')")
    assert uninstall(conn, drop_tables=True) == []
    assert objects(conn) == before
    assert installed_version(conn) is None
    conn.execute("INSERT INTO s.t VALUES (1)")


def test_uninstall_keeps_stream_tables_as_plain_tables(conn: psycopg.Connection) -> None:
    install(conn)
    conn.execute("CREATE SCHEMA s; CREATE TABLE s.t (a int PRIMARY KEY)")
    conn.execute("SELECT pgtrickle.create_stream_table('s.st', 'SELECT a FROM s.t', key_columns => '{a}')")
    assert uninstall(conn) == []
    conn.execute("INSERT INTO s.st VALUES (1)")
    assert conn.execute("SELECT a FROM s.st").fetchall() == [(1,)]


def test_uninstall_returns_what_only_owners_can_drop(database: TestDatabase, conn: psycopg.Connection) -> None:
    install(conn)
    owner = database.create_role("owner")
    conn.execute(f"GRANT CREATE ON DATABASE {database.name} TO {owner}")
    with psycopg.connect(database.direct_dsn_as(owner), autocommit=True) as theirs:
        theirs.execute('CREATE SCHEMA mine; CREATE TABLE mine.t (a int); CREATE TABLE mine."T" (a int)')
        theirs.execute("SELECT pgtrickle.create_stream_table('mine.\"S t\"', 'SELECT a FROM mine.t')")
        remaining = uninstall(conn, drop_tables=True)
        assert remaining == ['DROP TABLE "mine"."S t";']
        theirs.execute("INSERT INTO mine.t VALUES (1)")
        theirs.execute(remaining[0])


def test_uninstall_refuses_to_drop_users_views(conn: psycopg.Connection) -> None:
    install(conn)
    conn.execute("CREATE SCHEMA s; CREATE VIEW s.mine AS SELECT pgt_name FROM pgtrickle.pgt_stream_tables")
    with pytest.raises(InstallError, match=r"s\.mine"):
        uninstall(conn)
    assert installed_version(conn) == latest_version()


def test_upgrade_keeps_the_data(conn: psycopg.Connection) -> None:
    assert install(conn, target=1) == 1
    conn.execute("CREATE SCHEMA s; CREATE TABLE s.st (a int); CREATE VIEW s.v AS SELECT 1 AS a")
    conn.execute(
        "INSERT INTO pgtrickle.pgt_stream_tables (pgt_schema, pgt_name, pgt_relid, view_relid, defining_query)"
        " VALUES ('s', 'st', 's.st', 's.v', 'SELECT 1 AS a')"
    )
    assert upgrade(conn) == latest_version() > 1
    row = conn.execute("SELECT pgt_name, fencing_token, data_version FROM pgtrickle.pgt_stream_tables").fetchone()
    assert row == ("st", 0, 0)
    assert conn.execute("SELECT pgt_name FROM pgtrickle.pgt_status()").fetchone() == ("st",)


def test_upgrade_keeps_captured_changes_and_continues_capturing(conn: psycopg.Connection) -> None:
    """Version 2 had one table per buffer, and capture functions for only that table."""
    install(conn, target=2)
    conn.execute("CREATE TABLE t (a int, b int)")
    conn.execute(
        """
        CREATE TABLE pgtrickle_changes.changes_h (__pgt_xid bigint NOT NULL, __pgt_w smallint NOT NULL, c1 int);
        CREATE FUNCTION pgtrickle_changes.capture_h() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO pgtrickle_changes.changes_h SELECT pg_current_xact_id()::text::bigint, 1, a FROM __pgt_new;
            RETURN NULL;
        END $$;
        CREATE TRIGGER pgtrickle_capture_insert_h AFTER INSERT ON t REFERENCING NEW TABLE AS __pgt_new
            FOR EACH STATEMENT EXECUTE FUNCTION pgtrickle_changes.capture_h();
        INSERT INTO pgtrickle.pgt_change_tracking
            (source_relid, source_stable_name, buffer_relid, tracked_columns, capture_kind)
        VALUES ('t', 'h', 'pgtrickle_changes.changes_h', '{1}', 'statement');
        INSERT INTO t VALUES (1);
        """
    )
    former = conn.execute("SELECT prosrc FROM pg_proc WHERE proname = 'capture_h'").fetchone()
    assert upgrade(conn) == latest_version() > 2
    assert conn.execute("SELECT prosrc FROM pg_proc WHERE proname = 'capture_h'").fetchone() != former
    assert conn.execute("SELECT last_value, is_called FROM pgtrickle_changes.turn_h").fetchone() == (1, True)
    members = "SELECT pgtrickle._partition_tree('pgtrickle_changes.changes_h')"
    checked = f"SELECT FROM pg_attribute WHERE attrelid IN ({members}) AND attnotnull AND attnum > 0"
    assert conn.execute(checked.encode()).fetchall() == []
    conn.execute("INSERT INTO t VALUES (2); SELECT setval('pgtrickle_changes.turn_h', 2); INSERT INTO t VALUES (3)")
    assert conn.execute("SELECT c1 FROM pgtrickle_changes.changes_h ORDER BY 1").fetchall() == [(1,), (2,), (3,)]
    assert conn.execute("SELECT c1 FROM pgtrickle_changes.spare_h").fetchall() == [(3,)]


def test_upgrade_leaves_capture_of_altered_sources_to_the_next_refresh(conn: psycopg.Connection) -> None:
    """A new function would store the column's new type in a buffer column of the old type, and fail the writer."""
    install(conn)
    conn.execute("CREATE TABLE t (a int)")
    conn.execute("SELECT pgtrickle._attach('t', '{1}')")
    former = conn.execute("SELECT prosrc FROM pg_proc WHERE proname LIKE 'capture%'").fetchone()
    conn.execute("ALTER TABLE t ALTER a TYPE text")
    upgrade(conn)
    assert conn.execute("SELECT prosrc FROM pg_proc WHERE proname LIKE 'capture%'").fetchone() == former
    conn.execute("INSERT INTO t VALUES ('not a number')")
    assert conn.execute("SELECT kind FROM pgtrickle_changes.pgt_markers").fetchall() == [("SCHEMA",)]


def test_upgrade_removes_lengths_from_buffers(conn: psycopg.Connection) -> None:
    """Version 16 gave a buffer's columns the lengths and precisions of their source."""
    install(conn, target=16)
    columns = {
        "a": "varchar(5)",
        "b": "numeric(8,2)",
        "c": 'char(3) COLLATE "C"',
        "d": "bit(4)",
        "e": "varchar(4)[]",
        "f": "int",
    }
    conn.execute(f"CREATE TABLE t ({', '.join(f'{name} {kind}' for name, kind in columns.items())})".encode())
    buffer = ", ".join(f"c{number} {kind}" for number, kind in enumerate(columns.values(), 1))
    conn.execute(f"CREATE TABLE pgtrickle_changes.changes_h (__pgt_xid bigint, __pgt_w smallint, {buffer})".encode())
    conn.execute("CREATE TABLE pgtrickle_changes.spare_h () INHERITS (pgtrickle_changes.changes_h)")
    conn.execute(
        "INSERT INTO pgtrickle.pgt_change_tracking"
        " (source_relid, source_stable_name, buffer_relid, tracked_columns, capture_kind)"
        " VALUES ('t', 'h', 'pgtrickle_changes.changes_h', '{1,2,3,4,5,6}', 'statement')"
    )
    conn.execute("INSERT INTO t VALUES ('abc', 1.25, 'x', '1010', '{ab}', 7)")
    conn.execute("INSERT INTO pgtrickle_changes.spare_h SELECT 5, 1, * FROM t")
    assert upgrade(conn) == latest_version() > 16
    kinds = conn.execute(
        "SELECT format_type(atttypid, atttypmod), (SELECT collname FROM pg_collation WHERE oid = attcollation)"
        " FROM pg_attribute WHERE attrelid = 'pgtrickle_changes.spare_h'::regclass AND attnum > 2 ORDER BY attnum"
    ).fetchall()
    assert kinds == [
        ("character varying", "default"),
        ("numeric", None),
        ("bpchar", "C"),
        ('"bit"', None),
        ("character varying[]", "default"),
        ("integer", None),
    ]
    kept = conn.execute("SELECT c1, c2, c3, c4, c5, c6 FROM pgtrickle_changes.changes_h").fetchall()
    assert kept == conn.execute("SELECT a, b, c, d, e, f FROM t").fetchall()


def test_upgrade_replaces_row_ids(conn: psycopg.Connection, database: TestDatabase) -> None:
    """Up to version 20, row IDs were computed by another function."""
    query = "SELECT a, b FROM t"
    conn.execute("CREATE TABLE t (a int, b text); INSERT INTO t VALUES (1, 'x'), (1, 'x'), (2, NULL), (3, '(y)')")
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        db.create_stream_table("st", query)
        with psycopg.connect(database.superuser_dsn, autocommit=True) as admin:
            admin.execute("SET session_replication_role = replica")
            admin.execute("UPDATE st SET __pgt_row_id = pgtrickle._former_row_id(ROW(a, b)::text)")
            # What migration 21 says of it.
            admin.execute("UPDATE pgtrickle.pgt_stream_tables SET has_former_row_ids = true")
        for statement in (
            "DELETE FROM t WHERE a = 2",
            "DELETE FROM t WHERE b = '(y)'",
            "INSERT INTO t VALUES (1, 'x')",
        ):
            conn.execute(statement.encode())
            assert [result.action for result in db.refresh("st")] == ["DIFFERENTIAL"]
            assert_equal_to_query(conn, "st", query)
    ids = "SELECT bool_and(__pgt_row_id = pgtrickle._row_id(ROW(a, b)::text)) FROM st"
    assert conn.execute(ids.encode()).fetchone() == (True,)


def test_failed_upgrade_leaves_the_old_version(conn: psycopg.Connection) -> None:
    install(conn, target=1)
    conn.execute("ALTER TABLE pgtrickle.pgt_stream_tables ADD COLUMN fencing_token text")
    before = objects(conn)
    with pytest.raises(InstallError, match="fencing_token"):
        upgrade(conn)
    assert installed_version(conn) == 1
    assert objects(conn) == before
    conn.execute("ALTER TABLE pgtrickle.pgt_stream_tables DROP COLUMN fencing_token")
    assert upgrade(conn) == latest_version()


def test_upgrade_and_uninstall_need_an_installation(conn: psycopg.Connection) -> None:
    with pytest.raises(NotInstalledError, match="no pgtrickle catalog"):
        upgrade(conn)
    with pytest.raises(NotInstalledError, match="no pgtrickle catalog"):
        uninstall(conn)


def test_a_newer_catalog_is_refused(conn: psycopg.Connection) -> None:
    install(conn)
    conn.execute("INSERT INTO pgtrickle.pgt_schema_version (version) VALUES (9999)")
    with pytest.raises(NotInstalledError, match="9999"):
        upgrade(conn)


def test_concurrent_installs_serialise(database: TestDatabase) -> None:
    results: list[object] = []

    def run() -> None:
        try:
            with psycopg.connect(database.direct_dsn) as conn:
                results.append(install(conn))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [latest_version()] * 4


def test_foreign_schema_of_the_same_name_is_refused(conn: psycopg.Connection) -> None:
    conn.execute("CREATE SCHEMA pgtrickle_changes")
    with pytest.raises(InstallError, match="pgtrickle_changes"):
        install(conn)
    assert conn.execute("SELECT to_regnamespace('pgtrickle')").fetchone() == (None,)


def test_installing_needs_create_on_the_database(database: TestDatabase) -> None:
    role = database.create_role("nobody")
    with (
        psycopg.connect(database.direct_dsn_as(role), autocommit=True) as conn,
        pytest.raises(PrivilegeError, match="permission denied") as caught,
    ):
        install(conn)
    assert "GRANT CREATE ON DATABASE" in str(caught.value.hint)


def test_only_the_installing_role_upgrades(database: TestDatabase, conn: psycopg.Connection) -> None:
    install(conn)
    role = database.create_role("other")
    with (
        psycopg.connect(database.direct_dsn_as(role)) as other,
        pytest.raises(PrivilegeError, match="belongs to role app"),
    ):
        upgrade(other)


def test_the_extension_is_refused(database: TestDatabase, conn: psycopg.Connection) -> None:
    # The extension itself cannot be loaded here; what is looked at is its row in pg_extension.
    with psycopg.connect(database.superuser_dsn, autocommit=True) as superuser:
        superuser.execute("SET allow_system_table_mods = on")
        superuser.execute(
            "INSERT INTO pg_extension (oid, extname, extowner, extnamespace, extrelocatable, extversion)"
            " VALUES (99999, 'pg_trickle', 10, 'public'::regnamespace, false, '0.67')"
        )
    with pytest.raises(ExtensionPresentError, match="pg_trickle"):
        install(conn)
    assert installed_version(conn) is None


def test_old_servers_are_refused(conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    # No server that old is at hand, so the requirement is moved instead of the server.
    monkeypatch.setattr("pgtrickle.catalog.install.OLDEST_SERVER", 99)
    with pytest.raises(UnsupportedServerError, match="PostgreSQL 1"):
        install(conn)


def test_the_service_role_can_be_named_and_changed(database: TestDatabase, conn: psycopg.Connection) -> None:
    first, second = database.create_role("first"), database.create_role("second")
    writes = "SELECT has_table_privilege(%s, 'pgtrickle.pgt_stream_tables', 'UPDATE')"
    install(conn, service_role=first)
    assert conn.execute(writes, [first]).fetchone() == (True,)
    install(conn)
    assert conn.execute("SELECT pgtrickle._service_role()").fetchone() == (first,)
    install(conn, service_role=second)
    assert conn.execute(writes, [first]).fetchone() == (False,)
    assert conn.execute(writes, [second]).fetchone() == (True,)
    with pytest.raises(InstallError, match="no role nobody_at_all"):
        install(conn, service_role="nobody_at_all")


def test_install_inside_a_transaction_is_part_of_it(database: TestDatabase) -> None:
    with psycopg.connect(database.direct_dsn) as conn:
        conn.execute("CREATE SCHEMA s; SET LOCAL search_path = s")
        install(conn)
        assert conn.execute("SELECT current_schema()").fetchone() == ("s",)
        conn.rollback()
        assert installed_version(conn) is None
