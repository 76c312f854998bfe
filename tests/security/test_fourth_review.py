"""Attacks of a fourth hostile review: those that it found, and those that were refused."""

from __future__ import annotations

import json
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from sqlglot import exp

from pgtrickle.cli.common import echo, print_table
from pgtrickle.cli.main import cli
from pgtrickle.errors import PgtrickleError
from pgtrickle.postgres import copying, fence
from pgtrickle.postgres.copying import ResultTooLargeError
from pgtrickle.query.budget import OverBudget
from pgtrickle.query.dialect import MOST_CHARACTERS, parse
from pgtrickle.query.nondeterminism import nondeterministic_part
from pgtrickle.refresh import verify
from pgtrickle.refresh.apply.load import PARAMETER_BYTES, load
from pgtrickle.refresh.engine import Engine
from pgtrickle.refresh.fetch.fetch_stage import FetchStage
from pgtrickle.refresh.fetch.helper_process import HelperProcesses
from pgtrickle.spark.session import spark_session
from tests.security.registered import registered
from tests.security.roles import Roles, Worker
from tests.security.test_fair_share import HOLD, KEY
from tests.support.oracle import assert_equal_to_query
from tests.support.service import running_service, until

pytestmark = pytest.mark.pgversions

# A negator that runs mallory's code, of an operator over PostgreSQL's own function.
_NEGATOR = """
CREATE FUNCTION {m}.differ(int, int) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS
    $$ BEGIN PERFORM {m}.evil(); RETURN $1 <> $2; END $$;
CREATE OPERATOR {m}.!== (LEFTARG = int, RIGHTARG = int, FUNCTION = {m}.differ);
CREATE OPERATOR {m}.=== (LEFTARG = int, RIGHTARG = int, FUNCTION = pg_catalog.int4eq, NEGATOR = OPERATOR({m}.!==));
CREATE TABLE {m}.generated (
    id int PRIMARY KEY, v int, w boolean GENERATED ALWAYS AS (NOT (v OPERATOR({m}.===) 1)) VIRTUAL);
INSERT INTO {m}.generated VALUES (1, 1), (2, 2)
"""
# Declared as what it is not, so that a stream table differs from its query.
_RANDOM = (
    "CREATE FUNCTION {m}.rnd(v int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN random() * 1e9; END $$"
)
_VIRTUAL = 18  # the first version with virtual generated columns


def _exact(roles: Roles, name: str, query: str) -> None:
    with roles.connect(roles.alice) as conn:
        assert_equal_to_query(conn, name, query)


# -- Code run as the service -------------------------------------------------------------------------------------------


def test_who_calls_a_function_first_does_not_decide_what_it_means(roles: Roles) -> None:
    """PostgreSQL 18 keeps the plans of SQL functions for the session: also those that mallory's code has had made."""
    m = roles.mallory
    view = "(SELECT max(view_relid::oid)::regclass FROM pgtrickle.pgt_stream_tables)"
    roles.sql(
        m,
        f"CREATE FUNCTION {m}.act() RETURNS void LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM set_config('standard_conforming_strings', 'off', false);"
        f" PERFORM FROM pgtrickle._functions_used({view}); PERFORM FROM pgtrickle._view_rules({view}); END $$",
        f"CREATE FUNCTION {m}.pure(v int) RETURNS int LANGUAGE plpgsql IMMUTABLE STRICT AS"
        f" $$ BEGIN PERFORM {m}.act(); RETURN v; END $$",
        f"CREATE VIEW {m}.v AS SELECT id, upper(v::text) AS v FROM {m}.src",
        f"CREATE FUNCTION {m}.run() RETURNS tsquery LANGUAGE plpgsql AS"
        f" $$ BEGIN PERFORM {m}.evil(); RETURN 'a'::tsquery; END $$",
    )
    poison = roles.create(m, "poison", f"SELECT id, {m}.pure(v) AS v FROM {m}.src")
    trap = roles.create(m, "trap", f"SELECT id, v FROM {m}.v")
    with roles.service() as db:
        db.refresh([poison, trap])
        plans = db.engine.programs.plans
    rewritten = f"ts_rewrite('a'::tsquery, 'SELECT {m}.run(), ''b''::tsquery')::text || v::text"
    with roles.service() as db:  # another connection of a service, which knows the plans
        db.engine.programs.plans = plans
        roles.sql(m, f"INSERT INTO {m}.src VALUES (70, 7)")
        db.engine.attempt([roles.id_of(poison)], "SCHEDULE")
        roles.sql(m, f"CREATE OR REPLACE VIEW {m}.v AS SELECT id, {rewritten} AS v FROM {m}.src")
        for number in range(80, 83):
            db.engine.attempt([roles.id_of(trap)], "SCHEDULE")
            roles.sql(m, f"INSERT INTO {m}.src VALUES ({number}, 7)")
    assert roles.ran_as() == {m}


