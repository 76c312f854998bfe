"""`verify`: equal for intact stream tables even while sources change, and exact about rows changed by hand."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

import pgtrickle
from pgtrickle.catalog.query_files import load_query
from pgtrickle.cli.diagnostics import find_problems
from pgtrickle.cli.main import cli
from pgtrickle.errors import PgtrickleError
from pgtrickle.refresh import atomic_group
from tests.support.database import TestDatabase
from tests.support.remote_shop import QUERIES as REMOTE_QUERIES
from tests.support.remote_shop import RemoteShop
from tests.support.service import running_service, until

pytestmark = pytest.mark.pgversions

QUERIES = {
    "keyed": "SELECT id, kind, amount FROM sale WHERE amount > 5",
    "keyless": "SELECT kind, amount FROM sale",
    "summed": "SELECT kind, count(*) AS n, sum(amount) AS total FROM sale GROUP BY kind",
    "floats": "SELECT kind, sum(weight) AS weight, avg(weight) AS mean FROM sale GROUP BY kind",
    "padded": "SELECT s.id, s.kind, k.label FROM sale s LEFT JOIN kind k ON k.kind = s.kind",
    "recomputed": "SELECT kind, max(amount) AS most, array_agg(id ORDER BY id) AS ids FROM sale GROUP BY kind",
    "documents": "SELECT id, document, place FROM sale",
    "timed": "SELECT id, kind FROM sale WHERE at < now()",
}


@pytest.fixture
def db(database: TestDatabase, conn: psycopg.Connection) -> Iterator[pgtrickle.Database]:
    conn.execute(
        "CREATE TABLE kind (kind text PRIMARY KEY, label text);"
        "CREATE TABLE sale (id int PRIMARY KEY, kind text, amount numeric(10, 2), weight float8, document json, place point,"
        " at timestamptz DEFAULT now());"
        "INSERT INTO kind VALUES ('k0', 'zero'), ('k1', NULL);"
        "INSERT INTO sale (id, kind, amount, weight, document, place) SELECT n, 'k' || n % 3, n % 17, n / 7.0,"
        " json_build_object('n', n), point(n, 1) FROM generate_series(1, 200) AS n"
    )
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        yield db


@pytest.fixture
def by_hand(database: TestDatabase) -> Iterator[psycopg.Connection[Any]]:
    """A superuser whose writes fire no trigger, neither the guard's nor a capture trigger."""
    with psycopg.connect(database.superuser_dsn, autocommit=True) as superuser:
        superuser.execute("SET session_replication_role = replica")
        yield superuser


def test_correct_stream_tables_are_equal(db: pgtrickle.Database, conn: psycopg.Connection) -> None:
    for name, query in QUERIES.items():
        db.create_stream_table(name, query)
    conn.execute("UPDATE sale SET amount = amount + 1, weight = weight * 1.1 WHERE id % 5 = 0")
    conn.execute("DELETE FROM sale WHERE id < 10")
    for found in db.verify(list(QUERIES)):
        assert (found.equal, found.missing, found.unexpected, found.reason) == (True, 0, 0, None), found
        assert found.rows == conn.execute(f"SELECT count(*) FROM {found.name}".encode()).fetchone()[0]  # type: ignore[index]
    recorded = conn.execute("SELECT count(*), bool_and(equal) FROM pgtrickle.pgt_verifications").fetchone()
    assert recorded == (len(QUERIES), True)
    assert set(
        conn.execute("SELECT verified, verified_at > now() - interval '1 hour' FROM pgtrickle.pgt_status()")
    ) == {("equal", True)}


