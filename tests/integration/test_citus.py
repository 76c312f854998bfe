"""Distributed, reference and local tables of a Citus cluster as sources: exact cuts over all nodes."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

import pgtrickle
from pgtrickle.cli.findings import find_problems
from pgtrickle.embedded.server import HOST, EmbeddedServer
from pgtrickle.engine import apply
from pgtrickle.errors import (
    DatabaseFailedError,
    InvalidQueryError,
    NotDifferentiableError,
    PrivilegeError,
    SourceLockedError,
)
from tests.support.citus import Cluster, citus_binaries, cluster
from tests.support.oracle import assert_equal_to_query

pytestmark = pytest.mark.skipif(
    citus_binaries() is None,
    reason="no Citus for PostgreSQL 18 in ~/.pgtrickle/citus, nor where PGTRICKLE_CITUS points",
)

QUERIES = {
    "totals": "SELECT grp, count(*) AS n, sum(v) AS total FROM t GROUP BY grp",
    "rows": "SELECT id, v * 2 AS twice FROM t WHERE v > 500",
    "named": "SELECT t.id, r.name, t.v FROM t JOIN loc AS r USING (grp)",
    "mixed": "SELECT t.id, r.name AS region, l.name FROM t JOIN ref AS r USING (grp) LEFT JOIN loc AS l USING (grp)",
    "doubled": "SELECT grp, v % 5 AS rest FROM t",
    "whole": "SELECT count(*) AS n, min(v) AS least, max(v) AS most FROM t",
    "local": "SELECT grp, upper(name) AS name FROM loc",
    "referenced": "SELECT count(*) AS n, max(name) AS last FROM ref",
}
CAPTURED = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'pgtrickle\\_capture%'"
BUFFERS = (
    "SELECT count(*) FROM pg_class WHERE relnamespace = 'pgtrickle_changes'::regnamespace AND relname LIKE 'changes%'"
)


@dataclass
class Shop:
    """A cluster with a distributed, a reference and a local table, and stream tables on them."""

    cluster: Cluster
    db: pgtrickle.Database
    conn: psycopg.Connection[Any]
    admin: psycopg.Connection[Any]
    queries: dict[str, str] = field(default_factory=dict)
    round: int = 0

    def create(self, *names: str, st_placement: str | None = "local") -> None:
        for name in names:
            made = self.db.create_stream_table(name, QUERIES[name], st_placement=st_placement)
            assert made.effective_mode == "DIFFERENTIAL"
            self.queries[name] = QUERIES[name]

    def placement(self, name: str) -> tuple[Any, ...] | None:
        """Of a stream table: as the catalog has it, and as Citus has it."""
        return self.conn.execute(
            "SELECT st_placement, pgtrickle._citus_placement(pgt_relid) FROM pgtrickle.pgt_stream_tables WHERE pgt_name = %s",
            (name,),
        ).fetchone()

    def change(self) -> None:
        self.round += 1
        i = self.round
        self.conn.execute(f"UPDATE t SET v = v + 1 WHERE id % 7 = {i % 7}".encode())
        self.conn.execute(
            f"INSERT INTO t SELECT 2000 + {i} * 100 + k, k % 10, k * 10 FROM generate_series(1, 50) AS k".encode()
        )
        self.conn.execute("DELETE FROM t WHERE id = %s", (i + 5,))
        self.conn.execute("UPDATE loc SET name = name || 'x' WHERE grp = %s", (i % 10,))
        with psycopg.connect(self.cluster.dsn(1), autocommit=True) as worker:
            if worker.execute("SELECT to_regclass('t')").fetchone() == (None,):
                return  # it is not distributed now
            worker.execute("UPDATE t SET grp = %s WHERE id BETWEEN 100 AND 120", (i % 10,))
            worker.execute("INSERT INTO t VALUES (%s, 1, 700)", (90_000 + i,))

    def refresh(self) -> dict[str, tuple[str, str | None]]:
        """Refresh all, compare all, and tell what was done."""
        done = self.db.refresh(list(self.queries))
        for name, query in self.queries.items():
            assert_equal_to_query(self.conn, name, query)
        return {name: (result.action, result.reason) for name, result in zip(self.queries, done, strict=True)}

    def goes_on(self) -> None:
        """What follows is a change again, not everything."""
        self.change()
        for name, (action, reason) in self.refresh().items():
            assert action in ("DIFFERENTIAL", "NO_DATA"), f"{name}: {reason}"


@pytest.fixture
def shop(nodes: list[EmbeddedServer]) -> Iterator[Shop]:
    with (
        cluster(nodes) as made,
        psycopg.connect(made.dsn(), autocommit=True) as conn,
        psycopg.connect(made.superuser_dsn(), autocommit=True) as admin,
        pgtrickle.connect(made.dsn()) as db,
    ):
        conn.execute("SET citus.enable_repartition_joins = on")  # for the comparison
        conn.execute("CREATE TABLE t (id int PRIMARY KEY, grp int, v int)")
        conn.execute("SELECT create_distributed_table('t', 'id')")
        conn.execute("INSERT INTO t SELECT i, i % 10, i FROM generate_series(1, 1000) AS i")
        conn.execute("CREATE TABLE ref (grp int PRIMARY KEY, name text)")
        conn.execute("SELECT create_reference_table('ref')")
        conn.execute("INSERT INTO ref SELECT i, 'r' || i FROM generate_series(0, 9) AS i")
        conn.execute("CREATE TABLE loc (grp int PRIMARY KEY, name text)")
        conn.execute("INSERT INTO loc SELECT i, 'g' || i FROM generate_series(0, 9) AS i")
        db.install()
        yield Shop(made, db, conn, admin)


def test_sources_of_every_placement(shop: Shop) -> None:
    shop.create(*QUERIES)
    assert shop.db.stream_table("rows").key == ("id",)
    shop.refresh()
    for number in range(3):
        shop.conn.execute("UPDATE ref SET name = name || 'y' WHERE grp = %s", (number,))
        shop.goes_on()
    assert {action for action, _ in shop.refresh().values()} == {"NO_DATA"}
    placements = shop.conn.execute(
        "SELECT DISTINCT source_placement FROM pgtrickle.pgt_dependencies ORDER BY 1"
    ).fetchall()
    assert placements == [("distributed",), ("local",), ("reference",)]


def test_tables_of_one_shard_and_of_the_coordinator_alone(shop: Shop) -> None:
    for name in ("single", "here"):
        shop.conn.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v int)".encode())
        shop.conn.execute(f"INSERT INTO {name} SELECT i, i FROM generate_series(1, 50) AS i".encode())
    shop.conn.execute("SELECT create_distributed_table('single', NULL)")
    shop.admin.execute("SELECT citus_add_local_table_to_metadata('here')")
    shop.queries = {
        "singles": "SELECT v % 3 AS rest, count(*) AS n FROM single GROUP BY 1",
        "heres": "SELECT id, v + 1 AS next FROM here",
        "all_three": "SELECT t.id, s.v AS s, h.v AS h FROM t JOIN single s USING (id) LEFT JOIN here h USING (id)",
    }
    for name, query in shop.queries.items():
        shop.db.create_stream_table(name, query, st_placement="local")
    with pytest.raises(InvalidQueryError, match="complex joins"):  # by Citus, if it had to compute it
        shop.db.create_stream_table("whole", shop.queries["all_three"], refresh_mode="FULL", st_placement="local")
    apart = "WITH single AS MATERIALIZED (SELECT * FROM single), here AS MATERIALIZED (SELECT * FROM here) "
    shop.queries["all_three"] = apart + shop.queries["all_three"]
    for i in range(3):
        for node in (0, 1):
            with psycopg.connect(shop.cluster.dsn(node), autocommit=True) as conn:
                conn.execute("UPDATE single SET v = v + 1 WHERE id %% 7 = %s", (i,))
                conn.execute("DELETE FROM here WHERE id = %s", (10 * node + i,))
                conn.execute("INSERT INTO single VALUES (%s, 1)", (100 + 10 * node + i,))
        shop.goes_on()
    placements = shop.conn.execute(
        "SELECT DISTINCT source_placement FROM pgtrickle.pgt_dependencies ORDER BY 1"
    ).fetchall()
    assert placements == [("citus_local",), ("distributed",), ("single_shard",)]
    shop.conn.execute("TRUNCATE single")
    assert shop.refresh()["singles"][0] == "REINITIALIZE"


def test_lookups_go_to_the_shards_that_can_have_the_rows(shop: Shop) -> None:
    shop.conn.execute("CREATE TABLE named (name text, v int, PRIMARY KEY (name))")
    shop.conn.execute("SELECT create_distributed_table('named', 'name')")
    shop.conn.execute("INSERT INTO named SELECT 'n' || i, i FROM generate_series(1, 300) AS i")
    shop.conn.execute("CREATE TABLE picks (id int PRIMARY KEY, name text)")
    shop.conn.execute("INSERT INTO picks SELECT i, 'n' || i FROM generate_series(1, 300) AS i")
    shop.queries = {
        "picked": "SELECT p.id, p.name, t.v FROM picks p LEFT JOIN t USING (id)",
        "picked_names": "SELECT p.id, n.v FROM picks p JOIN named n USING (name)",
    }
    for name, query in shop.queries.items():
        shop.db.create_stream_table(name, query, st_placement="local")
    for i in (5, 17, 250, 299):
        shop.conn.execute("UPDATE picks SET name = 'n' || %s WHERE id = %s", (i + 1, i))
        shop.db.engine.statements.clear()
        shop.refresh()
        read = set(re.findall(r"FROM public\.((?:t|named)_\d+)", " ".join(shop.db.engine.statements)))
        wanted = shop.conn.execute(
            "SELECT 't_' || get_shard_id_for_distribution_column('t', %s)"
            " UNION SELECT 'named_' || get_shard_id_for_distribution_column('named', 'n' || n) FROM unnest(%s::int[]) n",
            (i, [i, i + 1]),
        ).fetchall()
        assert {name for (name,) in wanted} <= read
        assert (
            len([name for name in read if name.startswith("t_")]) <= 2
        )  # on each node one, for its columns if not its rows
        shop.conn.execute("UPDATE t SET v = -v WHERE id BETWEEN %s AND %s", (i - 2, i + 2))
        shop.conn.execute("UPDATE named SET v = -v WHERE name = ANY (%s)", ([f"n{i}", f"n{i + 1}"],))
        shop.conn.execute("DELETE FROM picks WHERE id = %s", (i + 1,))
        shop.refresh()


def test_lookups_by_keys_that_nodes_would_read_otherwise(shop: Shop) -> None:
    """Labels of an enum have another number, and so another hash, on every node; dates another text under other settings."""
    shop.conn.execute("CREATE TYPE mood AS ENUM ('a', 'b', 'c', 'd', 'e', 'f')")
    for name, type_ in (("moods", "mood"), ("days", "date")):
        shop.conn.execute(f"CREATE TABLE {name} (k {type_} PRIMARY KEY, v int)".encode())
        shop.conn.execute(f"SELECT create_distributed_table('{name}', 'k')".encode())
        shop.conn.execute(f"CREATE TABLE of_{name} (id int PRIMARY KEY, k {type_})".encode())
    shop.conn.execute("INSERT INTO moods SELECT m, 1 FROM unnest(enum_range(NULL::mood)) AS m")
    shop.conn.execute("INSERT INTO days SELECT DATE '2024-01-01' + i, i FROM generate_series(0, 365) AS i")
    shop.queries = {
        "by_mood": "SELECT p.id, t.v FROM of_moods p LEFT JOIN moods t USING (k)",
        "by_day": "SELECT p.id, t.v FROM of_days p LEFT JOIN days t USING (k)",
    }
    with psycopg.connect(shop.cluster.dsn(), autocommit=True) as plain:
        plain.execute("SET datestyle = 'SQL, DMY'")
        for name, query in shop.queries.items():
            plain.execute("SELECT pgtrickle.create_stream_table(%s, %s, st_placement => 'local')", (name, query))
    shop.refresh()
    shop.conn.execute("INSERT INTO of_moods SELECT row_number() OVER (), m FROM unnest(enum_range(NULL::mood)) AS m")
    shop.conn.execute("INSERT INTO of_days SELECT i, DATE '2024-03-05' + 17 * i FROM generate_series(0, 17) AS i")
    assert {action for action, _ in shop.refresh().values()} == {"DIFFERENTIAL"}


def test_other_schemas_and_names_that_need_quotes(shop: Shop) -> None:
    shop.conn.execute('CREATE SCHEMA "Sales-EU"')
    table = '"Sales-EU"."Or""ders %s"'
    shop.conn.execute(f'CREATE TABLE {table} ("Id" int PRIMARY KEY, "we%ird ""x" text, v int)'.encode())
    shop.conn.execute("SELECT create_distributed_table(%s, 'Id')", (table,))
    shop.conn.execute(f"INSERT INTO {table} SELECT i, 'n' || i, i FROM generate_series(1, 100) AS i".encode())
    shop.queries = {
        "odd": f'SELECT o."Id", o."we%ird ""x" AS name, l.name AS region FROM {table} o LEFT JOIN loc l ON l.grp = o."Id"',
        "odds": f"SELECT v % 3 AS rest, count(*) AS n FROM {table} GROUP BY 1",
    }
    for name, query in shop.queries.items():
        shop.db.create_stream_table(name, query)
    for i in range(2):
        shop.conn.execute(f'UPDATE {table} SET v = v + 1 WHERE "Id" BETWEEN {i} AND {i + 20}'.encode())
        shop.conn.execute(f'DELETE FROM {table} WHERE "Id" = {50 + i}'.encode())
        shop.goes_on()


def test_joins_that_citus_would_not_plan(shop: Shop) -> None:
    query = "SELECT a.id, b.id AS other FROM t a JOIN t b ON a.v = b.grp WHERE a.id < 50"  # a repartition join
    shop.db.create_stream_table("pairs", query, st_placement="local")
    shop.queries["pairs"] = query
    shop.goes_on()
    with (
        psycopg.connect(shop.cluster.dsn(), autocommit=True) as plain,
        pytest.raises(psycopg.errors.FeatureNotSupported, match="FULL JOIN"),
    ):
        plain.execute(
            "SELECT pgtrickle.create_stream_table('no', 'SELECT a.name FROM loc a FULL JOIN loc b ON a.grp < b.grp')"
        )


def test_writers_on_a_node_without_a_catalog(shop: Shop) -> None:
    """Citus copies triggers and their functions there, and nothing else of ours."""
    shop.create("referenced", "totals")
    shop.cluster.add(3)
    shop.admin.execute("SELECT replicate_reference_tables('block_writes')")
    shop.conn.execute("UPDATE ref SET name = 'new' WHERE grp < 5")
    shop.conn.execute("DELETE FROM ref WHERE grp = 9")
    with psycopg.connect(shop.cluster.superuser_dsn(3)) as node:
        assert node.execute("SELECT to_regnamespace('pgtrickle')").fetchone() == (None,)
    shop.goes_on()


def test_the_rest_of_a_transaction_is_left_as_it_was(shop: Shop) -> None:
    """Nodes wait for locks as long as they did before our DDL was sent to them."""
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
        """Once somebody has waited longer than we would."""
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


def test_functions_are_called_by_those_who_may(shop: Shop) -> None:
    """Expressions are evaluated on the nodes by the service's login: the rights of who creates are looked at before."""
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