def test_every_function_with_a_backslash_says_what_it_means(roles: Roles) -> None:
    """Whatever the session has set: that writers have set it hides rows that a MERGE moves, for example."""
    found = roles.rows(
        roles.app,
        "SELECT p.oid::regprocedure::text FROM pg_proc AS p WHERE p.pronamespace::regnamespace::text ~ '^pgtrickle'"
        " AND strpos(p.prosrc, E'\\\\') > 0"
        " AND NOT coalesce(p.proconfig @> '{standard_conforming_strings=on}', false)",
    )
    assert found == []


def test_a_merge_cannot_be_hidden_by_a_setting(roles: Roles) -> None:
    alice, m = roles.alice, roles.mallory
    roles.sql(
        alice,
        f"CREATE TABLE {alice}.p (id int, part int) PARTITION BY LIST (part)",
        f"CREATE TABLE {alice}.p1 PARTITION OF {alice}.p FOR VALUES IN (1)",
        f"CREATE TABLE {alice}.p2 PARTITION OF {alice}.p FOR VALUES IN (2)",
        f"INSERT INTO {alice}.p SELECT i, 1 FROM generate_series(1, 10) AS i",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {alice}.p TO {m}",
    )
    query = f"SELECT part, count(*) AS n FROM {alice}.p GROUP BY part"
    mine = roles.create(alice, "mine", query)
    roles.refresh(mine)
    roles.sql(
        m,
        "SET standard_conforming_strings = off",
        f"MERGE INTO {alice}.p AS p USING (SELECT 3 AS id) AS s ON p.id = s.id WHEN MATCHED THEN UPDATE SET part = 2",
    )
    roles.refresh(mine)
    _exact(roles, mine, query)


def test_changes_that_are_read_together_are_read_with_the_rights_that_each_needs(roles: Roles) -> None:
    """The first of two stream tables on one source runs no code of mallory's, the other does."""
    m = roles.mallory
    plain = roles.create(m, "plain", f"SELECT id, v FROM {m}.src")
    trap = roles.create(m, "trap", f"SELECT id, {m}.sly(v) AS v FROM {m}.src")
    with roles.service() as db:
        db.refresh([plain, trap])
        roles.sql(m, f"INSERT INTO {m}.src VALUES (70, 7)")
        results = db.refresh([plain, trap])
    assert [result.action for result in results] == ["DIFFERENTIAL", "DIFFERENTIAL"]
    assert roles.ran_as() == {m}
    assert roles.rows(m, f"SELECT v FROM {trap} WHERE id = 70") == [(7,)]


def test_a_virtual_generated_column_is_not_computed_by_the_service(roles: Roles, pg_version: int) -> None:
    """PostgreSQL allows no functions of users in it, but operators, and so their negators."""
    if pg_version < _VIRTUAL:
        pytest.skip("no virtual generated columns")
    m = roles.mallory
    roles.sql(m, _NEGATOR.format(m=m))
    trap = roles.create(m, "trap", f"SELECT id, w FROM {m}.generated WHERE w")
    worker = Worker(roles.database.dsn)
    for number in range(70, 73):
        worker.refresh(roles.id_of(trap))
        roles.sql(m, f"INSERT INTO {m}.generated VALUES ({number}, 7)")
    worker.close()
    assert roles.ran_as() == {m}