def test_rows_changed_deleted_and_duplicated_by_hand_are_found(
    db: pgtrickle.Database, conn: psycopg.Connection, by_hand: psycopg.Connection
) -> None:
    for name in ("keyed", "keyless", "documents"):
        db.create_stream_table(name, QUERIES[name])
    by_hand.execute("UPDATE keyed SET kind = 'other' WHERE id = 10")
    by_hand.execute("DELETE FROM keyed WHERE id = 11")
    by_hand.execute(
        "INSERT INTO keyless (kind, amount, __pgt_row_id) SELECT kind, amount, __pgt_row_id FROM keyless LIMIT 1"
    )
    by_hand.execute("UPDATE documents SET document = '{}' WHERE id = 7")
    keyed, keyless, documents = db.verify(["keyed", "keyless", "documents"])
    assert (keyed.equal, keyed.missing, keyed.unexpected) == (False, 2, 1)
    assert keyed.columns == ("id", "kind", "amount")
    assert keyed.unexpected_rows == (("10", "other", "10.00"),)
    assert sorted(keyed.missing_rows) == [("10", "k1", "10.00"), ("11", "k2", "11.00")]
    assert (keyless.equal, keyless.missing, keyless.unexpected) == (False, 0, 1)
    assert (documents.equal, documents.missing, documents.unexpected) == (False, 1, 1)
    assert documents.unexpected_rows == (("7", "{}", "(7,1)"),)
    events = conn.execute(
        "SELECT payload ->> 'stream_table', payload ->> 'missing' FROM pgtrickle.events() WHERE event = 'verification_failed'"
    ).fetchall()
    assert sorted(events) == [("public.documents", "1"), ("public.keyed", "2"), ("public.keyless", "0")]
    states: dict[str, str] = dict(
        conn.execute("SELECT pgt_name, status || ' ' || verified FROM pgtrickle.pgt_status()").fetchall()
    )
    assert states == dict.fromkeys(("keyed", "keyless", "documents"), "ACTIVE different")
    for name in ("keyed", "keyless", "documents"):
        assert db.reinitialize(name, "by a test").action == "REINITIALIZE"
    assert all(found.equal for found in db.verify(["keyed", "keyless", "documents"]))


def test_a_lost_change_is_found(db: pgtrickle.Database, conn: psycopg.Connection, by_hand: psycopg.Connection) -> None:
    db.create_stream_table("summed", QUERIES["summed"])
    conn.execute("UPDATE sale SET amount = amount + 1 WHERE id = 1")
    (buffers,) = by_hand.execute(
        "SELECT array_agg(buffer_relid::text) FROM pgtrickle.pgt_change_tracking"
    ).fetchone() or ([],)
    for buffer in buffers:
        by_hand.execute(f"DELETE FROM {buffer}".encode())
    conn.execute("UPDATE sale SET amount = amount + 1 WHERE id = 2")
    (found,) = db.verify("summed")
    assert (found.equal, found.missing, found.unexpected) == (False, 1, 1)
    assert found.missing_rows[0][0] == "k1"


def test_busy_sources_make_no_difference(
    db: pgtrickle.Database, database: TestDatabase, conn: psycopg.Connection
) -> None:
    """Commits between the refresh and the comparison belong to neither."""
    for name in ("keyed", "keyless", "summed"):
        db.create_stream_table(name, QUERIES[name])
    over = threading.Event()
    written = 0

    def write() -> None:
        nonlocal written
        with psycopg.connect(database.direct_dsn, autocommit=True) as writer:
            while not over.is_set():
                writer.execute("UPDATE sale SET amount = amount + 1 WHERE mod(id, 40) = %s", (written % 40,))
                writer.execute("INSERT INTO sale (id, kind, amount) VALUES (%s, 'k9', 6)", (1000 + written,))
                written += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(5):
            before = written
            for found in db.verify(["keyed", "keyless", "summed"]):
                assert found.equal, found
            assert written > before
    finally:
        over.set()
        thread.join()


def test_floats_may_differ_in_their_last_digits(db: pgtrickle.Database, by_hand: psycopg.Connection) -> None:
    db.create_stream_table("floats", QUERIES["floats"])
    by_hand.execute("UPDATE floats SET weight = weight * (1 + 1e-13)")
    assert db.verify("floats")[0].equal
    by_hand.execute("UPDATE floats SET weight = weight * (1 + 1e-6) WHERE kind = 'k0'")
    (found,) = db.verify("floats")
    assert (found.equal, found.missing, found.unexpected) == (False, 1, 1)


def test_equality_is_that_of_postgresql(
    db: pgtrickle.Database, conn: psycopg.Connection, by_hand: psycopg.Connection
) -> None:
    conn.execute("CREATE TABLE n (id int PRIMARY KEY, x numeric); INSERT INTO n VALUES (1, 1.0), (2, 2)")
    db.create_stream_table("numbers", "SELECT id, x FROM n")
    by_hand.execute("UPDATE numbers SET x = 1.00 WHERE id = 1")
    assert db.verify("numbers")[0].equal


def test_a_difference_that_the_query_allows_is_not_reported(
    db: pgtrickle.Database, conn: psycopg.Connection, by_hand: psycopg.Connection
) -> None:
    conn.execute("CREATE VIEW kinds AS SELECT kind, array_agg(id) AS ids FROM sale GROUP BY kind")
    db.create_stream_table("listed", "SELECT kind, ids FROM kinds")
    by_hand.execute("UPDATE listed SET ids = (SELECT array_agg(i ORDER BY i DESC) FROM unnest(ids) AS i)")
    (found,) = db.verify("listed")
    assert (found.equal, found.failed) == (None, False)
    assert "array_agg() without ORDER BY" in (found.reason or "")
    assert conn.execute("SELECT FROM pgtrickle.events() WHERE event = 'verification_failed'").fetchall() == []


