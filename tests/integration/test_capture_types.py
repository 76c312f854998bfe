"""Columns of every type are captured with their type modifiers and collations."""

from __future__ import annotations

import psycopg
import pytest

from pgtrickle.embedded.binaries import ServerVersion

# Pytest finds the fixtures under the names imported here.
from tests.integration.test_capture import (
    Connection,
    capture_database,
    columns_of,
    db,
    exactly_captured,
    markers,
    one,
    track,
)
from tests.support.database import TestDatabase

__all__ = ["capture_database", "db"]

pytestmark = pytest.mark.pgversions

TYPES = """
    CREATE TYPE mood AS ENUM ('sad', 'ok');
    CREATE TYPE box2 AS (w int, h numeric(6,2), m mood);
    CREATE DOMAIN percent AS numeric(5,2) CHECK (VALUE <= 100);
    CREATE DOMAIN half AS percent CHECK (VALUE <= 50);
    CREATE TYPE span AS RANGE (subtype = float8);
"""

VALUES = {
    "smallint": ["-32768", "NULL"],
    "bigint": ["9223372036854775807"],
    "numeric": ["'NaN'", "'Infinity'", "1.0", "1.00", "123456789012345678901234567890.123456789"],
    "numeric(10,2)": ["1.5", "'NaN'"],
    "real": ["'-0'", "'NaN'", "1e-30"],
    "double precision": ["'-0'", "'Infinity'", "0.1"],
    "money": ["12.34"],
    "boolean": ["true", "NULL"],
    "text": ["''", "NULL", "'a\"b,(c)\\'", "repeat('long', 100000)"],
    "varchar(5)": ["'abc  '"],
    "char(5)": ["'ab'"],
    '"char"': ["'x'"],
    "name": ["'n'"],
    'text COLLATE "C"': ["'Z'"],
    "bytea": ["'\\x00ff'", "''"],
    "bit(3)": ["B'101'"],
    "bit varying": ["B'1'"],
    "date": ["'infinity'", "'0044-03-15 BC'"],
    "time(3)": ["'12:34:56.789'"],
    "timetz": ["'12:00+02'"],
    "timestamp": ["'-infinity'"],
    "timestamptz(0)": ["'2026-01-01 12:00:00.6+02'"],
    "interval": ["'1 mon -1 day'", "'24:00'"],
    "interval day to second(2)": ["'1 day 00:00:01.239'"],
    "uuid": ["'00000000-0000-0000-0000-000000000001'"],
    "json": ['\'{"b": 1,  "a": [null]}\'', "'null'"],
    "jsonb": ["'{\"b\": 1.0}'"],
    "xml": ["'<a/>'"],
    "inet": ["'10.0.0.1/8'"],
    "macaddr8": ["'08:00:2b:01:02:03:04:05'"],
    "point": ["'(1,2)'"],
    "polygon": ["'((0,0),(1,1),(1,0))'"],
    "circle": ["'<(0,0),1>'"],
    "tsvector": ["'a:1 b:2'"],
    "tsquery": ["'a & b'"],
    "oid": ["1"],
    "regclass": ["'pg_class'"],
    "pg_lsn": ["'0/1'"],
    "xid8": ["'5'"],
    "int4range": ["'[1,5)'", "'empty'", "NULL"],
    "int4multirange": ["'{[1,2),[5,9)}'"],
    "tstzrange": ["'(,2026-01-01)'"],
    "span": ["'[0.5,1.5]'"],
    "int[]": ["'{1,NULL,3}'", "'[2:3]={1,2}'", "'{{1,2},{3,4}}'"],
    "numeric(6,3)[]": ["'{1.5,NaN}'"],
    "text[]": ['\'{"a,b","",NULL}\''],
    "mood": ["'ok'"],
    "mood[]": ["'{sad,ok}'"],
    "box2": ["'(1,2.5,ok)'", "'(,,)'", "NULL"],
    "box2[]": ["ARRAY['(1,2,sad)'::box2, NULL]"],
    "percent": ["99.5", "NULL"],
    "half": ["1.25"],
    "percent[]": ["'{1,2.5}'"],
}


def test_every_type(db: Connection) -> None:
    try:
        db.execute("SELECT '<a/>'::xml")
        types = VALUES
    except psycopg.errors.FeatureNotSupported:
        print("this server was built without XML: the type xml is left out")
        types = {name: values for name, values in VALUES.items() if name != "xml"}
    db.execute(TYPES)
    columns = ", ".join(f"v{i} {name}" for i, name in enumerate(types))
    db.execute(f"CREATE TABLE t (id int, {columns})")
    name = track(db, "t")
    with exactly_captured(db, "t"):
        for i, values in enumerate(types.values()):
            for value in values:
                db.execute(f"INSERT INTO t (id, v{i}) VALUES ({i}, {value})")
        db.execute("UPDATE t SET id = id + 1")
        db.execute("DELETE FROM t WHERE id % 3 = 0")
    assert markers(db, name) == []
    # The buffer's columns have the source's types, of any length; domains are their base types.
    rows = db.execute(
        "SELECT format_type(s.atttypid, -1), format_type(b.atttypid, b.atttypmod), s.attcollation = b.attcollation"
        " FROM pgtrickle.pgt_change_tracking t JOIN pg_attribute s ON s.attrelid = t.source_relid"
        " JOIN pg_attribute b ON b.attrelid = t.buffer_relid AND b.attname = 'c' || s.attnum"
        " WHERE t.source_stable_name = %s",
        [name],
    ).fetchall()
    assert len(rows) == len(types) + 1
    assert all(collation for _, _, collation in rows)
    different = {(source, buffer) for source, buffer, _ in rows if source != buffer}
    assert different == {("percent", "numeric"), ("half", "numeric")}


