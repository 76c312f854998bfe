"""Capture on the nodes of a Citus cluster: it is set up and removed completely, and does not block writers."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from itertools import count

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgtrickle.catalog.gate import pass_gate
from pgtrickle.errors import (
    DatabaseFailedError,
    NotDifferentiableError,
    SourceLockedError,
)
from tests.support.citus_shop import QUERIES, Shop, needs_citus
from tests.support.shadow_operators import SHADOW_SCHEMA, create_shadows, shadow_calls

pytestmark = needs_citus


def test_writers_on_a_node_without_a_catalog(shop: Shop) -> None:
    """Citus copies triggers and their functions there, and nothing else of pgtrickle."""
    shop.create("referenced", "totals")
    shop.cluster.add(3)
    shop.admin.execute("SELECT replicate_reference_tables('block_writes')")
    shop.conn.execute("UPDATE ref SET name = 'new' WHERE grp < 5")
    shop.conn.execute("DELETE FROM ref WHERE grp = 9")
    with psycopg.connect(shop.cluster.superuser_dsn(3)) as node:
        assert node.execute("SELECT to_regnamespace('pgtrickle')").fetchone() == (None,)
    shop.goes_on()


def test_settings_for_the_rest_of_a_transaction_are_restored(shop: Shop) -> None:
    """Nodes wait for locks as long as they did before they received pgtrickle's DDL."""
    settings = [
        "lock_timeout",
        "citus.enable_ddl_propagation",
        "citus.enable_unsafe_triggers",
        "citus.propagate_set_commands",
    ]
    asked = "SELECT array_agg(current_setting(name)) FROM unnest(%s::text[]) AS name"
    shop.create("totals")
    before = shop.conn.execute(asked, (settings,)).fetchone()
    holder = psycopg.connect(shop.cluster.dsn(), autocommit=False)
    holder.execute("UPDATE t SET v = 0 WHERE id = 1")

    def release() -> None:
        """After another session has waited longer than pgtrickle would."""
        long = "SELECT count(*) FROM pg_locks WHERE NOT granted AND waitstart < clock_timestamp() - interval '0.8 s'"
        with ExitStack() as stack:
            conns = [
                stack.enter_context(psycopg.connect(shop.cluster.superuser_dsn(i), autocommit=True)) for i in (1, 2)
            ]
            while all(conn.execute(long).fetchone() == (0,) for conn in conns):
                stop.wait(0.05)
        holder.rollback()

    stop = threading.Event()
    waiting = threading.Thread(target=release)
    with shop.conn.transaction():
        shop.conn.execute("SELECT pgtrickle.drop_stream_table('totals')")
        assert shop.conn.execute(asked, (settings,)).fetchone() == before
        waiting.start()
        shop.conn.execute("UPDATE t SET v = 1 WHERE id = 1")
    waiting.join()
    holder.close()
    assert shop.conn.execute("SELECT v FROM t WHERE id = 1").fetchone() == (1,)


def test_functions_are_called_only_by_roles_that_may_call_them(shop: Shop) -> None:
    """Expressions are evaluated on the nodes by the service's login: the creator's rights are checked before."""
    shop.conn.execute("CREATE FUNCTION secret(int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT $1 + 1000'")
    shop.conn.execute("REVOKE EXECUTE ON FUNCTION secret(int) FROM PUBLIC")
    shop.admin.execute("CREATE ROLE bob")
    try:
        shop.admin.execute("GRANT CREATE ON SCHEMA public TO bob")
        shop.conn.execute("GRANT SELECT, TRIGGER ON t TO bob")
        shop.admin.execute("SET ROLE bob")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match=r"bob may not call .*secret"):
            shop.admin.execute(
                "SELECT pgtrickle.create_stream_table('s', 'SELECT id FROM t WHERE secret(v) > 3', st_placement => 'local')"
            )
    finally:
        shop.admin.execute("RESET ROLE")
        shop.admin.execute("DROP OWNED BY bob")
        shop.admin.execute("DROP ROLE bob")