def test_truncate_starts_over(shop: Shop) -> None:
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


def test_a_local_table_is_distributed_and_back(shop: Shop) -> None:
    shop.create("named", "local", "totals")
    shop.conn.execute("SET citus.enable_unsafe_triggers = on")
    steps = [
        "SELECT create_distributed_table('loc', 'grp')",
        "SELECT undistribute_table('loc')",
        "SELECT create_reference_table('loc')",
        "SELECT undistribute_table('loc')",
        "SELECT undistribute_table('t')",
        "SELECT create_distributed_table('t', 'id')",
        "SELECT alter_distributed_table('t', shard_count := 6)",
    ]
    for step in steps:
        shop.change()
        shop.conn.execute(step.encode())
        shop.change()
        shop.refresh()
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
    """Capture looks at columns when a statement is planned, not when it runs: an ALTER must have it planned anew."""
    shop.conn.execute("ALTER TABLE t ADD COLUMN w int DEFAULT 7, ADD COLUMN note text")
    query = "SELECT id, {} AS value FROM t"
    ids = count(70_000)

    def write() -> None:
        """All shards have seen each kind of statement often, by this session and one on a worker."""
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
    for node in range(3):
        with psycopg.connect(shop.cluster.superuser_dsn(node), autocommit=True) as conn:
            conn.execute("SET citus.override_table_visibility = off")
            assert conn.execute(CAPTURED).fetchone() == (0,), f"node {node}"
            assert conn.execute(BUFFERS).fetchone() == (0,), f"node {node}"
    assert shop.conn.execute("SELECT count(*) FROM t").fetchone() != (0,)