def test_a_virtual_generated_column_of_a_stranger_is_not_read_elsewhere(roles: Roles, pg_version: int) -> None:
    if pg_version < _VIRTUAL:
        pytest.skip("no virtual generated columns")
    m = roles.mallory
    with registered(roles) as crm:
        crm.sql(m, *_NEGATOR.format(m=m).split(";\n"), f"GRANT SELECT, TRIGGER ON {m}.generated TO {crm.reader}")
        crm.allow(m)
        with roles.service() as db, pytest.raises(PgtrickleError, match="is in the expression of column w"):
            db.import_table("crm", f"{m}.generated")
        crm.assert_powerless()


_ACTS = {
    "cursor": "EXECUTE format('DECLARE %I CURSOR WITH HOLD FOR SELECT {m}.evil()', 'c' || random());",
    "prepare": "BEGIN EXECUTE 'PREPARE \"_pg3_0\" AS SELECT {m}.evil()'; EXCEPTION WHEN OTHERS THEN NULL; END;",
    "settings": "PERFORM set_config('search_path', '{m}, pg_catalog', false);",
    "temporary": "EXECUTE 'CREATE TEMP VIEW pgt_verifications AS SELECT {m}.evil()';",
    "deferred": "EXECUTE 'SET CONSTRAINTS ALL DEFERRED'; INSERT INTO {m}.late VALUES (1);",
    "catalog": "PERFORM pgtrickle._emit_event('verification_failed', 1, NULL);",
    "rows": "DELETE FROM {m}.trap;",
    "sessions": "PERFORM pg_terminate_backend(pg_backend_pid());",
}


@pytest.mark.parametrize("act", sorted(_ACTS))
def test_code_that_a_comparison_runs_has_the_rights_of_its_owner_only(roles: Roles, act: str) -> None:
    """It runs in a transaction that writes, after what undoes the traces of code that ran while rows were written."""
    alice, m = roles.alice, roles.mallory
    roles.sql(
        m,
        f"CREATE TABLE {m}.late (v int)",
        f"CREATE CONSTRAINT TRIGGER late AFTER INSERT ON {m}.late DEFERRABLE INITIALLY DEFERRED"
        f" FOR EACH ROW EXECUTE FUNCTION {m}.fire()",
        f"CREATE FUNCTION {m}.act() RETURNS void LANGUAGE plpgsql AS"
        f" $$ BEGIN {_ACTS[act].format(m=m)} EXCEPTION WHEN insufficient_privilege OR object_not_in_prerequisite_state"
        " THEN RAISE LOG 'act refused'; END $$",
        f"CREATE FUNCTION {m}.pure(v int) RETURNS int LANGUAGE plpgsql IMMUTABLE STRICT AS"
        f" $$ BEGIN PERFORM {m}.act(); RETURN v; END $$",
    )
    trap = roles.create(m, "trap", f"SELECT id, {m}.pure(v) AS v FROM {m}.src")
    mine = roles.create(alice, "mine", f"SELECT id, kind FROM {alice}.orders")
    with roles.service() as db:
        for name in (trap, mine, trap, mine):
            (found,) = db.verify(name)
            assert found.equal is not False
            assert name == trap or found.equal
    assert roles.rows(m, f"SELECT count(*) FROM {m}.late") == [(0,)]
    roles.assert_powerless()


def test_waiting_runs_no_operator_of_others(roles: Roles) -> None:
    """It is better than PostgreSQL's for the types of these arguments."""
    alice, m = roles.alice, roles.mallory
    roles.sql(
        m,
        f"CREATE FUNCTION {m}.times(double precision, numeric) RETURNS double precision LANGUAGE plpgsql AS"
        f" $$ BEGIN PERFORM {m}.evil(); RETURN $1; END $$",
        f"CREATE OPERATOR {m}.* (LEFTARG = double precision, RIGHTARG = numeric, FUNCTION = {m}.times)",
    )
    mine = roles.create(alice, "mine", f"SELECT id, kind FROM {alice}.orders")
    with roles.connect(alice) as conn:
        conn.execute(f"SET search_path = {alice}, {m}".encode())
        with pytest.raises(psycopg.errors.QueryCanceled, match="did not finish within"):
            conn.execute("CALL pgtrickle.refresh_and_wait(%s, '1 second')", (mine,))
    assert roles.ran_as() == set()


