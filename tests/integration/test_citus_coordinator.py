"""Shards on the coordinator: single-node clusters, clusters grown from one, and coordinators that get shards later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest

from pgtrickle.cli.diagnostics import find_problems
from pgtrickle.embedded.server import HOST, EmbeddedServer
from pgtrickle.errors import NotDifferentiableError, SourceChangedError, SourceLockedError
from pgtrickle.refresh.planning.planner import Planner
from pgtrickle.refresh.stages import Claimed, Planned
from pgtrickle.sites.remote import cuts
from pgtrickle.sites.remote.cuts import RemoteCuts
from tests.support.citus_shop import BUFFERS, CAPTURED, QUERIES, Shop, citus_shop, needs_citus
from tests.support.oracle import assert_equal_to_query
from tests.support.service import fresh, running_service

pytestmark = needs_citus

STATUS = "SELECT node, source, placement, shards, triggers_missing FROM pgtrickle.citus_status ORDER BY 1, 2"


@pytest.fixture
def single(nodes: list[EmbeddedServer]) -> Iterator[Shop]:
    """A cluster with one node."""
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


def test_alterations_of_a_table_on_one_node(single: Shop) -> None:
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
    ("name", "write", "source"),
    [
        ("totals", "UPDATE t SET v = v + 1", "public.t"),
        ("referenced", "UPDATE ref SET name = 'z' || name", "public.ref"),
        ("local", "UPDATE loc SET name = 'z' || name", "public.loc"),
    ],
)
def test_disabled_triggers_are_noticed(single: Shop, name: str, write: str, source: str) -> None:
    """Repairing capture notifies all readers of the table, whether by a refresh or by creating another stream table."""
    single.create(name)
    single.define({"other": QUERIES[name]})
    single.goes_on()
    for mended_by in (name, "new"):
        rows = single.admin.execute(
            "SELECT DISTINCT tgrelid::regclass::text FROM pg_trigger"  # pg_class does not show shards
            " WHERE tgname LIKE 'pgtrickle\\_capture%' AND tgrelid::regclass::text ~ '(^loc|_[0-9]+)$' ORDER BY 1"
        ).fetchall()
        single.admin.execute(f"ALTER TABLE {rows[0][0]} DISABLE TRIGGER ALL".encode())
        single.conn.execute(write.encode())
        if mended_by == "new":
            single.define({"new": QUERIES[name]})
        else:
            single.db.refresh(mended_by)
        done = single.refresh()
        assert done["other"] == ("REINITIALIZE", f"{source} lacked capture triggers")
        single.goes_on()


@pytest.mark.parametrize("st_placement", ["distributed", None])  # None makes them reference tables
def test_stream_tables_are_distributed_on_one_node(single: Shop, st_placement: str | None) -> None:
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


def test_queries_without_a_plan_are_refused_on_one_node_too(single: Shop) -> None:
    query = "SELECT id, v, rank() OVER (PARTITION BY id % 3 ORDER BY v DESC) AS place FROM t WHERE v > 900"
    with pytest.raises(NotDifferentiableError, match="window") as error:
        single.db.create_stream_table("places", query)
    assert "refresh_mode FULL" in str(error.value)
    made = single.db.create_stream_table("places", query, refresh_mode="FULL", st_placement="local")
    assert made.effective_mode == "FULL"
    single.queries["places"] = query
    single.change()
    assert single.refresh()["places"][0] == "FULL"


def test_one_node_is_not_cut_between_commits_over_several_connections(single: Shop) -> None:
    """Citus writes many shards of one node over separate connections, and commits one after the other."""
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
        "SELECT create_distributed_table_concurrently('loc', 'grp')",
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
    single.change()
    single.admin.execute("SELECT citus_drain_node(%s, %s, 'block_writes')", _coordinator(single))
    single.goes_on()
    assert ("coordinator", "public.t", "distributed", 0, 0) in single.conn.execute(STATUS.encode()).fetchall()
    _let_have_shards(single)
    for node in (1, 2):
        single.change()
        _move(single, _shard_on(single, node), node, 0)
        single.goes_on()


@pytest.fixture
def everywhere(shop: Shop) -> Shop:
    """A cluster of three nodes that all have shards, including the coordinator."""
    _let_have_shards(shop)
    shop.admin.execute("SELECT rebalance_table_shards('t', shard_transfer_mode := 'block_writes')")
    return shop


def _coordinator(shop: Shop) -> tuple[str, int]:
    return (HOST, shop.cluster.servers[0].port)


def _let_have_shards(shop: Shop) -> None:
    shop.admin.execute("SELECT citus_set_node_property(%s, %s, 'shouldhaveshards', true)", _coordinator(shop))


def _move(shop: Shop, shard: int, from_node: int, to_node: int) -> None:
    ports = [shop.cluster.servers[node].port for node in (from_node, to_node)]
    shop.admin.execute(
        "SELECT citus_move_shard_placement(%s, %s, %s, %s, %s, 'block_writes')", (shard, HOST, ports[0], HOST, ports[1])
    )
    shop.admin.execute("CALL citus_cleanup_orphaned_resources()")


def _shard_on(shop: Shop, node: int) -> int:
    row = shop.admin.execute(
        "SELECT min(shardid) FROM citus_shards WHERE table_name = 't'::regclass AND nodeport = %s",
        (shop.cluster.servers[node].port,),
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_a_coordinator_gets_shards_later(shop: Shop) -> None:
    shop.create("totals", "rows", "named", "local")
    shop.goes_on()
    _let_have_shards(shop)
    for node in (1, 2):
        shop.change()
        _move(shop, _shard_on(shop, node), node, 0)
        shop.conn.execute("UPDATE t SET v = v + 1")
        shop.goes_on()


def test_shards_that_visit_the_coordinator_between_two_refreshes(shop: Shop) -> None:
    shop.create("totals", "rows")
    _let_have_shards(shop)
    _move(shop, _shard_on(shop, 1), 1, 0)
    shop.conn.execute("UPDATE t SET v = v + 1")
    shop.admin.execute("SELECT citus_drain_node(%s, %s, 'block_writes')", _coordinator(shop))
    shop.goes_on()


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.long)])
def test_shards_that_leave_the_coordinator_while_it_is_read(everywhere: Shop, comes_back: bool, large: bool) -> None:
    """A shard that comes back is a new table, which the cut's snapshot does not see."""
    shop = everywhere
    if large:
        shop.db.engine.reading.large = 1
    shop.create("totals", "rows")
    shard = _shard_on(shop, 0)
    moved: list[int] = []

    def at(step: str) -> None:
        if step == "cut" and not moved:
            moved.append(shard)
            _move(shop, shard, 0, 1)
            if comes_back:
                _move(shop, shard, 1, 0)

    shop.change()
    shop.conn.execute("UPDATE pgtrickle.pgt_stream_tables SET reinit_reason = 'test'")
    shop.db.engine.on_step = at
    shop.refresh()
    assert moved
    shop.goes_on()