def test_truncate_re_initializes(shop: Shop) -> None:
    shop.create("totals", "referenced", "local")
    shop.conn.execute("TRUNCATE t")
    shop.conn.execute("INSERT INTO t VALUES (1, 1, 1000)")
    action, reason = shop.refresh()["totals"]
    assert action == "REINITIALIZE"
    assert reason is not None
    assert "truncated" in reason
    shop.conn.execute("TRUNCATE ref")
    shop.conn.execute("TRUNCATE loc")
    assert [action for action, _ in shop.refresh().values()] == ["NO_DATA", "REINITIALIZE", "REINITIALIZE"]
    shop.goes_on()


def test_columns_change(shop: Shop) -> None:
    shop.create("totals", "rows")
    shop.conn.execute("ALTER TABLE t ADD COLUMN extra int")
    shop.goes_on()
    query = "SELECT id, extra FROM t WHERE extra IS NOT NULL"
    shop.db.create_stream_table("extra", query)
    shop.queries["extra"] = query
    shop.conn.execute("UPDATE t SET extra = id WHERE id < 100")
    shop.goes_on()
    shop.conn.execute("ALTER TABLE t RENAME COLUMN v TO value")
    shop.conn.execute("UPDATE t SET value = value + 1 WHERE id < 50")
    shop.queries = {name: text.replace("v", "value") if name != "extra" else text for name, text in QUERIES.items()}
    shop.queries = {name: shop.queries[name] for name in ("totals", "rows")} | {"extra": query}
    shop.queries["rows"] = "SELECT id, value * 2 AS twice FROM t WHERE value > 500"
    shop.queries["totals"] = "SELECT grp, count(*) AS n, sum(value) AS total FROM t GROUP BY grp"
    shop.refresh()
    shop.conn.execute("UPDATE t SET value = value + 1 WHERE id < 20")
    shop.refresh()


def test_writers_with_plans_notice_every_alteration(shop: Shop) -> None:
    """Capture checks columns when a statement is planned, not when it runs.

    An ALTER must cause it to be planned again.
    """
    shop.conn.execute("ALTER TABLE t ADD COLUMN w int DEFAULT 7, ADD COLUMN note text")
    query = "SELECT id, {} AS value FROM t"
    ids = count(70_000)

    def write() -> None:
        """Run each kind of statement many times on all shards, in this session and in one on a worker."""
        for conn in (shop.conn, worker):
            for i in range(40):
                conn.execute("UPDATE t SET grp = grp + 1 WHERE id = %s", (200 + i,))
                conn.execute("INSERT INTO t (id, grp) VALUES (%s, 1)", (next(ids),))
                conn.execute("DELETE FROM t WHERE id = %s", (next(ids) - 50,))

    with psycopg.connect(shop.cluster.dsn(1), autocommit=True) as worker:
        shop.db.create_stream_table("all", query.format("v"), st_placement="local")
        write()
        for statements, value in (
            (("RENAME v TO former", "RENAME w TO v"), "former"),
            (("RENAME v TO w", "RENAME former TO v"), "v"),
            (("ALTER grp TYPE bigint",), "v"),
            (("ALTER note TYPE varchar(20)",), "v"),
            (("DROP note", "ADD note int DEFAULT 3"), "v"),
        ):
            for statement in statements:
                shop.conn.execute(f"ALTER TABLE t {statement}".encode())
            write()
            if not statements[0].startswith("RENAME"):
                for node in (1, 2):
                    with psycopg.connect(shop.cluster.superuser_dsn(node)) as there:
                        marked = "SELECT FROM pgtrickle_changes.pgt_markers WHERE kind = 'SCHEMA'"
                        assert there.execute(marked).fetchall(), f"{statements} on node {node}"
            shop.queries = {"all": query.format(value)}
            shop.refresh()
            write()
            assert shop.refresh()["all"][0] == "DIFFERENTIAL"


def test_dropping_cleans_up_all_nodes(shop: Shop) -> None:
    shop.create(*QUERIES)
    shop.change()
    shop.refresh()
    for name in QUERIES:
        shop.db.drop_stream_table(name)
    shop.assert_nothing_is_captured()
    assert shop.conn.execute("SELECT count(*) FROM t").fetchone() != (0,)