def test_nobody_waits_for_ever_for_a_transaction_on_a_worker(shop: Shop) -> None:
    shop.conn.execute("SELECT pgtrickle.set('lock_timeout_ms', '300')")
    shop.db.conn.execute("SET statement_timeout = '60s'")
    with psycopg.connect(shop.cluster.dsn(1)) as writer:
        writer.execute("UPDATE t SET v = v + 1 WHERE id < 100")
        with pytest.raises(psycopg.errors.LockNotAvailable, match="held by a transaction on another node"):
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


def test_a_placed_stream_table_waits_for_what_a_crash_left(shop: Shop) -> None:
    """Its own apply may be what was left; and it reads no node whose cut would notice."""
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


def test_what_cannot_be_captured_is_refused(shop: Shop) -> None:
    shop.conn.execute("CREATE TABLE parted (id int, at date) PARTITION BY RANGE (at)")
    shop.conn.execute("CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')")
    shop.conn.execute("SELECT create_distributed_table('parted', 'id')")
    with pytest.raises(NotDifferentiableError, match=r"parted cannot be captured: it is partitioned"):
        shop.db.create_stream_table("parts", "SELECT id FROM parted")


def test_uninstall_leaves_nothing_on_any_node(shop: Shop) -> None:
    shop.create("totals", "rows", st_placement="distributed")
    shop.create("local", "referenced")
    shop.db.uninstall(drop_tables=True)
    assert shop.conn.execute("SELECT count(*) FROM t").fetchone() == (1000,)
    shop.conn.execute("INSERT INTO t SELECT i, 1, 1 FROM generate_series(2001, 2100) AS i")
    shop.conn.execute("UPDATE loc SET name = 'x'")
    tables = shop.conn.execute("SELECT table_name::text FROM citus_tables ORDER BY 1").fetchall()
    assert tables == [("ref",), ("t",)]
    for node in range(3):
        with psycopg.connect(shop.cluster.superuser_dsn(node), autocommit=True) as conn:
            conn.execute("SET citus.override_table_visibility = off")
            assert conn.execute(CAPTURED).fetchone() == (0,), f"node {node}"
            left = conn.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'pgtrickle%'").fetchall()
            assert left == [], f"node {node}"
    shop.queries.clear()
    shop.db.install()
    shop.create("totals")
    shop.goes_on()