# -- Taking the service down -------------------------------------------------------------------------------------------


def test_code_without_end_is_ended_in_a_helper_process(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    """All owners share these processes: who keeps one keeps all from being refreshed that have many changes."""
    alice, m = roles.alice, roles.mallory
    monkeypatch.setattr(fence, "READ_SECONDS", 3.0)
    roles.sql(
        m,
        f"CREATE FUNCTION {m}.stubborn(v int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN WHILE v > 100 LOOP"
        " BEGIN PERFORM pg_sleep(3600); EXCEPTION WHEN query_canceled THEN NULL; END; END LOOP; RETURN v; END $$",
    )
    trap = roles.create(m, "trap", f"SELECT id, {m}.stubborn(v) AS v FROM {m}.src")
    query = f"SELECT id, kind FROM {alice}.orders"
    mine = roles.create(alice, "mine", query)
    roles.refresh(trap, mine)
    roles.sql(m, f"INSERT INTO {m}.src VALUES (900, 900)")
    roles.sql(alice, f"INSERT INTO {alice}.orders VALUES (900, 'k1', 1)")
    helpers = HelperProcesses(many=0)

    def refresh(name: str) -> None:
        with suppress(psycopg.Error), roles.service() as db:
            db.engine.reading.helpers = helpers
            db.engine.attempt([roles.id_of(name)], "SCHEDULE")

    ended = threading.Thread(target=refresh, args=(trap,), daemon=True)
    ended.start()
    try:
        ended.join(60)
        assert not ended.is_alive()
        refresh(mine)
        _exact(roles, mine, query)
    finally:
        with psycopg.connect(roles.database.superuser_dsn, autocommit=True) as superuser:
            superuser.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'COPY%stubborn%'"
            )
        helpers.close()
    assert roles.rows(
        roles.app, "SELECT status, status_reason FROM pgtrickle.pgt_stream_tables WHERE pgt_name = 'trap'"
    ) == [("SUSPENDED", fence.WENT_ON)]


