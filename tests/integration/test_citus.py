"""Distributed, reference and local tables of a Citus cluster as sources, and stream tables placed there: all exact."""

from __future__ import annotations

import re

import psycopg
import pytest

from pgtrickle.errors import (
    InvalidQueryError,
    NotDifferentiableError,
)
from pgtrickle.refresh.apply import citus_tables
from tests.support.citus_shop import QUERIES, Shop, needs_citus

pytestmark = needs_citus


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


def test_tables_with_one_shard_and_tables_on_the_coordinator_only(shop: Shop) -> None:
    for name in ("single", "here"):
        shop.conn.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v int)".encode())
        shop.conn.execute(f"INSERT INTO {name} SELECT i, i FROM generate_series(1, 50) AS i".encode())
    shop.conn.execute("SELECT create_distributed_table('single', NULL)")
    shop.admin.execute("SELECT citus_add_local_table_to_metadata('here')")
    shop.define(
        {
            "singles": "SELECT v % 3 AS rest, count(*) AS n FROM single GROUP BY 1",
            "heres": "SELECT id, v + 1 AS next FROM here",
            "all_three": "SELECT t.id, s.v AS s, h.v AS h FROM t JOIN single s USING (id) LEFT JOIN here h USING (id)",
        }
    )
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
    shop.define(
        {
            "picked": "SELECT p.id, p.name, t.v FROM picks p LEFT JOIN t USING (id)",
            "picked_names": "SELECT p.id, n.v FROM picks p JOIN named n USING (name)",
        }
    )
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


def test_lookups_by_keys_whose_text_or_hash_differs_between_nodes(shop: Shop) -> None:
    """Labels of an enum have a different OID, and so a different hash, on every node; dates have a different text under
    other settings.
    """
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


def test_joins_that_citus_cannot_plan(shop: Shop) -> None:
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
        "SELECT create_distributed_table_concurrently('loc', 'grp')",
    ]
    for step in steps:
        shop.change()
        shop.conn.execute(step.encode())
        shop.change()
        shop.refresh()
        shop.goes_on()


def test_large_tables_are_read_shard_by_shard(shop: Shop) -> None:
    shop.db.engine.reading.large = 1 << 18
    shop.conn.execute("INSERT INTO t SELECT i, i % 10, i % 1000 FROM generate_series(200000, 240000) AS i")
    shop.create("totals", "rows", "named", st_placement="distributed")
    shards = {text.split("t_1")[1][:5] for text in shop.db.engine.statements if "t_1" in text}
    assert len(shards) == 4, shop.db.engine.statements
    shop.conn.execute("UPDATE t SET v = v + 1 WHERE id > 210000")
    shop.refresh()
    shop.goes_on()


@pytest.mark.parametrize("st_placement", ["reference", "distributed"])
def test_st_placement_is_followed(shop: Shop, st_placement: str) -> None:
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


def test_small_results_become_reference_tables_and_large_ones_distributed_tables(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(citus_tables, "LARGE_ROWS", 501)
    shop.create("totals", "rows", "doubled", "local", "referenced", "mixed", st_placement=None)
    assert shop.placement("totals") == ("reference", "reference")
    assert shop.placement("doubled") == ("distributed", "distributed")
    assert shop.placement("rows") == ("reference", "reference")
    assert shop.placement("mixed") == ("distributed", "distributed")
    assert shop.placement("local") == ("local", "local")
    assert shop.placement("referenced") == ("local", "local")
    for _ in range(2):
        shop.goes_on()


def test_a_stream_table_is_co_located_with_the_rows_it_is_joined_with(shop: Shop) -> None:
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


def test_sql_creates_stream_tables_over_distributed_tables(shop: Shop) -> None:
    with psycopg.connect(shop.cluster.dsn(), autocommit=True) as plain:  # with Citus's own settings
        plain.execute("SELECT pgtrickle.create_stream_table('totals', %s)", (QUERIES["totals"],))
    shop.queries["totals"] = QUERIES["totals"]
    shop.refresh()
    shop.goes_on()
    views = "SELECT count(*) FROM pg_views WHERE schemaname = 'pgtrickle_views'"
    with psycopg.connect(shop.cluster.superuser_dsn(1)) as worker:
        assert worker.execute(views).fetchone() == (0,)


def test_the_coordinator_computes_queries_without_a_plan(shop: Shop) -> None:
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