def test_status_tells_of_nodes_and_what_is_captured_there(shop: Shop) -> None:
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


def test_large_tables_are_read_shard_by_shard(shop: Shop) -> None:
    shop.db.engine.reading.large = 1 << 18
    shop.conn.execute("INSERT INTO t SELECT i, i % 10, i % 1000 FROM generate_series(200000, 240000) AS i")
    shop.create("totals", "rows", "named", st_placement="distributed")
    shards = {text.split("t_1")[1][:5] for text in shop.db.engine.statements if "t_1" in text}
    assert len(shards) == 4, shop.db.engine.statements
    shop.conn.execute("UPDATE t SET v = v + 1 WHERE id > 210000")
    shop.refresh()
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


def test_without_the_right_to_cut_all_nodes_it_says_which(shop: Shop) -> None:
    with psycopg.connect(shop.cluster.superuser_dsn(2), autocommit=True) as worker:
        worker.execute("REVOKE UPDATE ON pg_catalog.pg_dist_transaction FROM app")
    with pytest.raises(PrivilegeError, match="@node_2") as error:
        shop.create("totals")
    assert "GRANT UPDATE ON pg_catalog.pg_dist_transaction TO app" in str(error.value)


@pytest.mark.parametrize("st_placement", ["reference", "distributed"])
def test_stream_tables_are_placed_as_they_are_asked_for(shop: Shop, st_placement: str) -> None:
    shop.create(*QUERIES, st_placement=st_placement)
    for name in QUERIES:
        assert shop.placement(name) == (st_placement, st_placement)
    assert shop.db.stream_table("totals").key == ("grp",)
    shop.refresh()
    for _ in range(3):
        shop.goes_on()
    shop.conn.execute("DELETE FROM t WHERE grp = 3")
    shop.conn.execute("UPDATE t SET v = 7 WHERE id % 3 = 0")  # rows of which there are many copies
    shop.goes_on()
    shop.conn.execute("TRUNCATE t")
    done = shop.refresh()
    assert {done[name][0] for name in ("totals", "rows", "doubled", "whole")} == {"REINITIALIZE"}
    shop.conn.execute("INSERT INTO t SELECT i, i % 10, i FROM generate_series(1, 100) AS i")
    shop.goes_on()
    shards = shop.conn.execute("SELECT count(*) FROM citus_tables").fetchone()
    for name in QUERIES:
        shop.db.drop_stream_table(name)
    assert shards is not None
    assert shop.conn.execute("SELECT count(*) FROM citus_tables").fetchone() == (shards[0] - len(QUERIES),)