def test_stream_tables_that_are_read_together_do_not_fill_the_memory(
    roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each result is small enough, and there can be as many as mallory likes. Small ones of others are read all the same."""
    alice, m = roles.alice, roles.mallory
    monkeypatch.setattr(copying, "MOST_BYTES", 1_000_000)
    monkeypatch.setattr(copying, "SMALL_BYTES", 50_000)
    monkeypatch.setattr(FetchStage, "_fetch", FetchStage._read)  # the error stays
    roles.sql(m, f"CREATE TABLE {m}.one (id int PRIMARY KEY)", f"INSERT INTO {m}.one VALUES (1)")
    traps = [roles.create(m, f"trap{i}", f"SELECT id, repeat('x', {600_000 + i}) AS x FROM {m}.one") for i in range(4)]
    mine = roles.create(alice, "mine", f"SELECT id, kind FROM {alice}.orders")
    with roles.service() as db:
        outcome = db.engine.attempt([roles.id_of(name) for name in (*traps, mine)], "SCHEDULE")
    assert [type(error) for error in outcome.failures.values()] == [ResultTooLargeError] * 3
    assert {result.name for result in outcome.results} == {traps[0], mine}


def test_a_task_that_runs_out_of_memory_does_not_end_spark_for_all() -> None:
    """One value of 280 MB was enough, and nothing was refreshed any more in any database of the service."""
    assert spark_session().sparkContext.getConf().get("spark.executor.killOnFatalError.depth") == "0"


def test_a_change_of_few_long_rows_is_no_parameter(roles: Roles) -> None:
    """PostgreSQL takes 25 times its size for one."""
    delta = pa.table({"w": ["1"], "c1": ["x" * PARAMETER_BYTES]})
    with psycopg.connect(roles.database.direct_dsn) as conn:
        loaded = load(conn, delta, None)
        assert (loaded.arrays, loaded.relation) == ([], "pg_temp.pgt_delta")


def test_a_request_to_compare_is_answered_whatever_ends_it(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it is tried again and again."""
    m = roles.mallory
    trap = roles.create(m, "trap", f"SELECT id, v FROM {m}.src")
    roles.refresh(trap)
    request = roles.value(m, f"SELECT pgtrickle.verify('{trap}')")

    def fail(*_: Any) -> None:
        raise RecursionError("nested too deeply")

    monkeypatch.setattr(verify, "_compare", fail)
    with roles.service() as db, pytest.raises(RecursionError):
        verify.answer_requests(db.engine, roles.id_of(trap))
    assert roles.rows(m, f"SELECT status, error FROM pgtrickle.request_status({request})") == [
        ("FAILED", "it was not compared: nested too deeply")
    ]


def test_a_comparison_that_loses_its_connection_is_not_repeated_at_once(
    roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = roles.mallory
    trap = roles.create(m, "trap", f"SELECT id, v FROM {m}.src")
    roles.refresh(trap)
    tried: list[float] = []

    def lose(engine: Engine, pgt_id: int) -> None:
        tried.append(pgt_id)
        engine.conn.close()
        raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(verify, "verify", lose)
    with running_service(roles.database.dsn, roles.database.name) as service:
        roles.sql(m, f"SELECT pgtrickle.verify('{trap}')")
        until(lambda: len(tried) == 3)
        scheduler = service.launchers[0].databases[roles.database.name].scheduler
        assert scheduler is not None
        comparisons = scheduler._comparisons
        assert comparisons._pause(roles.id_of(trap)) >= 4 * comparisons._pause(0)


def test_a_query_of_any_size_can_be_compared(roles: Roles) -> None:
    """Whether a query leaves its result open is looked for in its text."""
    m = roles.mallory
    roles.sql(m, _RANDOM.format(m=m))
    nested = "v"
    for _ in range(400):
        nested = f"abs({nested})"
    trap = roles.create(m, "trap", f"SELECT id, {m}.rnd(v) AS x, {nested} AS y FROM {m}.src", refresh_mode="FULL")
    with roles.service() as db:
        (found,) = db.verify(trap)
    assert (found.equal, found.missing, found.unexpected) == (False, 5, 5)


def test_looking_through_a_query_takes_no_more_than_reading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Printing each part of it took the square of its length: hours, in which the service did little else."""
    tree = "SELECT id FROM s WHERE " + " AND ".join(f"v <> {i}" for i in range(2000))
    assert nondeterministic_part(f"{tree} LIMIT 1") == "LIMIT or OFFSET"

    def fail(*_: Any, **__: Any) -> str:
        raise AssertionError("a part of the query was printed")

    monkeypatch.setattr(exp.Expression, "sql", fail)
    assert nondeterministic_part(tree) is None


def test_a_text_that_is_too_long_is_not_parsed(roles: Roles) -> None:
    """A syntax tree takes hundreds of times the memory of its text. PostgreSQL computes such a query."""
    values = ", ".join(str(i % 7) for i in range(MOST_CHARACTERS // 3 + 1))
    with pytest.raises(OverBudget):
        parse(f"SELECT 1 WHERE 1 IN ({values})")
    assert nondeterministic_part(f"SELECT 1 WHERE 1 IN ({values}) LIMIT 1") is None
    m = roles.mallory
    trap = roles.create(m, "trap", f"SELECT id, v FROM {m}.src WHERE v IN ({values})")
    roles.refresh(trap)
    assert roles.rows(m, f"SELECT effective_mode, reason FROM pgtrickle.explain_refresh_mode('{trap}')") == [
        ("FULL", f"its text has more than {MOST_CHARACTERS} characters")
    ]


def test_what_a_comparison_shows_is_short(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service holds the rows that differ, however long their values are."""
    m = roles.mallory
    roles.sql(m, _RANDOM.format(m=m))
    monkeypatch.setattr(verify, "COMPARED_CHARACTERS", 1)
    fetched: list[list[Any]] = []
    run = verify._run_as_owner

    def spy(*arguments: Any) -> list[tuple[Any, ...]]:
        rows = run(*arguments)
        fetched.extend(row[2] for row in rows if len(row) == 3)
        return rows

    monkeypatch.setattr(verify, "_run_as_owner", spy)
    roles.sql(m, f"INSERT INTO {m}.src SELECT i, i FROM generate_series(100, 119) AS i")
    trap = roles.create(
        m, "trap", f"SELECT id, repeat('x', 100000) || {m}.rnd(v) AS x FROM {m}.src", refresh_mode="FULL"
    )
    with roles.service() as db:
        (found,) = db.verify(trap)
    assert (found.equal, found.missing, found.unexpected) == (False, 25, 25)
    assert len(fetched) == 2 * verify.EXAMPLES
    assert max(len(value) for row in fetched for value in row) < verify.LONGEST_VALUE + 100
    assert len({value for _, value in fetched}) == len(fetched)  # the rest of a value counts


def test_comparisons_of_one_owner_do_not_take_all_workers(roles: Roles) -> None:
    """Mallory asks for comparisons that last as long as she likes; alice is served meanwhile."""
    alice, m = roles.alice, roles.mallory
    roles.sql(m, HOLD.format(m=m))
    traps = [
        roles.create(m, f"trap{i}", f"SELECT id FROM {m}.src WHERE {m}.hold(v + {i}) < 0", schedule="1h")
        for i in range(6)
    ]
    mine = roles.create(alice, "mine", f"SELECT id, amount FROM {alice}.orders WHERE amount < 0", schedule="100ms")
    roles.refresh(mine, *traps)
    held = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgtrickle worker%' AND state = 'active'"
        " AND datname = current_database() AND query LIKE '%\"read\\_%'"
    )
    with (
        psycopg.connect(roles.database.superuser_dsn, autocommit=True) as superuser,
        psycopg.connect(roles.database.direct_dsn_as(m), autocommit=True) as holder,
    ):

        def at_work() -> int:
            ((number,),) = superuser.execute(held).fetchall()
            return int(number)

        holder.execute("SELECT pg_advisory_lock(%s)", (KEY,))
        with running_service(roles.database.dsn, roles.database.name) as service:
            roles.sql(m, *(f"SELECT pgtrickle.verify('{trap}')" for trap in traps))
            until(lambda: at_work() >= service.pool.size - 1)
            roles.sql(alice, f"INSERT INTO {alice}.orders VALUES (900, 'k1', 1)")
            roles.sql(alice, f"CALL pgtrickle.wait_until_fresh('{mine}', '15 seconds')")
            assert at_work() == service.pool.size - 1
            holder.execute("SELECT pg_advisory_unlock(%s)", (KEY,))


def test_one_statement_files_no_more_requests_than_many(roles: Roles) -> None:
    m = roles.mallory
    trap = roles.create(m, "trap", f"SELECT id, v FROM {m}.src")
    arguments = json.dumps({"id": roles.id_of(trap), "kind": "VERIFY"})
    with pytest.raises(psycopg.errors.ProgramLimitExceeded):
        roles.sql(
            m, f"UPDATE pgtrickle.gate SET action = 'request', arguments = '{arguments}' FROM generate_series(1, 3000)"
        )
    assert roles.value(roles.app, "SELECT count(*) FROM pgtrickle.pgt_requests") == 0


# -- What others have decided, and what they see -----------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["alter_stream_table('{mine}', status => 'SUSPENDED')", "emergency_stop()"])
def test_a_reader_does_not_refresh_what_was_suspended(roles: Roles, stop: str) -> None:
    """It would begin to capture changes again, too."""
    alice, m = roles.alice, roles.mallory
    mine = roles.create(alice, "mine", f"SELECT id, kind FROM {alice}.orders")
    reader = roles.create(alice, "reader", f"SELECT id FROM {mine}")
    roles.refresh(mine, reader)
    roles.sql(alice, f"GRANT SELECT ON {mine}, {reader} TO {m}")
    roles.sql(roles.app if "emergency" in stop else alice, f"SELECT pgtrickle.{stop.format(mine=mine)}")
    roles.sql(alice, f"INSERT INTO {alice}.orders VALUES (900, 'k1', 1)")
    captured = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'pgtrickle_capture%'"
    before = roles.value(alice, captured)
    with running_service(roles.database.dsn, roles.database.name):
        for name in (mine, reader):
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="is suspended"):
                roles.sql(m, f"CALL pgtrickle.wait_until_fresh('{name}', '10 seconds')")
    assert roles.value(alice, captured) == before
    assert roles.value(alice, f"SELECT count(*) FROM {mine} WHERE id = 900") == 0


