"""Shards that move, and nodes that join, leave, crash or change address: results stay exact, and status shows it."""

from __future__ import annotations

import psycopg
import pytest

from pgtrickle.cli.diagnostics import find_problems
from pgtrickle.embedded.server import HOST
from pgtrickle.errors import (
    DatabaseFailedError,
    PrivilegeError,
    SourceLockedError,
)
from tests.support.citus_shop import Shop, needs_citus

pytestmark = needs_citus


def test_shards_move_and_nodes_come_and_go(shop: Shop) -> None:
    shop.create("totals", "rows", "named")
    row = shop.admin.execute(
        "SELECT shardid, nodeport FROM citus_shards WHERE table_name = 't'::regclass ORDER BY shardid LIMIT 1"
    ).fetchone()
    assert row is not None
    shard, port = row
    (other,) = [node.port for node in shop.cluster.servers[1:3] if node.port != port]
    move = "SELECT citus_move_shard_placement(%s, %s, %s, %s, %s, 'block_writes')"
    shop.change()
    shop.admin.execute(move, (shard, HOST, port, HOST, other))
    shop.goes_on()  # its changes before are in the buffer of the one node, those after it in that of the other
    shop.cluster.add(3)
    shop.goes_on()
    shop.change()
    shop.admin.execute("SELECT rebalance_table_shards('t', shard_transfer_mode := 'block_writes')")
    shop.goes_on()
    third = (HOST, shop.cluster.servers[3].port)
    assert shop.admin.execute("SELECT count(*) > 0 FROM citus_shards WHERE nodeport = %s", third[1:]).fetchone() == (
        True,
    )
    shop.change()
    shop.admin.execute("SELECT citus_drain_node(%s, %s, 'block_writes')", third)
    shop.admin.execute("SELECT citus_remove_node(%s, %s)", third)
    shop.change()
    shop.refresh()
    shop.goes_on()


def test_a_shard_is_split(shop: Shop) -> None:
    shop.create("totals", "rows")
    shop.change()
    row = shop.admin.execute(
        "SELECT s.shardid, n.nodeid, ((s.shardminvalue::int8 + s.shardmaxvalue::int8) / 2)::text FROM pg_dist_shard AS s"
        " JOIN pg_dist_placement AS p USING (shardid) JOIN pg_dist_node AS n USING (groupid)"
        " WHERE s.logicalrelid = 't'::regclass ORDER BY 1 LIMIT 1"
    ).fetchone()
    assert row is not None
    shard, node, middle = row
    shop.admin.execute(
        "SELECT citus_split_shard_by_split_points(%s, ARRAY[%s], ARRAY[%s, %s]::int[], 'block_writes')",
        (shard, middle, node, node),
    )
    shop.change()
    shop.refresh()
    shop.goes_on()


def test_a_worker_is_killed_and_comes_back(shop: Shop) -> None:
    shop.create("totals", "rows", "local")
    shop.change()
    shop.refresh()
    worker = shop.cluster.servers[2]
    shop.change()
    worker.kill()
    shop.conn.execute("UPDATE loc SET name = 'meanwhile' WHERE grp = 3")
    with pytest.raises(DatabaseFailedError, match="@node_2"):
        shop.db.refresh("totals")
    (result,) = shop.db.refresh("local")  # what reads no node goes on
    assert result.action == "DIFFERENTIAL"
    assert shop.conn.execute("SELECT count(*) FROM totals").fetchone() == (10,)
    worker.start()
    shop.db.engine.connections._failed.clear()
    shop.refresh()
    shop.goes_on()


def test_a_distributed_stream_table_waits_for_prepared_transactions_of_a_crash(shop: Shop) -> None:
    """The remaining prepared transaction may be its own apply, and it reads no node whose cut would notice."""
    shop.create("local", st_placement="reference")
    with psycopg.connect(shop.cluster.superuser_dsn(2), autocommit=True) as worker:
        worker.execute("BEGIN")
        worker.execute("SELECT pg_current_xact_id()")
        worker.execute("PREPARE TRANSACTION 'citus_77_1_1_1'")  # of no coordinator that would recover it
        shop.conn.execute("UPDATE loc SET name = 'later' WHERE grp = 1")
        with pytest.raises(SourceLockedError, match=r"not recovered: public\.local waits"):
            shop.db.refresh("local")
        worker.execute("ROLLBACK PREPARED 'citus_77_1_1_1'")
    shop.goes_on()