def test_small_results_are_on_all_nodes_and_large_ones_distributed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "LARGE_ROWS", 501)
    shop.create("totals", "rows", "doubled", "local", "referenced", "mixed", st_placement=None)
    assert shop.placement("totals") == ("reference", "reference")
    assert shop.placement("doubled") == ("distributed", "distributed")
    assert shop.placement("rows") == ("reference", "reference")
    assert shop.placement("mixed") == ("distributed", "distributed")
    assert shop.placement("local") == ("local", "local")
    assert shop.placement("referenced") == ("local", "local")
    for _ in range(2):
        shop.goes_on()


def test_a_stream_table_beside_the_rows_that_it_is_joined_with(shop: Shop) -> None:
    query = "SELECT id, grp, v * 2 AS twice FROM t"
    shop.db.create_stream_table("beside", query, output_distribution_column="id")
    shop.queries["beside"] = query
    by_group = "SELECT grp, id, v FROM t WHERE v > 100"
    shop.db.create_stream_table("by_group", by_group, output_distribution_column="grp")
    shop.queries["by_group"] = by_group
    for _ in range(3):
        shop.goes_on()
    together = "SELECT count(DISTINCT colocationid) FROM pg_dist_partition WHERE logicalrelid = ANY (%s::regclass[])"
    assert shop.conn.execute(together, (["t", "beside"],)).fetchone() == (1,)
    with pytest.raises(InvalidQueryError, match="not a column of the query"):
        shop.db.create_stream_table("nowhere", query, output_distribution_column="nothing")