def test_stream_tables_over_other_databases_are_not_compared(remote_shop: RemoteShop) -> None:
    with pgtrickle.connect(remote_shop.home.dsn) as db:
        db.create_stream_table("across", next(iter(REMOTE_QUERIES.values())), initialize=False)
        (found,) = db.verify("across")
        assert found.equal is None
        assert "reads other databases" in (found.reason or "")


def test_the_command(
    db: pgtrickle.Database, database: TestDatabase, by_hand: psycopg.Connection, tmp_path: Path
) -> None:
    db.create_stream_table("keyed", QUERIES["keyed"])
    db.create_stream_table("summed", QUERIES["summed"])
    runner = CliRunner()
    arguments = ["--dsn", database.dsn, "verify"]
    done = runner.invoke(cli, [*arguments, "--all"])
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\tequal\t") == 2
    by_hand.execute("UPDATE keyed SET kind = 'secret' WHERE id = 10")
    done = runner.invoke(cli, [*arguments, "--all", "--evidence", str(tmp_path / "e.json")])
    assert isinstance(done.exception, PgtrickleError)
    assert "1 of 2 stream tables differ from their queries: public.keyed" in str(done.exception)
    assert "secret" in done.stdout
    (evidence,) = json.loads((tmp_path / "e.json").read_text())
    assert (evidence["stream_table"], evidence["missing"], evidence["unexpected"]) == ("public.keyed", 1, 1)
    assert len(evidence["verifications"]) == 2
    assert "secret" not in json.dumps(evidence)
    assert "amount > 5" not in json.dumps(evidence)
    done = runner.invoke(cli, [*arguments, "keyed", "--evidence", str(tmp_path / "d.json"), "--with-data", "--repair"])
    assert done.exit_code == 0, done.output
    assert "re-initialized: public.keyed" in done.stderr
    assert "secret" in (tmp_path / "d.json").read_text()
    assert db.verify("keyed")[0].equal


@pytest.mark.direct("behind a pooler nothing is compared")
def test_a_service_compares_in_rotation(
    db: pgtrickle.Database, database: TestDatabase, conn: psycopg.Connection, by_hand: psycopg.Connection
) -> None:
    conn.execute("SELECT pgtrickle.set('verify_interval', '1s'), pgtrickle.set('verify_budget_percent', '100')")
    for name in ("keyed", "keyless", "summed"):
        db.create_stream_table(name, QUERIES[name], schedule="1s")
    # Its function fails for a row that comes now: it cannot be compared, and has its turn as the others do.
    conn.execute("CREATE FUNCTION odd(n int) RETURNS int IMMUTABLE LANGUAGE sql RETURN 1 / (n - 1000)")
    db.create_stream_table("failing", "SELECT id, odd(id) AS n FROM sale", schedule="1s")
    conn.execute("INSERT INTO sale (id, kind, amount) VALUES (1000, 'k1', 1)")
    by_hand.execute("DELETE FROM keyed WHERE id = 11")
    states = "SELECT pgt_name::text, verified FROM pgtrickle.pgt_status() WHERE verified IS NOT NULL"
    with running_service(database.dsn, database.name) as service:
        until(lambda: len(conn.execute(states).fetchall()) == 3, "three are compared")
        tended = service.launchers[0].databases[database.name].tended
        assert tended is not None
        counters = tended.counters
        until(lambda: counters.differences >= 1)
        assert counters.verifications >= 3
    found: dict[str, str] = dict(conn.execute(states).fetchall())
    assert found == {"keyed": "different", "keyless": "equal", "summed": "equal"}
    (finding,) = [one for one in find_problems(conn, 300) if one.check == "difference"]
    assert finding.subject == "public.keyed"
    events = conn.execute("SELECT count(*) FROM pgtrickle.events() WHERE event = 'verification_failed'").fetchone()
    assert events is not None
    assert events[0] >= 1
    db.reinitialize("keyed", "by a test")
    assert db.verify("keyed")[0].equal
    assert not [one for one in find_problems(conn, 300) if one.check == "difference"]