def test_a_transaction_on_a_worker_is_not_waited_for_forever(shop: Shop) -> None:
    shop.conn.execute("SELECT pgtrickle.set('lock_timeout_ms', '300')")
    shop.db.conn.execute("SET statement_timeout = '60s'")
    with psycopg.connect(shop.cluster.dsn(1)) as writer:
        writer.execute("UPDATE t SET v = v + 1 WHERE id < 100")
        with pytest.raises(SourceLockedError, match="held by a transaction on another node"):
            shop.create("totals")
        writer.commit()
        shop.create("totals", "rows")
        writer.execute("UPDATE t SET v = v + 1 WHERE id < 100")
        for name in ("totals", "rows"):
            shop.db.drop_stream_table(name)
        shop.queries = {}
        writer.commit()  # what it wrote was captured, or not: it does not fail
    shop.create("totals")
    shop.refresh()
    shop.goes_on()


def test_uninstall_leaves_nothing_on_any_node(shop: Shop) -> None:
    shop.create("totals", "rows", st_placement="distributed")
    shop.create("local", "referenced")
    shop.db.uninstall(drop_tables=True)
    assert shop.conn.execute("SELECT count(*) FROM t").fetchone() == (1000,)
    shop.conn.execute("INSERT INTO t SELECT i, 1, 1 FROM generate_series(2001, 2100) AS i")
    shop.conn.execute("UPDATE loc SET name = 'x'")
    tables = shop.conn.execute("SELECT table_name::text FROM citus_tables ORDER BY 1").fetchall()
    assert tables == [("ref",), ("t",)]
    shop.assert_nothing_is_captured()
    for node in range(3):
        with psycopg.connect(shop.cluster.superuser_dsn(node), autocommit=True) as conn:
            left = conn.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'pgtrickle%'").fetchall()
            assert left == [], f"node {node}"
    shop.queries.clear()
    shop.db.install()
    shop.create("totals")
    shop.goes_on()


def test_columnar_tables_are_refused(shop: Shop) -> None:
    if shop.admin.execute("SELECT FROM pg_available_extensions WHERE name = 'citus_columnar'").fetchone() is None:
        pytest.skip("this Citus has no columnar storage")
    shop.admin.execute("CREATE EXTENSION IF NOT EXISTS citus_columnar")
    shop.admin.execute("CREATE TABLE flat (id int, v int) USING columnar")
    shop.admin.execute("ALTER TABLE flat OWNER TO app")
    shop.conn.execute("SELECT create_distributed_table('flat', 'id')")
    with pytest.raises(NotDifferentiableError, match=r"flat cannot be captured: it has columnar storage"):
        shop.db.create_stream_table("flattened", "SELECT id FROM flat")


def test_a_set_up_that_fails_on_a_node_leaves_nothing_behind_and_can_be_repeated(shop: Shop) -> None:
    shop.cluster.servers[2].kill()
    with pytest.raises(DatabaseFailedError, match="@node_2"):
        shop.create("totals")
    assert shop.db.stream_tables() == []
    shop.cluster.servers[2].start()
    shop.assert_nothing_is_captured()
    shop.db.engine.connections._failed.clear()
    shop.create("totals")
    shop.goes_on()


def test_writers_of_old_snapshots_do_not_fail(shop: Shop) -> None:
    shop.create("totals", "rows")
    with psycopg.connect(shop.cluster.dsn()) as old:
        old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        old.execute("SELECT count(*) FROM ref")  # its snapshot, on the coordinator
        shop.conn.execute("ALTER TABLE t ADD COLUMN extra text")
        shop.conn.execute("ALTER TABLE t RENAME COLUMN v TO value")
        old.execute("UPDATE t SET value = value + 1000 WHERE id < 30")
        old.commit()
    shop.queries = {
        "totals": "SELECT grp, count(*) AS n, sum(value) AS total FROM t GROUP BY grp",
        "rows": "SELECT id, value * 2 AS twice FROM t WHERE value > 500",
    }
    shop.refresh()
    shop.conn.execute("UPDATE t SET value = value + 1 WHERE id < 100")
    assert {action for action, _ in shop.refresh().values()} == {"DIFFERENTIAL"}


