"""Partitioned tables in a Citus cluster: each partition is a distributed table that can be written to directly."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg import sql

from pgtrickle.embedded.server import EmbeddedServer
from pgtrickle.errors import NotDifferentiableError
from tests.support.citus_shop import CAPTURED, Shop, citus_shop, needs_citus

pytestmark = needs_citus

EVENTS = {
    "per_day": "SELECT day, count(*) AS n, sum(v) AS total FROM ev GROUP BY day",
    "large": "SELECT tenant, day, id, v * 2 AS twice FROM ev WHERE v > 50",
    "named": "SELECT e.tenant, e.day, e.id, r.name FROM ev AS e JOIN ref AS r ON r.grp = e.day % 10",
    "latest": "SELECT tenant, max(day) AS day FROM ev GROUP BY tenant",
}
ROWS = (
    "INSERT INTO {} (tenant, day, id, v)"
    " SELECT i %% 23, %s::int + i %% %s::int, %s::int + i, i %% 100 FROM generate_series(1, %s::int) AS i"
)


def _table(shop: Shop, *, distribute: bool = True) -> None:
    """Create a table, one of whose partitions has its columns in another order."""
    shop.conn.execute(
        "CREATE TABLE ev (tenant int, day int, id int, v int, PRIMARY KEY (tenant, day, id)) PARTITION BY RANGE (day)"
    )
    shop.conn.execute("CREATE TABLE ev_1 PARTITION OF ev FOR VALUES FROM (0) TO (10)")
    shop.conn.execute("CREATE TABLE ev_2 (gone int, v int, id int NOT NULL, tenant int NOT NULL, day int NOT NULL)")
    shop.conn.execute("ALTER TABLE ev_2 DROP COLUMN gone")
    shop.conn.execute("ALTER TABLE ev ATTACH PARTITION ev_2 FOR VALUES FROM (10) TO (20)")
    if distribute:
        shop.conn.execute("SELECT create_distributed_table('ev', 'tenant')")
    _insert(shop, "ev", 0, 20, 0, 300)


def _insert(shop: Shop, table: str, day: int, days: int, id_: int, rows: int) -> None:
    shop.conn.execute(sql.SQL(ROWS).format(sql.Identifier(table)), (day, days, id_, rows))


@pytest.fixture
def events(shop: Shop) -> Shop:
    _table(shop)
    shop.define(EVENTS)
    shop.refresh()
    return shop


@pytest.fixture
def single(nodes: list[EmbeddedServer]) -> Iterator[Shop]:
    with citus_shop(nodes, workers=0) as made:
        _table(made)
        made.define(EVENTS)
        yield made


def _goes_on(shop: Shop) -> None:
    """Make changes through the parent, through partitions and between them, and assert that refreshes are differential."""
    shop.round += 1
    base = 1_000 * shop.round
    _insert(shop, "ev", 0, 20, base, 60)
    _insert(shop, "ev_1", 0, 10, base + 100, 30)
    with shop.conn.cursor() as cursor:
        for table in ("ev", "ev_2"):
            with cursor.copy(sql.SQL("COPY {} (tenant, day, id, v) FROM STDIN").format(sql.Identifier(table))) as copy:
                for i in range(20):
                    copy.write_row((i, 10 + i % 10, base + 200 + i + 50 * (table == "ev"), i * 7))
    shop.conn.execute("UPDATE ev SET v = v + 1 WHERE id %% 3 = %s", (shop.round % 3,))
    shop.conn.execute(
        "UPDATE ev SET day = 19 - day WHERE day < 20 AND id %% 5 = %s", (shop.round % 5,)
    )  # to another partition
    shop.conn.execute("UPDATE ev_2 SET v = v + 10 WHERE tenant < 7")
    shop.conn.execute("DELETE FROM ev WHERE tenant = %s", (shop.round,))
    shop.conn.execute("DELETE FROM ev_1 WHERE v = 3")
    for name, (action, reason) in shop.refresh().items():
        assert action == "DIFFERENTIAL", f"{name}: {reason}"
    assert {action for action, _ in shop.refresh().values()} == {"NO_DATA"}


def _start_over(shop: Shop) -> None:
    assert {action for action, _ in shop.refresh().values()} == {"REINITIALIZE"}
    _goes_on(shop)


def test_writers_of_the_table_and_of_its_partitions(events: Shop) -> None:
    for _ in range(2):
        _goes_on(events)
    with psycopg.connect(events.cluster.dsn(1), autocommit=True) as worker:
        worker.execute("INSERT INTO ev VALUES (3, 5, 90001, 70), (4, 15, 90002, 80)")
        worker.execute("INSERT INTO ev_1 VALUES (3, 6, 90003, 70)")
        worker.execute("UPDATE ev SET day = 12 WHERE day = 2")
        worker.execute("DELETE FROM ev_2 WHERE v < 10")
    assert "REINITIALIZE" not in {action for action, _ in events.refresh().values()}
    status = "SELECT node, shards, triggers_missing FROM pgtrickle.citus_status WHERE source = 'public.ev' ORDER BY 1"
    assert events.conn.execute(status.encode()).fetchall() == [
        ("@node_1", 6, 0),
        ("@node_2", 6, 0),
        ("coordinator", 0, 0),
    ]
    for name in EVENTS:
        events.db.drop_stream_table(name)
    events.assert_nothing_is_captured()


def test_partitions_come_and_go(events: Shop) -> None:
    events.conn.execute("CREATE TABLE ev_3 PARTITION OF ev FOR VALUES FROM (20) TO (30)")
    _insert(events, "ev_3", 20, 10, 50_000, 40)  # before anybody has seen it
    _insert(events, "ev", 20, 10, 51_000, 40)
    _start_over(events)
    _insert(events, "ev_3", 20, 10, 52_000, 40)
    assert "REINITIALIZE" not in {action for action, _ in events.refresh().values()}

    events.conn.execute("CREATE TABLE ev_4 (LIKE ev INCLUDING ALL)")
    events.conn.execute("SELECT create_distributed_table('ev_4', 'tenant')")
    _insert(events, "ev_4", 30, 10, 60_000, 40)
    events.conn.execute("ALTER TABLE ev ATTACH PARTITION ev_4 FOR VALUES FROM (30) TO (40)")
    _start_over(events)

    events.conn.execute("ALTER TABLE ev DETACH PARTITION ev_4")
    events.conn.execute("UPDATE ev_4 SET v = v + 1000")  # it still has triggers
    _start_over(events)
    events.conn.execute("DELETE FROM ev_4")
    assert {action for action, _ in events.refresh().values()} == {"NO_DATA"}

    events.conn.execute("DROP TABLE ev_3")
    _start_over(events)
    events.conn.execute("TRUNCATE ev_1")
    _start_over(events)
    events.conn.execute("TRUNCATE ev")
    assert {action for action, _ in events.refresh().values()} == {"REINITIALIZE"}


@pytest.mark.parametrize("level", [None, pytest.param(psycopg.IsolationLevel.REPEATABLE_READ, marks=pytest.mark.long)])
def test_triggers_that_a_detached_partition_keeps_do_nothing(
    events: Shop, level: psycopg.IsolationLevel | None
) -> None:
    """Only its owner could drop them. The same holds if it is a partition of another captured table."""
    events.admin.execute("CREATE ROLE other")
    with psycopg.connect(events.cluster.dsn()) as writer:
        writer.isolation_level = level
        events.conn.execute("ALTER TABLE ev DETACH PARTITION ev_2")
        writer.execute("SELECT 1")
        events.conn.execute("GRANT ALL ON ev_2 TO app")
        events.admin.execute("ALTER TABLE ev_2 OWNER TO other")
        events.admin.execute("GRANT ALL ON ev_2 TO app")
        events.refresh()
        with psycopg.connect(events.cluster.superuser_dsn(1)) as worker:
            worker.execute("SET citus.override_table_visibility = off")
            kept = worker.execute(CAPTURED + " AND tgrelid::regclass::text LIKE 'ev_2_1%'").fetchone()
            assert kept is not None
            assert kept[0] > 0
        writer.execute("UPDATE ev_2 SET v = v + 1000")
        writer.commit()
        assert {action for action, _ in events.refresh().values()} == {"NO_DATA"}
        events.admin.execute("CREATE TABLE past (LIKE ev INCLUDING ALL) PARTITION BY RANGE (day)")
        events.admin.execute("SELECT create_distributed_table('past', 'tenant')")
        events.admin.execute("ALTER TABLE past ATTACH PARTITION ev_2 FOR VALUES FROM (10) TO (20)")
        writer.execute("UPDATE ev_2 SET v = v + 1000")
        writer.commit()
        # An old snapshot need not show all triggers, so it cannot tell.
        expected = "NO_DATA" if level is None else "REINITIALIZE"
        assert {action for action, _ in events.refresh().values()} == {expected}
        events.admin.execute("DROP TABLE past CASCADE")
        events.admin.execute("DROP ROLE other")


def _plan_moves(shop: Shop) -> str:
    """A MERGE that moves rows from one partition to the other."""
    shop.conn.execute("CREATE TABLE moves (tenant int, id int, day int)")
    shop.conn.execute("SELECT create_distributed_table('moves', 'tenant', colocate_with => 'ev')")
    shop.conn.execute("INSERT INTO moves SELECT tenant, id, 19 - day FROM ev WHERE id % 4 = 0")
    on = "m.tenant = ev.tenant AND m.id = ev.id"
    return f"MERGE INTO ev USING moves AS m ON {on} WHEN MATCHED THEN UPDATE SET day = m.day"


def test_a_merge_between_partitions_is_noticed(events: Shop) -> None:
    events.conn.execute(_plan_moves(events).encode())
    done = events.refresh()
    assert {action for action, _ in done.values()} == {"REINITIALIZE"}
    assert "a MERGE moved rows" in str(done["per_day"][1])
    _goes_on(events)


def test_shards_of_partitions_move_with_their_table(events: Shop) -> None:
    events.cluster.add(3)
    events.admin.execute("SELECT replicate_reference_tables('block_writes')")
    _goes_on(events)
    shards = events.admin.execute(
        "SELECT shardid, nodename, nodeport FROM citus_shards WHERE table_name = 'ev'::regclass ORDER BY 1"
    ).fetchall()
    move = "SELECT citus_move_shard_placement(%s, %s, %s, %s, %s, %s)"
    for number, (shard, host, port) in enumerate(shards[:2]):
        there = "127.0.0.1", events.cluster.servers[3].port
        events.admin.execute(move, (shard, host, port, *there, "block_writes" if number % 2 else "force_logical"))
        _goes_on(events)
    events.admin.execute("SELECT rebalance_table_shards('ev', shard_transfer_mode => 'block_writes')")
    _goes_on(events)


def test_a_partitioned_table_is_distributed_and_back(shop: Shop) -> None:
    _table(shop, distribute=False)
    shop.define(EVENTS)
    _goes_on(shop)
    shop.conn.execute("SET citus.enable_unsafe_triggers = on")
    shop.conn.execute("SELECT create_distributed_table('ev', 'tenant')")
    _insert(shop, "ev_2", 10, 10, 70_000, 30)
    _start_over(shop)
    shop.conn.execute("SELECT alter_distributed_table('ev', shard_count => 6, cascade_to_colocated => false)")
    _insert(shop, "ev", 0, 20, 71_000, 30)
    _start_over(shop)
    shop.conn.execute("SELECT undistribute_table('ev')")
    _insert(shop, "ev_1", 0, 10, 72_000, 30)
    _start_over(shop)


def test_a_partitioned_table_on_one_node(single: Shop) -> None:
    _goes_on(single)
    single.conn.execute("CREATE TABLE ev_3 PARTITION OF ev FOR VALUES FROM (20) TO (30)")
    _insert(single, "ev_3", 20, 10, 50_000, 40)
    _start_over(single)
    single.conn.execute("ALTER TABLE ev DETACH PARTITION ev_1")
    single.conn.execute("UPDATE ev_1 SET v = v + 1000")
    assert {action for action, _ in single.refresh().values()} == {"REINITIALIZE"}
    single.conn.execute("DELETE FROM ev_1")
    assert {action for action, _ in single.refresh().values()} == {"NO_DATA"}


def _columnar(shop: Shop) -> None:
    if shop.admin.execute("SELECT FROM pg_available_extensions WHERE name = 'citus_columnar'").fetchone() is None:
        pytest.skip("this Citus has no columnar storage")
    shop.admin.execute("CREATE EXTENSION IF NOT EXISTS citus_columnar")
    shop.admin.execute("CREATE TABLE ev_3 (LIKE ev) USING columnar")
    shop.admin.execute("ALTER TABLE ev_3 OWNER TO app")
    shop.conn.execute("ALTER TABLE ev ATTACH PARTITION ev_3 FOR VALUES FROM (20) TO (30)")


@pytest.mark.parametrize(
    ("prepare", "query", "reason"),
    [
        (
            lambda _: None,
            "SELECT tenant FROM ev_1",
            r"public\.ev_1 cannot be captured: it is a partition of public\.ev,",
        ),
        (
            _columnar,
            "SELECT tenant FROM ev",
            r"public\.ev cannot be captured: its partition public\.ev_3 has columnar storage",
        ),
    ],
    ids=["a partition alone", "a columnar partition"],
)
def test_tables_that_cannot_be_captured_are_refused(
    shop: Shop, prepare: Callable[[Shop], None], query: str, reason: str
) -> None:
    _table(shop)
    prepare(shop)
    with pytest.raises(NotDifferentiableError, match=reason):
        shop.db.create_stream_table("refused", query)


def test_a_source_that_becomes_a_partition_is_noticed(events: Shop) -> None:
    events.conn.execute("CREATE TABLE ev_3 (LIKE ev INCLUDING ALL)")
    events.conn.execute("SELECT create_distributed_table('ev_3', 'tenant')")
    events.db.create_stream_table("alone", "SELECT tenant, day, id FROM ev_3", st_placement="local")
    events.conn.execute("ALTER TABLE ev ATTACH PARTITION ev_3 FOR VALUES FROM (20) TO (30)")
    _insert(events, "ev", 20, 10, 50_000, 40)
    with pytest.raises(Exception, match=r"partition of public\.ev"):
        events.db.refresh("alone")
    _start_over(events)


@pytest.mark.parametrize(
    "end", ["DROP TABLE ev_3", pytest.param("ALTER TABLE ev DETACH PARTITION ev_3", marks=pytest.mark.long)]
)
def test_a_partition_that_comes_and_goes_between_refreshes(events: Shop, end: str) -> None:
    """A session with cached plans continues writing when the next partition is captured."""
    _goes_on(events)
    for number in range(2):
        events.conn.execute("CREATE TABLE ev_3 PARTITION OF ev FOR VALUES FROM (20) TO (30)")
        _insert(events, "ev", 20, 10, 50_000, 40)
        events.conn.execute("UPDATE ev SET day = 25 WHERE id = 7")
        if number:
            _start_over(events)
        events.conn.execute(end.encode())
        _start_over(events)
        events.conn.execute("DROP TABLE IF EXISTS ev_3")


@pytest.mark.long
def test_a_merge_in_a_function_that_is_called_update(single: Shop) -> None:
    merge = _plan_moves(single)
    single.conn.execute(f"CREATE FUNCTION update_ev() RETURNS void LANGUAGE sql AS '{merge}'".encode())
    single.refresh()
    single.conn.execute("SELECT update_ev()")
    assert {action for action, _ in single.refresh().values()} == {"REINITIALIZE"}


UNSEEN = {
    "trigger off and on": (
        "ALTER TABLE ev DISABLE TRIGGER USER",
        "UPDATE ev SET v = v + 1",
        "ALTER TABLE ev ENABLE TRIGGER USER",
    ),
    "generated otherwise": ("ALTER TABLE ev ALTER COLUMN g SET EXPRESSION AS (v * 5)",),
    "names swapped": (
        "ALTER TABLE ev RENAME v TO was_v",
        "ALTER TABLE ev RENAME w TO v",
        "ALTER TABLE ev RENAME was_v TO w",
        "INSERT INTO ev (tenant, day, id, v, w) VALUES (5, 5, 77777, 1, 2)",
    ),
}


@pytest.mark.parametrize(
    ("case", "distribute"),
    [  # distributed, Citus refuses the first
        ("generated otherwise", False),
        pytest.param("trigger off and on", False, marks=pytest.mark.long),
        ("trigger off and on", True),
        pytest.param("names swapped", False, marks=pytest.mark.long),
        ("names swapped", True),
    ],
)
def test_changes_that_no_trigger_sees_are_noticed(shop: Shop, case: str, distribute: bool) -> None:
    _table(shop, distribute=distribute)
    shop.conn.execute("ALTER TABLE ev ADD COLUMN w int DEFAULT 3")
    if not distribute:
        shop.conn.execute("ALTER TABLE ev ADD COLUMN g int GENERATED ALWAYS AS (v * 2) STORED")
    shop.conn.execute("SET citus.enable_unsafe_triggers = on")
    columns = "tenant, day, id, v, w" + ("" if distribute else ", g")
    shop.define({"all_of_it": f"SELECT {columns} FROM ev", "few": "SELECT day, count(*) AS n FROM ev GROUP BY day"})
    shop.refresh()
    for statement in UNSEEN[case]:
        shop.conn.execute(statement.encode())
    if case == "names swapped":
        shop.queries["all_of_it"] = shop.queries["all_of_it"].replace("v, w", "w AS v, v AS w")
    assert {action for action, _ in shop.refresh().values()} == {"REINITIALIZE"}
    shop.conn.execute("UPDATE ev SET v = v + 1, day = 3 WHERE tenant = 5")
    assert {action for action, _ in shop.refresh().values()} == {"DIFFERENTIAL"}


def test_a_local_table_that_was_a_partition_for_a_while(shop: Shop) -> None:
    _table(shop, distribute=False)
    shop.define(EVENTS)
    shop.conn.execute("CREATE TABLE top (LIKE ev) PARTITION BY RANGE (tenant)")
    shop.conn.execute("ALTER TABLE top ATTACH PARTITION ev FOR VALUES FROM (0) TO (100)")
    shop.conn.execute("INSERT INTO top SELECT 5, 5, 88_000 + i, i FROM generate_series(1, 9) AS i")
    shop.refresh()
    shop.conn.execute("ALTER TABLE top DETACH PARTITION ev")
    _insert(shop, "ev", 0, 20, 50_000, 40)
    _start_over(shop)