def test_a_rolled_back_comparison_is_repeated(
    db: pgtrickle.Database, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.create_stream_table("keyed", QUERIES["keyed"])
    checked: list[str] = []

    def check_passed(*_: object) -> None:
        checked.append("")
        if len(checked) == 1:
            raise atomic_group.NotAtomicError("a partition was attached")

    monkeypatch.setattr(atomic_group._Group, "_check_passed", check_passed)
    (found,) = db.verify("keyed")
    assert found.equal
    assert len(checked) == 2
    assert conn.execute("SELECT count(*) FROM pgtrickle.pgt_verifications").fetchone() == (1,)


@pytest.mark.direct("behind a pooler nothing is compared")
def test_sql_asks_a_service_to_compare(
    db: pgtrickle.Database, database: TestDatabase, conn: psycopg.Connection, by_hand: psycopg.Connection
) -> None:
    db.create_stream_table("keyed", QUERIES["keyed"], schedule="1h")
    db.create_stream_table("summed", QUERIES["summed"], schedule="1h")
    conn.execute("CREATE FUNCTION odd(n int) RETURNS int IMMUTABLE LANGUAGE sql RETURN 1 / (n - 1000)")
    db.create_stream_table("failing", "SELECT id, odd(id) AS n FROM sale", schedule="1h")
    conn.execute("INSERT INTO sale (id, kind, amount) VALUES (1000, 'k1', 100)")
    by_hand.execute("DELETE FROM keyed WHERE id = 11")
    with running_service(database.dsn, database.name):
        conn.execute("CALL pgtrickle.verify_and_wait('summed')")
        with pytest.raises(
            psycopg.Error,
            match="the comparison of keyed failed: it differs from its query: 1 missing and 0 unexpected rows",
        ):
            conn.execute("CALL pgtrickle.verify_and_wait('keyed')")
        with pytest.raises(psycopg.Error, match="it was not compared: it could not be refreshed: division by zero"):
            conn.execute("CALL pgtrickle.verify_and_wait('failing')")
    recorded = (
        "SELECT pgt_name::text, equal FROM pgtrickle.pgt_verifications JOIN pgtrickle.pgt_stream_tables USING (pgt_id)"
    )
    assert sorted(conn.execute(recorded).fetchall()) == [("keyed", False), ("summed", True)]
    assert conn.execute("SELECT DISTINCT kind FROM pgtrickle.pgt_requests").fetchall() == [("VERIFY",)]


def test_requests_to_compare_are_served_once(db: pgtrickle.Database, database: TestDatabase) -> None:
    db.create_stream_table("keyed", QUERIES["keyed"], initialize=False)
    (request,) = db.conn.execute("SELECT pgtrickle.verify('keyed')").fetchone() or (0,)
    asked = "SELECT stream_table, status, error FROM pgtrickle.request_status(%s)"
    db.refresh("keyed")
    assert db.conn.execute(asked, (request,)).fetchone() == ("public.keyed", "PENDING", None), (
        "a refresh is no comparison"
    )
    done = CliRunner().invoke(cli, ["--dsn", database.dsn, "run", "--once"])
    assert done.exit_code == 0, done.output
    assert "1 done, 0 failed, 0 postponed" in done.output
    assert db.conn.execute(asked, (request,)).fetchone() == ("public.keyed", "DONE", None)


def test_only_the_owner_requests_a_comparison(db: pgtrickle.Database, database: TestDatabase) -> None:
    db.create_stream_table("keyed", QUERIES["keyed"])
    other = database.create_role("other")
    db.conn.execute(f"GRANT SELECT ON keyed TO {other}".encode())
    with (
        psycopg.connect(database.direct_dsn_as(other), autocommit=True) as theirs,
        pytest.raises(psycopg.errors.InsufficientPrivilege, match=f"role {other} may not verify stream table"),
    ):
        theirs.execute("SELECT pgtrickle.verify('keyed')")


def test_a_stream_table_with_a_long_schedule_is_not_refreshed_for_a_comparison(
    db: pgtrickle.Database, conn: psycopg.Connection
) -> None:
    db.create_stream_table("keyed", QUERIES["keyed"], schedule="1h")
    query, parameters = load_query("unverified"), {"every": 0, "others": []}
    assert conn.execute(query, parameters).fetchone() is not None, "it was refreshed just now"
    conn.execute("UPDATE pgtrickle.pgt_stream_tables SET data_timestamp = now() - interval '10 minutes'")
    assert conn.execute(query, parameters).fetchone() is None
    db.alter_stream_table("keyed", schedule="1m")
    assert conn.execute(query, parameters).fetchone() is not None