def test_a_refresh_does_not_forget_why_a_stream_table_is_suspended(roles: Roles) -> None:
    """resume_capture() resumes what the emergency stop has suspended."""
    alice = roles.alice
    mine = roles.create(alice, "mine", f"SELECT id, kind FROM {alice}.orders")
    roles.refresh(mine)
    roles.sql(roles.app, "SELECT pgtrickle.emergency_stop()")
    roles.refresh(mine)
    status = "SELECT status, status_reason FROM pgtrickle.pgt_stream_tables"
    assert roles.rows(roles.app, status) == [("SUSPENDED", "emergency stop")]
    roles.sql(alice, "SELECT pgtrickle.resume_capture()")
    assert roles.rows(roles.app, status) == [("ACTIVE", None)]


def test_a_comparison_is_for_the_owner_to_ask_for_and_shows_others_no_values(roles: Roles) -> None:
    alice, m = roles.alice, roles.mallory
    roles.sql(alice, _RANDOM.format(m=alice))
    mine = roles.create(alice, "mine", f"SELECT id, kind || {alice}.rnd(id) AS secret FROM {alice}.orders")
    roles.refresh(mine)
    roles.sql(alice, f"GRANT SELECT ON {mine} TO {m}")
    for attack in (
        f"pgtrickle.verify('{mine}')",
        f"""pgtrickle._gate('request', '{{"id": {roles.id_of(mine)}, "kind": "VERIFY"}}')""",
    ):
        assert "may not verify" in str(roles.attempt(m, f"SELECT {attack}"))
    request = roles.value(alice, f"SELECT pgtrickle.verify('{mine}')")
    with roles.service() as db:
        found = verify.answer_requests(db.engine, roles.id_of(mine))
    assert found.missing == 20
    (shown,) = {row[1][:2] for row in found.missing_rows if row[1] is not None} & {"k1"}
    assert "20 missing" in roles.peek(alice, f"SELECT error FROM pgtrickle.request_status({request})")
    seen = [
        roles.peek(m, f"SELECT * FROM pgtrickle.{source}")
        for source in ("pgt_verifications", f"request_status({request})", "events()", "pgt_own_requests")
    ]
    assert "False, 20, 20, 20" in seen[0]
    assert not any(shown in one for one in seen)