@pytest.mark.parametrize(
    "level",
    [
        psycopg.IsolationLevel.REPEATABLE_READ,
        pytest.param(psycopg.IsolationLevel.SERIALIZABLE, marks=pytest.mark.long),
    ],
)
def test_transactions_with_old_snapshots_see_the_present_columns(shop: Shop, level: psycopg.IsolationLevel) -> None:
    """Alterations since the snapshot are noticed, and values are not stored in columns that do not fit; rolled-back
    ones are ignored.
    """
    shop.conn.execute("ALTER TABLE t ADD COLUMN note varchar(3)")
    shop.define({"groups": "SELECT id, grp FROM t"})  # columns that a stream table reads cannot be altered so
    for node in (0, 1, 2):  # one writer at a time: PostgreSQL may refuse one of several that are SERIALIZABLE
        with psycopg.connect(shop.cluster.dsn(node)) as old:
            old.isolation_level = level
            for statement, end, note, expected in (
                ("ALTER v TYPE bigint", "ROLLBACK", "abc", "DIFFERENTIAL"),
                (f"ALTER note TYPE varchar({10 + node})", "COMMIT", "long note" + "!" * (node + 1), "DIFFERENTIAL"),
                (f"ALTER note TYPE {'text' if node % 2 else 'name'}", "COMMIT", "not fitting in it", "REINITIALIZE"),
                ("ALTER note TYPE bytea USING NULL", "ROLLBACK", "long note", "DIFFERENTIAL"),
                (f"ALTER note TYPE varchar({9 + node})", "COMMIT", "short", "REINITIALIZE"),
            ):
                old.execute("SELECT pg_current_snapshot()")  # and no lock
                shop.conn.execute("BEGIN")
                shop.conn.execute(f"ALTER TABLE t {statement}".encode())
                shop.conn.execute(end.encode())
                for key in range(20):
                    old.execute("UPDATE t SET grp = grp + 1, note = %s WHERE id = %s", (note, 100 * node + key + 1))
                old.commit()
                done = shop.refresh()
                assert done["groups"][0] == expected, (node, statement, end, done)


def test_writers_cannot_have_their_own_functions_called_by_capture(shop: Shop) -> None:
    """Whatever operators and functions are in a writer's search path: capture runs with the rights of its owner."""
    shop.create("rows")
    shop.admin.execute("CREATE ROLE guest LOGIN")
    shop.conn.execute("GRANT SELECT, UPDATE ON t TO guest")
    for node in (1, 2):
        shards = shop.admin.execute(
            "SELECT shard_name(logicalrelid, shardid, false) FROM pg_dist_shard JOIN pg_dist_placement USING (shardid)"
            " JOIN pg_dist_node USING (groupid) WHERE logicalrelid = 't'::regclass AND nodeport = %s",
            (shop.cluster.servers[node].port,),
        ).fetchall()
        assert shards
        with psycopg.connect(shop.cluster.superuser_dsn(node), autocommit=True) as there:
            there.execute("SET citus.enable_ddl_propagation = off")
            create_shadows(there)
            (turn,) = there.execute("SELECT relname FROM pg_class WHERE relname LIKE 'turn%'").fetchall()
            dsn = make_conninfo(
                shop.cluster.superuser_dsn(node), user="guest", options=f"-c search_path={SHADOW_SCHEMA},pg_catalog"
            )
            with psycopg.connect(dsn, autocommit=True) as guest:
                for usual in (True, False):
                    if not usual:  # without a turn nothing is as a capture function expects it
                        there.execute(
                            sql.SQL("ALTER SEQUENCE {} RESTART").format(sql.Identifier("pgtrickle_changes", *turn))
                        )
                    for (shard,) in shards:  # in this very session, whose search path Citus passes to nobody
                        guest.execute(f"UPDATE {shard} SET v = v OPERATOR(pg_catalog.+) 1000".encode())
                assert shadow_calls(there, "guest") == []
                guest.execute("SELECT true WHERE 'a'::text = 'a'::text")
                assert shadow_calls(there, "app") == [("guest", "=")], "the trap is none"
    assert shop.refresh()["rows"][0] == "DIFFERENTIAL"