def test_changes_committed_while_nodes_are_polled(everywhere: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes reported no changes; then a transaction over all of them is visible on the coordinator."""
    everywhere.create("totals", "rows")
    everywhere.goes_on()
    everywhere.refresh()
    asked = RemoteCuts._has_news
    answers: list[bool] = []

    def look(self: RemoteCuts, *arguments: Any) -> bool:
        found = asked(self, *arguments)
        answers.append(found)
        if answers == [False, False]:
            with psycopg.connect(everywhere.cluster.dsn(), autocommit=True) as conn:
                conn.execute("UPDATE t SET v = v + 1")
        return found

    monkeypatch.setattr(RemoteCuts, "_has_news", look)
    monkeypatch.setattr(cuts, "AT_ONCE", 1)
    everywhere.refresh()
    assert answers[:2] == [False, False]
    everywhere.goes_on()


def test_a_table_is_re_created_before_its_query_is_compiled(single: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    single.create("totals", "local")
    single.conn.execute("SET citus.enable_unsafe_triggers = on")
    plan, steps = Planner.plan, ["SELECT undistribute_table('t')"]

    def meanwhile(self: Planner, tables: Sequence[Claimed], *others: Any) -> list[Planned]:
        if steps:
            single.conn.execute(steps.pop().encode())
            self.programs.plans.forget(tables[0].row.pgt_id)
        return plan(self, tables, *others)

    monkeypatch.setattr(Planner, "plan", meanwhile)
    single.change()
    ids = [single.db.stream_table(name).id for name in single.queries]
    outcome = single.db.engine.attempt(ids, "TEST")
    assert {type(error) for error in outcome.failures.values()} <= {SourceChangedError}
    assert ids[1] not in outcome.failures
    single.refresh()
    single.goes_on()


def test_queries_computed_by_the_coordinator_keep_no_changes(single: Shop) -> None:
    single.create("totals")
    single.db.create_stream_table("whole", QUERIES["whole"], refresh_mode="FULL", st_placement="local")
    single.db.alter_stream_table("whole", status="SUSPENDED")
    row = single.conn.execute(
        "SELECT buffer_relid::regclass::text FROM pgtrickle.pgt_change_tracking WHERE source_relid = 't'::regclass"
    ).fetchone()
    assert row is not None
    for _ in range(6):
        for _ in range(3):
            single.conn.execute("UPDATE t SET v = v + 1")
        single.db.refresh("totals")
    (kept,) = single.admin.execute(f"SELECT count(*) FROM {row[0]}".encode()).fetchone() or (0,)
    assert kept < 6 * 3 * 2000  # old and new rows; two tables are emptied in turn, when they have a megabyte