def test_a_name_does_not_control_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stream table, a column, a value, a message: all are chosen by others than who reads them."""
    evil = "x\x1b]0;owned\x07\x9b31m\u202e"
    for terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        print_table((evil, "v"), [(evil, None), ("a\nb", 1)], "")
    echo(f"error: {evil}", err=True)
    printed = capsys.readouterr()
    shown = printed.out + printed.err
    assert "owned" in shown
    assert not {"\x1b]", "\x07", "\x9b", "\u202e"} & {
        shown[i : i + length] for i in range(len(shown)) for length in (1, 2)
    }


def test_evidence_is_readable_by_who_asked_for_it_only(roles: Roles, tmp_path: Path) -> None:
    m = roles.mallory
    roles.sql(m, _RANDOM.format(m=m))
    trap = roles.create(m, "trap", f"SELECT id, {m}.rnd(v) AS x FROM {m}.src", refresh_mode="FULL")
    file = tmp_path / "evidence.json"
    with pytest.raises(PgtrickleError, match="differ from their queries"):
        cli.main(
            ["--dsn", roles.database.dsn, "verify", trap, "--evidence", str(file), "--with-data"],
            "pgtrickle",
            standalone_mode=False,
        )
    assert json.loads(file.read_text())[0]["missing"] == 5
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IRUSR | stat.S_IWUSR
