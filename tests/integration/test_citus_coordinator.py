"""Shards on the coordinator: a cluster of one node, one that grows from it, and coordinators that take shards later."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pgtrickle.cli.findings import find_problems
from pgtrickle.embedded.server import HOST, EmbeddedServer
from pgtrickle.errors import NotDifferentiableError, SourceLockedError
from tests.support.citus_shop import BUFFERS, CAPTURED, QUERIES, Shop, citus_shop, needs_citus
from tests.support.oracle import assert_equal_to_query
from tests.support.service import fresh, running_service

pytestmark = needs_citus

STATUS = "SELECT node, source, placement, shards, triggers_missing FROM pgtrickle.citus_status ORDER BY 1, 2"


@pytest.fixture
def single(nodes: list[EmbeddedServer]) -> Iterator[Shop]:
    """A cluster of one node."""
    with citus_shop(nodes, workers=0) as made:
        yield made


def test_sources_of_every_placement_on_one_node(single: Shop) -> None:
    single.create(*QUERIES)
    assert single.db.stream_table("rows").key == ("id",)
    single.refresh()
    for number in range(3):
        single.conn.execute("UPDATE ref SET name = name || 'y' WHERE grp = %s", (number,))
        single.goes_on()
    assert {action for action, _ in single.refresh().values()} == {"NO_DATA"}
    assert single.conn.execute(STATUS.encode()).fetchall() == [
        ("coordinator", "public.loc", "local", 1, 0),
        ("coordinator", "public.ref", "reference", 1, 0),
        ("coordinator", "public.t", "distributed", 4, 0),
    ]
    assert [one for one in find_problems(single.db.conn, 60.0) if one.check == "citus"] == []


def test_what_is_done_to_a_table_on_one_node(single: Shop) -> None:
    single.create("totals", "rows", "named")
    single.conn.execute("TRUNCATE t")
    assert {action for action, _ in single.refresh().values()} == {"REINITIALIZE"}
    single.conn.execute("INSERT INTO t SELECT i, i % 10, i FROM generate_series(1, 1000) AS i")
    single.goes_on()
    single.conn.execute("ALTER TABLE t ADD COLUMN extra text DEFAULT 'x'")
    single.change()
    single.refresh()
    single.goes_on()
    single.conn.execute("ALTER TABLE t DROP COLUMN extra")
    single.change()
    single.refresh()
    single.goes_on()
    for name in single.queries:
        single.db.drop_stream_table(name)
    for left in (CAPTURED, BUFFERS):
        assert single.admin.execute(left.encode()).fetchone() == (0,)


@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        ("totals", "UPDATE t SET v = v + 1", "shards of public.t lack"),
        ("referenced", "UPDATE ref SET name = 'z' || name", "public.ref lack"),
        ("local", "UPDATE loc SET name = 'z' || name", "public.loc lack"),
    ],
)
def test_triggers_that_somebody_switched_off(single: Shop, name: str, write: str, said: str) -> None:
    single.create(name)
    single.goes_on()
    rows = single.admin.execute(
        "SELECT DISTINCT tgrelid::regclass::text FROM pg_trigger"  # pg_class does not show shards
        " WHERE tgname LIKE 'pgtrickle\\_capture%' AND tgrelid::regclass::text ~ '(^loc|_[0-9]+)$' ORDER BY 1"
    ).fetchall()
    single.admin.execute(f"ALTER TABLE {rows[0][0]} DISABLE TRIGGER ALL".encode())
    single.conn.execute(write.encode())
    action, reason = single.refresh()[name]
    assert (action, reason) == ("REINITIALIZE", f"{said} capture triggers")
    single.goes_on()


@pytest.mark.parametrize("st_placement", ["reference", "distributed", None])
def test_stream_tables_are_placed_on_one_node(single: Shop, st_placement: str | None) -> None:
    single.create(*QUERIES, st_placement=st_placement)
    above = "SELECT twice % 10 AS last, count(*) AS n FROM rows GROUP BY twice % 10"
    single.db.create_stream_table("above", above, st_placement=st_placement)
    single.queries["above"] = above
    for _ in range(3):
        single.goes_on()
    expected = st_placement or "reference"
    assert single.placement("rows") == (expected, expected)


def test_lookups_go_to_the_shards_that_can_have_the_rows_on_one_node(single: Shop) -> None:
    single.conn.execute("CREATE TABLE picks (id int PRIMARY KEY, t int)")
    single.conn.execute("INSERT INTO picks SELECT i, i FROM generate_series(1, 300) AS i")
    single.define({"picked": "SELECT p.id, t.v FROM picks p LEFT JOIN t ON t.id = p.t"})
    for i in (5, 250):
        single.conn.execute("UPDATE picks SET t = %s WHERE id = %s", (i + 1, i))
        single.db.engine.statements.clear()
        assert single.refresh()["picked"][0] == "DIFFERENTIAL"
        row = single.conn.execute(
            "SELECT array_agg('t_' || get_shard_id_for_distribution_column('t', k)) FROM unnest(%s::int[]) k",
            ([i, i + 1],),
        ).fetchone()
        assert row is not None
        read = {name for name in _shards(single) if any(name in text for text in single.db.engine.statements)}
        assert read == set(row[0])


def _shards(shop: Shop) -> set[str]:
    rows = shop.conn.execute("SELECT 't_' || shardid FROM pg_dist_shard WHERE logicalrelid = 't'::regclass").fetchall()
    return {name for (name,) in rows}


def test_large_tables_are_read_shard_by_shard_on_one_node(single: Shop) -> None:
    single.db.engine.reading.large = 1 << 18
    single.conn.execute("INSERT INTO t SELECT i, i % 10, i % 1000 FROM generate_series(200000, 240000) AS i")
    single.create("totals", "rows", "named", st_placement="distributed")
    assert all(any(name in text for text in single.db.engine.statements) for name in _shards(single))
    single.conn.execute("UPDATE t SET v = v + 1 WHERE id > 210000")
    single.refresh()
    single.goes_on()


def test_what_has_no_plan_is_refused_on_one_node_too(single: Shop) -> None:
    query = "SELECT id, v, rank() OVER (PARTITION BY id % 3 ORDER BY v DESC) AS place FROM t WHERE v > 900"
    with pytest.raises(NotDifferentiableError, match="window") as error:
        single.db.create_stream_table("places", query)
    assert "refresh_mode FULL" in str(error.value)
    made = single.db.create_stream_table("places", query, refresh_mode="FULL", st_placement="local")
    assert made.effective_mode == "FULL"
    single.queries["places"] = query
    single.change()
    assert single.refresh()["places"][0] == "FULL"


def test_one_node_is_not_cut_amid_what_it_commits_over_several_connections(single: Shop) -> None:
    """Citus writes many shards of one node over connections of their own, and commits one after the other."""
    single.create("totals")
    with psycopg.connect(single.cluster.superuser_dsn(), autocommit=True) as half:
        half.execute("BEGIN")
        half.execute("SELECT pg_current_xact_id()")
        half.execute("PREPARE TRANSACTION 'citus_77_1_1_1'")  # of no coordinator that would recover it
        single.change()
        with pytest.raises(SourceLockedError, match="transactions of several nodes did not end"):
            single.db.refresh("totals")
        half.execute("ROLLBACK PREPARED 'citus_77_1_1_1'")
    single.goes_on()


def test_a_local_table_is_distributed_and_back_on_one_node(single: Shop) -> None:
    single.create("named", "local", "totals")
    single.conn.execute("SET citus.enable_unsafe_triggers = on")
    for step in (
        "SELECT create_distributed_table('loc', 'grp')",
        "SELECT undistribute_table('loc')",
        "SELECT undistribute_table('t')",
        "SELECT create_distributed_table('t', 'id')",
    ):
        single.change()
        single.conn.execute(step.encode())
        single.change()
        single.refresh()
        single.goes_on()


def test_sql_creates_stream_tables_on_one_node(single: Shop) -> None:
    with psycopg.connect(single.cluster.dsn(), autocommit=True) as plain:
        plain.execute("SELECT pgtrickle.create_stream_table('totals', %s)", (QUERIES["totals"],))
    single.queries["totals"] = QUERIES["totals"]
    single.refresh()
    single.goes_on()


def test_a_service_keeps_one_node_fresh(single: Shop) -> None:
    single.create("totals", "mixed")
    with running_service(single.cluster.dsn(), single.cluster.name):
        for _ in range(2):
            single.change()
            fresh(single.conn, "totals", "mixed")
            for name, query in single.queries.items():
                assert_equal_to_query(single.conn, name, query)
    actions = single.conn.execute(
        "SELECT DISTINCT action FROM pgtrickle.pgt_refresh_history WHERE initiated_by <> 'INITIAL' AND action <> 'NO_DATA'"
    ).fetchall()
    assert actions == [("DIFFERENTIAL",)]


def test_one_node_grows_into_a_cluster(single: Shop) -> None:
    single.create("totals", "rows", "mixed", "whole")
    single.cluster.have_address()
    for node in (1, 2):
        single.cluster.add(node)
        single.goes_on()
        single.change()
        single.admin.execute("SELECT rebalance_table_shards('t', shard_transfer_mode := 'block_writes')")
        single.goes_on()  # what changed before a shard moved is in the coordinator's buffer
    placed = single.conn.execute("SELECT count(DISTINCT nodeport) FROM citus_shards WHERE table_name = 't'::regclass")
    assert placed.fetchone() == (3,)
    coordinator = (HOST, single.cluster.servers[0].port)
    single.change()
    single.admin.execute("SELECT citus_drain_node(%s, %s, 'block_writes')", coordinator)
    single.goes_on()
    assert ("coordinator", "public.t", "distributed", 0, 0) in single.conn.execute(STATUS.encode()).fetchall()
    single.admin.execute("SELECT citus_set_node_property(%s, %s, 'shouldhaveshards', true)", coordinator)
    for node in (1, 2):
        port = single.cluster.servers[node].port
        single.change()
        single.admin.execute(
            "SELECT citus_move_shard_placement(min(shardid), %s, %s, %s, %s, 'force_logical')"
            " FROM citus_shards WHERE table_name = 't'::regclass AND nodeport = %s",
            (HOST, port, *coordinator, port),
        )
        single.goes_on()


def test_a_coordinator_takes_shards_later(shop: Shop) -> None:
    shop.create("totals", "rows", "named", "local")
    shop.goes_on()
    coordinator = (HOST, shop.cluster.servers[0].port)
    shop.admin.execute("SELECT citus_set_node_property(%s, %s, 'shouldhaveshards', true)", coordinator)
    shop.admin.execute("SELECT rebalance_table_shards('t', shard_transfer_mode := 'block_writes')")
    shop.conn.execute("UPDATE t SET v = v + 1")
    done = shop.refresh()
    assert {done[name][0] for name in ("totals", "rows", "named")} == {"REINITIALIZE"}
    assert done["totals"][1] == "the coordinator may have shards of public.t now"
    assert done["local"][0] == "NO_DATA"
    shop.goes_on()
