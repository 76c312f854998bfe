"""External orchestrators request refreshes: only once for each id, with exit codes that they can act on."""

from __future__ import annotations

import psycopg
import pytest

import pgtrickle
from pgtrickle.cli.main import LATE, main
from pgtrickle.errors import NotInTimeError, RefreshError
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query
from tests.support.service import running_service, serving

QUERY = "SELECT kind, sum(100 / val) AS parts FROM item GROUP BY kind"


@pytest.fixture
def shop(database: TestDatabase, conn: psycopg.Connection) -> TestDatabase:
    with pgtrickle.connect(database.dsn) as db:
        db.install()
        conn.execute("CREATE TABLE item (id int PRIMARY KEY, kind int, val int)")
        conn.execute("INSERT INTO item SELECT i, i % 3, i FROM generate_series(1, 20) AS i")
        db.create_stream_table("parts", QUERY, schedule="1d")
    return database


def refresh(dsn: str, *arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["--dsn", dsn, "refresh", "parts", *arguments])
    code = end.value.code
    assert isinstance(code, int)
    return code


def refreshes(conn: psycopg.Connection) -> int:
    row = conn.execute("SELECT count(*) FROM pgtrickle.pgt_refresh_history WHERE initiated_by = 'REQUEST'").fetchone()
    assert row is not None
    return int(row[0])


def test_the_same_id_is_the_same_request(shop: TestDatabase, conn: psycopg.Connection) -> None:
    with running_service(shop.dsn, shop.name):
        serving(conn)
        conn.execute("INSERT INTO item VALUES (100, 1, 5)")
        assert refresh(shop.dsn, "--request-id", "run-1") == 0
        assert_equal_to_query(conn, "parts", QUERY)
        done = refreshes(conn)
        conn.execute("INSERT INTO item VALUES (101, 1, 5)")
        assert refresh(shop.dsn, "--request-id", "run-1") == 0  # it is done already
        assert refreshes(conn) == done
        assert refresh(shop.dsn, "--request-id", "run-2") == 0
        assert refreshes(conn) == done + 1
        assert_equal_to_query(conn, "parts", QUERY)


def test_a_failed_request_can_be_repeated(shop: TestDatabase, conn: psycopg.Connection) -> None:
    with running_service(shop.dsn, shop.name), pgtrickle.connect(shop.dsn) as db:
        serving(conn)
        conn.execute("INSERT INTO item VALUES (100, 1, 0)")
        request = db.request_refresh("parts", key="run-1")
        with pytest.raises(RefreshError, match="division by zero"):
            db.wait_for_request("parts", request)
        conn.execute("DELETE FROM item WHERE id = 100")
        assert db.request_refresh("parts", key="run-1") == request
        db.wait_for_request("parts", request)
        row = conn.execute(
            "SELECT stream_table, status, error FROM pgtrickle.request_status(%s)", (request,)
        ).fetchone()
        assert row == ("public.parts", "DONE", None)
        assert_equal_to_query(conn, "parts", QUERY)


def test_a_request_that_times_out_stays_filed(
    shop: TestDatabase, conn: psycopg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_service(shop.dsn, shop.name):
        serving(conn)
        conn.execute("INSERT INTO item VALUES (100, 1, 5)")
        conn.execute("SELECT pgtrickle.pause()")
        assert refresh(shop.dsn, "--request-id", "run-1", "--timeout", "0.5") == LATE
        assert "still filed" in capsys.readouterr().err
        with pgtrickle.connect(shop.dsn) as db, pytest.raises(NotInTimeError, match="did not finish within"):
            db.wait_for_request("parts", db.request_refresh("parts", key="run-1"), 0.2)
        conn.execute("SELECT pgtrickle.resume()")
        assert refresh(shop.dsn, "--request-id", "run-1") == 0
        assert_equal_to_query(conn, "parts", QUERY)


def test_request_ids_are_separate_for_each_role(shop: TestDatabase, conn: psycopg.Connection) -> None:
    request = conn.execute("SELECT pgtrickle.manual_refresh('parts', 'run-1')").fetchone()
    assert request is not None
    stranger = shop.create_role("stranger")
    with psycopg.connect(shop.direct_dsn_as(stranger), autocommit=True) as other:
        assert other.execute("SELECT * FROM pgtrickle.request_status(%s)", request).fetchall() == []
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            other.execute("SELECT pgtrickle.manual_refresh('parts', 'run-1')")


def test_an_id_without_a_service_is_an_error(shop: TestDatabase) -> None:
    assert refresh(shop.dsn, "--request-id", "run-1") == 1
    assert refresh(shop.dsn, "--request-id", "run-1", "--local") == 2