def test_many_columns(db: Connection) -> None:
    db.execute("CREATE TABLE t (" + ", ".join(f"c{i} int" for i in range(400)) + ")")
    track(db, "t")
    with exactly_captured(db, "t"):
        db.execute("INSERT INTO t (c0, c399) VALUES (1, 2); UPDATE t SET c200 = 5")


def test_virtual_generated_columns_are_captured_through_their_base_columns(
    db: Connection, pg_version: ServerVersion
) -> None:
    if pg_version < 18:
        pytest.skip(f"PostgreSQL {pg_version} has no virtual generated columns")
    db.execute("CREATE TABLE t (a int, b int, c int, v int GENERATED ALWAYS AS (a * 10 + c) VIRTUAL)")
    db.execute("SELECT pgtrickle._attach('t', '{4}')")
    assert columns_of(db, "t") == [(1, "a"), (3, "c")]
    before = one(db, "SELECT pgtrickle._capture_signature('t', '{4}')")
    with exactly_captured(db, "t"):
        db.execute("INSERT INTO t (a, b, c) VALUES (1, 2, 3); UPDATE t SET c = 4")
    assert one(db, "SELECT pgtrickle._capture_signature('t', '{4}')") == before
    db.execute("ALTER TABLE t ALTER COLUMN v SET EXPRESSION AS (a * 10)")
    assert one(db, "SELECT pgtrickle._capture_signature('t', '{4}')") != before


def test_a_type_in_a_closed_schema_is_named(capture_database: TestDatabase, db: Connection) -> None:
    owner = capture_database.create_role("closed")
    db.execute(f"GRANT CREATE ON DATABASE {capture_database.name} TO {owner}")
    with psycopg.connect(capture_database.direct_dsn_as(owner), autocommit=True) as theirs:
        theirs.execute("CREATE SCHEMA closed; CREATE TYPE closed.e AS ENUM ('x'); CREATE TABLE closed.t (a closed.e)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="may not use schema closed") as caught:
            theirs.execute("SELECT pgtrickle._attach('closed.t', '{1}')")
        remedy = str(caught.value.diag.message_hint).removeprefix("Run: ")
        theirs.execute(remedy)
        theirs.execute("SELECT pgtrickle._attach('closed.t', '{1}')")
        theirs.execute("DROP SCHEMA closed CASCADE")


def test_tables_of_a_subscription_get_row_triggers(capture_database: TestDatabase, db: Connection) -> None:
    """A replication worker fires only row triggers.

    The subscription is created but not connected; the test plays the worker.
    """
    db.execute("CREATE TABLE t (a int PRIMARY KEY, b text)")
    name = track(db, "t")
    with psycopg.connect(capture_database.superuser_dsn, autocommit=True) as superuser:
        superuser.execute(
            f"CREATE SUBSCRIPTION {capture_database.name} CONNECTION 'dbname=nowhere' PUBLICATION p"
            " WITH (connect = false, slot_name = NONE)"
        )
        superuser.execute(
            "INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate)"
            " SELECT s.oid, 'work.t'::regclass, 'r' FROM pg_subscription s WHERE s.subname = current_database()"
        )
        try:
            db.execute("SELECT pgtrickle._retrack('t')")
            kinds = db.execute(
                "SELECT tgname, tgenabled::text, (tgtype & 1) = 1 FROM pg_trigger"
                " WHERE tgrelid = 't'::regclass AND NOT tgisinternal ORDER BY tgname"
            ).fetchall()
            assert kinds == [
                (f"pgtrickle_capture_delete_{name}", "A", True),
                (f"pgtrickle_capture_insert_{name}", "A", True),
                (f"pgtrickle_capture_truncate_{name}", "A", False),
                (f"pgtrickle_capture_update_{name}", "A", True),
            ]
            with exactly_captured(db, "t"):
                superuser.execute("SET session_replication_role = replica")
                superuser.execute("INSERT INTO work.t VALUES (1, 'x'), (2, 'y'); UPDATE work.t SET b = 'z' WHERE a = 1")
                superuser.execute("DELETE FROM work.t WHERE a = 2")
            superuser.execute("TRUNCATE work.t")
            assert markers(db, name) == ["TRUNCATE"]
        finally:
            superuser.execute("DELETE FROM pg_subscription_rel")
            superuser.execute(f"DROP SUBSCRIPTION {capture_database.name}")