def test_stream_tables_on_stream_tables_of_the_cluster(shop: Shop) -> None:
    shop.create("rows", st_placement="distributed")
    above = "SELECT twice % 10 AS last, count(*) AS n FROM rows GROUP BY twice % 10"
    shop.db.create_stream_table("above", above, st_placement="reference")
    shop.queries["above"] = above
    for _ in range(3):
        shop.goes_on()


def test_set_up_that_fails_on_a_node_leaves_nothing_and_can_be_repeated(shop: Shop) -> None:
    shop.cluster.servers[2].kill()
    with pytest.raises(DatabaseFailedError, match="@node_2"):
        shop.create("totals")
    assert shop.db.stream_tables() == []
    shop.cluster.servers[2].start()
    for node in range(3):
        with psycopg.connect(shop.cluster.superuser_dsn(node), autocommit=True) as conn:
            conn.execute("SET citus.override_table_visibility = off")
            assert conn.execute(CAPTURED).fetchone() == (0,), f"node {node}"
            if conn.execute("SELECT to_regnamespace('pgtrickle_changes') IS NOT NULL").fetchone() == (True,):
                assert conn.execute(BUFFERS).fetchone() == (0,), f"node {node}"
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


def test_sql_creates_stream_tables_over_distributed_tables(shop: Shop) -> None:
    with psycopg.connect(shop.cluster.dsn(), autocommit=True) as plain:  # with Citus's own settings
        plain.execute("SELECT pgtrickle.create_stream_table('totals', %s)", (QUERIES["totals"],))
    shop.queries["totals"] = QUERIES["totals"]
    shop.refresh()
    shop.goes_on()
    views = "SELECT count(*) FROM pg_views WHERE schemaname = 'pgtrickle_views'"
    with psycopg.connect(shop.cluster.superuser_dsn(1)) as worker:
        assert worker.execute(views).fetchone() == (0,)