def test_columns_dropped_before_a_table_was_distributed(shop: Shop) -> None:
    shop.conn.execute("CREATE TYPE mood AS ENUM ('good', 'bad')")
    shop.conn.execute("CREATE TABLE d (gone int, id int, a int, b int, m mood)")
    shop.conn.execute("ALTER TABLE d DROP COLUMN gone")
    shop.conn.execute("SELECT create_distributed_table('d', 'id')")
    shop.conn.execute("INSERT INTO d SELECT i, i * 10, i * 100, 'good' FROM generate_series(1, 50) AS i")
    shop.define({"only_b": "SELECT b FROM d", "both": "SELECT id, a, b, m FROM d WHERE a > 50"})
    shop.conn.execute("UPDATE d SET a = a + 1, b = b + 7, m = 'bad' WHERE id % 2 = 0")
    assert {action for action, _ in shop.refresh().values()} == {"DIFFERENTIAL"}
    shop.conn.execute("ALTER TYPE mood RENAME TO humour")  # writers in new sessions must not mind
    with psycopg.connect(shop.cluster.dsn(), autocommit=True) as writer:
        writer.execute("UPDATE d SET b = b + 1 WHERE id < 20")
    shop.refresh()
    shop.conn.execute("UPDATE d SET b = b + 1 WHERE id < 20")
    assert {action for action, _ in shop.refresh().values()} == {"DIFFERENTIAL"}


def test_a_table_cannot_be_captured_under_the_name_of_another(shop: Shop) -> None:
    shop.create("totals")
    shop.admin.execute("CREATE ROLE mallory LOGIN")
    shop.admin.execute("CREATE SCHEMA lair AUTHORIZATION mallory")
    (victim,) = shop.conn.execute(
        "SELECT source_stable_name FROM pgtrickle.pgt_change_tracking WHERE source_relid = 't'::regclass"
    ).fetchone() or ("",)
    evil = {"attnum": 1, "name": "a", "type": "int", "typmod": "-1", "stored": "int; DROP TABLE public.loc"}
    try:
        with psycopg.connect(shop.cluster.servers[0].dsn(shop.cluster.name, "mallory"), autocommit=True) as mallory:
            mallory.execute("SET citus.enable_ddl_propagation = off")
            mallory.execute("CREATE TABLE lair.mine (a int)")
            said = {"name": "lair.mine", "placement": "local", "columns": [evil]}
            source = mallory.execute("SELECT 'lair.mine'::regclass::oid::bigint").fetchone()
            assert source is not None

            def track(name: str) -> None:
                definition = said | {"stable_name": name}
                pass_gate(mallory, "track_shards", source=source[0], definition=definition)

            for name in (victim, "x", "0123456789abcdef"):
                with pytest.raises(psycopg.Error, match=r"cannot be captured as|may not capture"):
                    track(name)
            own = mallory.execute("SELECT pgtrickle.stable_hash('lair.mine')").fetchone()
            assert own is not None
            track(own[0])
            with pytest.raises(psycopg.Error, match="not a distributed table"):
                pass_gate(mallory, "read_from_nodes", source=source[0])
        assert shop.conn.execute("SELECT count(*) FROM loc").fetchone() == (10,)
        shop.goes_on()
    finally:
        shop.admin.execute("DROP SCHEMA lair CASCADE")
        shop.admin.execute("DROP OWNED BY mallory")  # the right to call the capture function of her table
        shop.admin.execute("DROP ROLE mallory")


def test_a_trigger_missing_before_the_initial_population_is_created(shop: Shop) -> None:
    shop.db.create_stream_table("totals", QUERIES["totals"], initialize=False, st_placement="local")
    shop.queries["totals"] = QUERIES["totals"]
    with psycopg.connect(shop.cluster.superuser_dsn(1), autocommit=True) as worker:
        worker.execute("SET citus.override_table_visibility = off")
        name, shard = worker.execute(
            "SELECT tgname, tgrelid::regclass::text FROM pg_trigger WHERE tgname LIKE 'pgtrickle\\_capture\\_truncate%'"
            " AND tgrelid <> 't'::regclass ORDER BY 1 LIMIT 1"
        ).fetchone() or ("", "")
        worker.execute(f"DROP TRIGGER {name} ON {shard}".encode())
    shop.refresh()
    shop.conn.execute("TRUNCATE t")
    assert shop.refresh()["totals"][0] == "REINITIALIZE"
    assert shop.conn.execute("SELECT count(*) FROM totals").fetchone() == (0,)
