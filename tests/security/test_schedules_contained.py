"""An owner's options for a stream table are checked; an invalid one that slips through stops only that stream table."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import product
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

import pgtrickle
from pgtrickle.service.scheduling.cron import ScheduleError, next_time
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query
from tests.support.service import fresh, running_service, until

Connection = psycopg.Connection[Any]

TOTALS = "SELECT grp, count(*) AS n FROM item GROUP BY grp"
ROWS = "SELECT id, grp FROM item"
DIGITS = "9" * 5000  # more than Python takes for a number
GARBAGE = {
    "above the time zones": "CRON_TZ=../../etc/passwd * * * * *",
    "an absolute path": "CRON_TZ=/etc/passwd * * * * *",
    "a directory of time zones": "CRON_TZ=Europe * * * * *",
    "no file of a time zone": "CRON_TZ=zone.tab * * * * *",
    "no time zone": "CRON_TZ= * * * * *",
    "an unknown time zone": "CRON_TZ=Moon/Base * * * * *",
    "a long name": f"CRON_TZ={'x' * 400} * * * * *",
    "too many weeks": "999999999w",
    "more weeks than a number has": f"{DIGITS}w",
    "more than ten years": "3650d1s",
    "nothing": "0s",
    "an empty text": "",
    "a large number": f"{DIGITS} * * * *",
    "a large range": f"0 0 1-{'9' * 300} * *",
    "a day that never comes": "0 0 31 2 *",
    "no schedule at all": "whenever",
}
# These look like cron expressions to the database: only the service can tell.
LIKE_CRON = ("a large range", "a day that never comes")
REFUSED = {name: schedule for name, schedule in GARBAGE.items() if name not in LIKE_CRON}
REFUSED["other letters of a time zone"] = "CRON_TZ=europe/berlin @daily"
SETTINGS = {
    "no object": [1, 2],
    "no text": {"TimeZone": ["UTC"]},
    "another setting": {"role": "postgres"},
    "other letters": {"SEARCH_PATH": "public"},
    "no value": {"TimeZone": "Moon/Base"},
}


@pytest.fixture
def shop(database: TestDatabase, conn: Connection) -> Connection:
    with pgtrickle.connect(database.dsn) as db:
        db.install()
    conn.execute("CREATE TABLE item (id int PRIMARY KEY, grp int)")
    conn.execute("INSERT INTO item SELECT i, i % 5 FROM generate_series(1, 60) AS i")
    return conn


def create(conn: Connection, name: str, query: str, schedule: str = "100ms") -> None:
    conn.execute("SELECT pgtrickle.create_stream_table(%s, %s, %s)", (name, query, schedule))


def write(database: TestDatabase, name: str, column: bytes, value: object) -> None:
    """Write past all checks, as only a superuser can."""
    with psycopg.connect(database.superuser_dsn, autocommit=True) as admin:
        admin.execute(
            b"UPDATE pgtrickle.pgt_stream_tables SET " + column + b" = %s, next_due = '-infinity' WHERE pgt_name = %s",
            (value, name),
        )


def states(conn: Connection) -> dict[str, tuple[str, str | None, int]]:
    rows = conn.execute("SELECT pgt_name, status, status_reason, consecutive_errors FROM pgtrickle.pgt_stream_tables")
    return {row[0]: row[1:] for row in rows}


def are_suspended(conn: Connection, *names: str) -> bool:
    found = states(conn)
    return all(found[name][0] == "SUSPENDED" for name in names)


def follows(conn: Connection, number: int) -> None:
    """The healthy stream table includes a change, and has not failed."""
    conn.execute("INSERT INTO item VALUES (%s, 7)", (1000 + number,))
    fresh(conn, "good")
    assert_equal_to_query(conn, "good", TOTALS)
    assert states(conn)["good"] == ("ACTIVE", None, 0)


@pytest.mark.pgversions
def test_create_and_alter_refuse_an_invalid_option_and_quote_it(shop: Connection) -> None:
    create(shop, "good", TOTALS)
    statements = (
        "SELECT pgtrickle.create_stream_table('bad', 'SELECT 1 AS one', %s)",
        "SELECT pgtrickle.create_or_replace_stream_table('good', 'SELECT 1 AS one', %s)",
        "SELECT pgtrickle.alter_stream_table('good', %s)",
    )
    for schedule, statement in product(REFUSED.values(), statements):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="schedule cannot be") as refused:
            shop.execute(statement.encode(), (schedule,))
        assert f"'{schedule}'" in str(refused.value)
        assert refused.value.diag.message_hint
    assert shop.execute("SELECT pgt_name, schedule FROM pgtrickle.pgt_stream_tables").fetchall() == [("good", "100ms")]


@pytest.mark.pgversions
def test_valid_options_are_accepted(shop: Connection) -> None:
    create(shop, "good", TOTALS)
    for schedule, seconds in (
        ("3650d", 3650 * 86400),
        ("521w2d23h59m59s999ms", 3649 * 86400 + 86399.999),
        ("CRON_TZ=Europe/Berlin 0 9 * * mon", None),
        ("CRON_TZ=Etc/GMT+3 @daily", None),
        (f"{','.join(map(str, range(60)))} {','.join(map(str, range(24)))} * * *", None),
    ):
        shop.execute("SELECT pgtrickle.alter_stream_table('good', %s)", (schedule,))
        row = shop.execute(
            "SELECT schedule, extract(epoch FROM every)::float8 FROM pgtrickle.pgt_stream_tables"
        ).fetchone()
        assert row == (schedule, seconds)
        if seconds is None:
            assert next_time(schedule, "UTC", datetime.now(UTC)) > datetime.now(UTC)


@pytest.mark.parametrize("schedule", GARBAGE.values(), ids=GARBAGE)
def test_the_service_refuses_an_invalid_schedule_with_its_own_error(schedule: str) -> None:
    with pytest.raises(ScheduleError, match=r"^schedule") as refused:
        next_time(schedule, "UTC", datetime.now(UTC))
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize("timezone", ["../../etc/passwd", "Europe", "", "zone.tab", "x" * 5000])
def test_a_recorded_time_zone_is_refused_the_same_way(timezone: str) -> None:
    with pytest.raises(ScheduleError, match="there is no time zone"):
        next_time("@daily", timezone, datetime.now(UTC))


@pytest.mark.pgversions
def test_an_invalid_time_zone_does_not_end_the_scheduler(database: TestDatabase, shop: Connection) -> None:
    create(shop, "good", TOTALS)
    create(shop, "bad", ROWS)
    write(database, "bad", b"schedule", GARBAGE["above the time zones"])
    with running_service(database.dsn, database.name) as service:
        until(lambda: are_suspended(shop, "bad"), "it is suspended")
        follows(shop, 1)
        watched = service.launchers[0].databases[database.name]
        assert watched.tended is not None
        assert watched.tended.counters.crashes == 0


@pytest.mark.pgversions
def test_an_invalid_schedule_stops_only_its_stream_table(database: TestDatabase, shop: Connection) -> None:
    create(shop, "good", TOTALS)
    for name, schedule in GARBAGE.items():
        create(shop, f'"{name}"', ROWS)
        write(database, name, b"schedule", schedule)
    with running_service(database.dsn, database.name) as service:
        follows(shop, 1)
        until(lambda: are_suspended(shop, *GARBAGE), "all of them are suspended")
        follows(shop, 2)
        found = states(shop)
        assert all((found[name][1] or "").startswith("schedule '") for name in GARBAGE), found
        told = shop.execute(
            "SELECT DISTINCT pgt_name FROM pgtrickle.pgt_events JOIN pgtrickle.pgt_stream_tables USING (pgt_id)"
            " WHERE event = 'auto_suspended'"
        ).fetchall()
        assert {name for (name,) in told} == GARBAGE.keys()

        # Others go on with their work, and it is said once.
        create(shop, "later", ROWS)
        fresh(shop, "later")
        watched = service.launchers[0].databases[database.name]
        assert watched.tended is not None
        counters = watched.tended.counters
        rows = "SELECT pgt_name, xmin::text FROM pgtrickle.pgt_stream_tables WHERE pgt_name = ANY (%s) ORDER BY 1"
        before, ticks = shop.execute(rows, (list(GARBAGE),)).fetchall(), counters.ticks
        until(lambda: counters.ticks >= ticks + 3, "some ticks")
        assert shop.execute(rows, (list(GARBAGE),)).fetchall() == before

        # Who mends it has it back.
        shop.execute("""SELECT pgtrickle.alter_stream_table('"too many weeks"', '1s', status => 'ACTIVE')""")
        fresh(shop, '"too many weeks"')
        assert counters.crashes == 0
        assert watched.scheduler is not None
        assert watched.scheduler.failure is None


@pytest.mark.pgversions
def test_invalid_session_settings_stop_only_their_stream_table(database: TestDatabase, shop: Connection) -> None:
    shop.execute("SELECT pgtrickle.set('pg_trickle.max_consecutive_errors', '1')")
    create(shop, "good", TOTALS)
    for name, settings in SETTINGS.items():
        create(shop, f'"{name}"', ROWS)
        write(database, name, b"session_settings", Jsonb(settings))
    with running_service(database.dsn, database.name):
        follows(shop, 1)
        until(lambda: are_suspended(shop, *SETTINGS), "all of them are suspended")
        follows(shop, 2)
        found = states(shop)
    assert all("session settings" in (found[name][1] or "") for name in SETTINGS.keys() - {"no value"})
    assert "Moon/Base" in (found["no value"][1] or "")


@pytest.mark.pgversions
def test_a_query_that_is_nested_too_deeply_is_computed_by_postgresql(database: TestDatabase, shop: Connection) -> None:
    deep = f"SELECT id{' + 1' * 3000} AS x FROM item"
    create(shop, "good", TOTALS)
    create(shop, "deep", deep)
    with running_service(database.dsn, database.name):
        follows(shop, 1)
        fresh(shop, "deep")
        assert_equal_to_query(shop, "deep", deep)
    row = shop.execute(
        "SELECT effective_mode, mode_reason FROM pgtrickle.pgt_stream_tables WHERE pgt_name = 'deep'"
    ).fetchone()
    assert row == ("FULL", "the query is nested too deeply")