def test_the_coordinator_computes_what_has_no_plan(shop: Shop) -> None:
    query = "SELECT id, v, rank() OVER (PARTITION BY id % 3 ORDER BY v DESC) AS place FROM t WHERE v > 900"
    with pytest.raises(NotDifferentiableError, match="window") as error:
        shop.db.create_stream_table("places", query)
    assert "refresh_mode FULL" in str(error.value)
    made = shop.db.create_stream_table("places", query, refresh_mode="FULL", st_placement="local")
    assert made.effective_mode == "FULL"
    assert made.mode_reason is not None
    shop.queries["places"] = query
    shop.create("totals")
    for _ in range(2):
        shop.change()
        assert shop.refresh()["places"][0] == "FULL"
    shop.conn.execute("SELECT pgtrickle.set('citus_read', 'coordinator')")
    shop.db.create_stream_table("whole", QUERIES["whole"])
    shop.queries["whole"] = QUERIES["whole"]
    shop.change()
    action, reason = shop.refresh()["whole"]
    assert action == "FULL"
    assert reason is not None
    assert "not at a moment that is common to all nodes" in reason
    shop.conn.execute("SELECT pgtrickle.set('citus_read', 'direct')")


def test_columns_dropped_before_a_table_was_distributed(shop: Shop) -> None:
    shop.conn.execute("CREATE TYPE mood AS ENUM ('good', 'bad')")
    shop.conn.execute("CREATE TABLE d (gone int, id int, a int, b int, m mood)")
    shop.conn.execute("ALTER TABLE d DROP COLUMN gone")
    shop.conn.execute("SELECT create_distributed_table('d', 'id')")
    shop.conn.execute("INSERT INTO d SELECT i, i * 10, i * 100, 'good' FROM generate_series(1, 50) AS i")
    queries = {"only_b": "SELECT b FROM d", "both": "SELECT id, a, b, m FROM d WHERE a > 50"}
    for name, query in queries.items():
        shop.db.create_stream_table(name, query, st_placement="local")
        shop.queries[name] = query
    shop.conn.execute("UPDATE d SET a = a + 1, b = b + 7, m = 'bad' WHERE id % 2 = 0")
    assert {action for action, _ in shop.refresh().values()} == {"DIFFERENTIAL"}
    shop.conn.execute("ALTER TYPE mood RENAME TO humour")  # writers in new sessions must not mind
    with psycopg.connect(shop.cluster.dsn(), autocommit=True) as writer:
        writer.execute("UPDATE d SET b = b + 1 WHERE id < 20")
    shop.refresh()
    shop.conn.execute("UPDATE d SET b = b + 1 WHERE id < 20")
    assert {action for action, _ in shop.refresh().values()} == {"DIFFERENTIAL"}


def test_nobody_captures_under_the_name_of_another_table(shop: Shop) -> None:
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
            track = "SELECT pgtrickle._track_shards('lair.mine', %s)"
            for name in (victim, "x", "0123456789abcdef"):
                with pytest.raises(psycopg.Error, match=r"cannot be captured as|may not capture"):
                    mallory.execute(track, (Jsonb(said | {"stable_name": name}),))
            own = mallory.execute("SELECT pgtrickle.stable_hash('lair.mine')").fetchone()
            assert own is not None
            mallory.execute(track, (Jsonb(said | {"stable_name": own[0]}),))
            with pytest.raises(psycopg.Error, match="not a distributed table"):
                mallory.execute("SELECT pgtrickle._spread('lair.mine')")
        assert shop.conn.execute("SELECT count(*) FROM loc").fetchone() == (10,)
        shop.goes_on()
    finally:
        shop.admin.execute("DROP SCHEMA lair CASCADE")
        shop.admin.execute("DROP ROLE mallory")


def test_a_trigger_that_lacks_before_the_first_filling_is_put_there(shop: Shop) -> None:
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


def test_shards_that_visit_a_node_nobody_prepared_start_everything_over(shop: Shop) -> None:
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


def test_what_is_wrong_with_a_node_concerns_its_readers_only(shop: Shop) -> None:
    shop.create("totals", "local", "referenced")
    shop.cluster.servers[2].kill()
    shop.conn.execute("UPDATE loc SET name = 'meanwhile' WHERE grp = 3")
    ids = [shop.db.stream_table(name).id for name in shop.queries]
    outcome = shop.db.engine.attempt(ids, "TEST")
    assert set(outcome.failures) == {ids[0]}
    assert [result.action for result in outcome.results] == ["DIFFERENTIAL", "NO_DATA"]