def test_a_node_is_followed_to_another_address(shop: Shop) -> None:
    shop.create("totals", "rows")
    shop.goes_on()
    shop.admin.execute("SELECT citus_update_node(nodeid, 'localhost', nodeport) FROM pg_dist_node WHERE groupid = 2")
    shop.goes_on()
    known = "SELECT dsn FROM pgtrickle.pgt_databases WHERE name = '@node_2'"
    assert shop.conn.execute(known).fetchone() == (f"host=localhost port={shop.cluster.servers[2].port}",)


def test_status_shows_nodes_and_what_is_captured_there(shop: Shop) -> None:
    status = "SELECT node, source, placement, shards, triggers_missing FROM pgtrickle.citus_status ORDER BY 1, 2"
    shop.create("totals", "referenced", "local")
    assert shop.conn.execute(status).fetchall() == [
        ("@node_1", "public.t", "distributed", 2, 0),
        ("@node_2", "public.t", "distributed", 2, 0),
        ("coordinator", "public.loc", "local", 1, 0),
        ("coordinator", "public.ref", "reference", 1, 0),
        ("coordinator", "public.t", "distributed", 0, 0),
    ]
    assert [one for one in find_problems(shop.db.conn, 60.0) if one.check == "citus"] == []
    (shard,) = shop.admin.execute(
        "SELECT shard_name(logicalrelid, shardid) FROM pg_dist_shard JOIN pg_dist_placement USING (shardid)"
        " WHERE logicalrelid = 't'::regclass AND groupid = 1 ORDER BY shardid LIMIT 1"
    ).fetchone() or ("",)
    with psycopg.connect(shop.cluster.superuser_dsn(1), autocommit=True) as worker:
        worker.execute(f"ALTER TABLE {shard} DISABLE TRIGGER ALL".encode())
    (finding,) = [one for one in find_problems(shop.db.conn, 60.0) if one.check == "citus"]
    assert finding.subject == "@node_1: public.t"
    assert "lacks 4 capture triggers" in finding.problem
    shop.conn.execute("UPDATE t SET v = v + 1")  # not captured there
    action, reason = shop.refresh()["totals"]
    assert action == "REINITIALIZE"
    assert reason is not None
    assert "lack capture triggers" in reason
    assert [one for one in find_problems(shop.db.conn, 60.0) if one.check == "citus"] == []
    shop.goes_on()
    shop.cluster.servers[2].kill()
    (finding,) = [one for one in find_problems(shop.db.conn, 60.0) if one.check == "citus"]
    assert finding.subject == "@node_2"


def test_a_missing_right_to_cut_all_nodes_is_named(shop: Shop) -> None:
    with psycopg.connect(shop.cluster.superuser_dsn(2), autocommit=True) as worker:
        worker.execute("REVOKE UPDATE ON pg_catalog.pg_dist_transaction FROM app")
    with pytest.raises(PrivilegeError, match="@node_2") as error:
        shop.create("totals")
    assert "GRANT UPDATE ON pg_catalog.pg_dist_transaction TO app" in str(error.value)


def test_shards_that_visit_an_unprepared_node_cause_re_initialization(shop: Shop) -> None:
    shop.create("totals", "rows", "local")
    third = (HOST, shop.cluster.servers[3].port)
    shop.cluster.add(3)
    shop.admin.execute("SELECT rebalance_table_shards('t', shard_transfer_mode := 'block_writes')")
    shop.conn.execute("UPDATE t SET v = v + 1")  # captured nowhere where a shard is on the new node
    shop.admin.execute("SELECT citus_drain_node(%s, %s, 'block_writes')", third)
    shop.admin.execute("SELECT citus_remove_node(%s, %s)", third)
    done = shop.refresh()
    assert {done[name][0] for name in ("totals", "rows")} == {"REINITIALIZE"}
    assert done["local"][0] == "NO_DATA"
    shop.goes_on()


def test_a_failing_node_affects_only_its_readers(shop: Shop) -> None:
    shop.create("totals", "local", "referenced")
    shop.cluster.servers[2].kill()
    shop.conn.execute("UPDATE loc SET name = 'meanwhile' WHERE grp = 3")
    ids = [shop.db.stream_table(name).id for name in shop.queries]
    outcome = shop.db.engine.attempt(ids, "TEST")
    assert set(outcome.failures) == {ids[0]}
    assert [result.action for result in outcome.results] == ["DIFFERENTIAL", "NO_DATA"]
