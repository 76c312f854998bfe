"""The corpus and its oracle are effective: queries run, results change in most rounds, wrong rows are detected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import psycopg
import pytest
from psycopg import sql

from pgtrickle.embedded.server import EmbeddedServer
from tests.support.corpus import SCHEMA_SQL, CorpusQuery, load_corpus
from tests.support.database import fresh_database
from tests.support.oracle import Row, assert_equal_to_query, fetch_multiset
from tests.support.workload import ROUNDS, Workload

pytestmark = pytest.mark.pgversions

SEED = 20250607
CORPUS = load_corpus()
DIFFERENTIAL = [query for query in CORPUS if query.mode == "DIFFERENTIAL"]
SOURCES = ("customers", "orders", "items", "regions", "products", "events")
POSITIONS = ("alone", *(f"{side}_{other}" for other in ("join", "aggregate", "distinct") for side in ("under", "over")))
OPERATORS = (
    *("filter", "project", "inner_join", "cross_join", "left_join", "right_join", "full_join"),
    *("exists", "not_exists", "in", "not_in", "aggregate", "having", "distinct", "union_all", "union"),
    *("subquery", "cte", "view"),
)


@dataclass(frozen=True)
class Played:
    """The corpus after all rounds: its database, and the results of each query before and after each round."""

    conn: psycopg.Connection
    results: dict[str, list[Counter[Row]]]
    sources: dict[str, list[Counter[Row]]]

    def changed_rounds(self, query: CorpusQuery) -> int:
        given = self.results[query.name]
        return sum(before != after for before, after in pairwise(given))


@pytest.fixture(scope="module")
def played(server: EmbeddedServer) -> Iterator[Played]:
    with fresh_database(server, "corpus") as database, psycopg.connect(database.direct_dsn, autocommit=True) as conn:
        conn.execute(SCHEMA_SQL.encode())
        conn.execute("CREATE SCHEMA corpus")
        for query in CORPUS:
            conn.execute(sql.SQL("CREATE VIEW {} AS ").format(_view(query)).as_bytes(conn) + query.sql.encode())
        workload = Workload(SEED)
        workload.load(conn)
        results: dict[str, list[Counter[Row]]] = {query.name: [] for query in CORPUS}
        sources: dict[str, list[Counter[Row]]] = {source: [] for source in SOURCES}
        for n in range(ROUNDS + 1):
            if n > 0:
                workload.round(conn, n)
            for query in CORPUS:
                results[query.name].append(fetch_multiset(conn, query.sql))
            for source in SOURCES:
                sources[source].append(fetch_multiset(conn, f"SELECT * FROM shop.{source}"))
        yield Played(conn, results, sources)


def _view(query: CorpusQuery) -> sql.Identifier:
    return sql.Identifier("corpus", query.name)


def test_the_corpus_is_large_enough() -> None:
    assert len(DIFFERENTIAL) >= 150
    assert len(CORPUS) - len(DIFFERENTIAL) >= 20


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_occurs_alone_and_below_and_above_the_others(operator: str) -> None:
    names = {query.name for query in CORPUS if query.operator == operator}
    assert {f"{operator}_{position}" for position in POSITIONS} - names == set()


def test_every_round_changes_every_source(played: Played) -> None:
    for source, states in played.sources.items():
        for n, (before, after) in enumerate(pairwise(states), start=1):
            assert before != after, f"round {n} leaves {source} as it was"


def test_round_5_empties_groups_and_round_6_refills_them(played: Played) -> None:
    per_status = [dict.fromkeys(row[0] for row in state) for state in played.results["aggregate_alone"]]
    assert ["returned" in groups for groups in per_status] == [True, True, True, True, True, False, True, True, True]


def test_every_query_gives_rows_in_some_round(played: Played) -> None:
    empty = [query.name for query in CORPUS if not any(played.results[query.name])]
    assert empty == []


def test_most_queries_change_in_most_rounds(played: Played) -> None:
    changes = {query.name: played.changed_rounds(query) for query in CORPUS}
    assert [name for name, rounds in changes.items() if rounds == 0] == []
    lively = [query for query in DIFFERENTIAL if changes[query.name] >= 5]
    assert len(lively) >= 140
    assert len(lively) >= 0.9 * len(DIFFERENTIAL), {n: r for n, r in changes.items() if r < 5}


def test_the_workload_depends_on_its_seed_alone(played: Played, server: EmbeddedServer) -> None:
    for seed, same in ((SEED, True), (SEED + 1, False)):
        with (
            fresh_database(server, "replay") as database,
            psycopg.connect(database.direct_dsn, autocommit=True) as conn,
        ):
            conn.execute(SCHEMA_SQL.encode())
            Workload(seed).load(conn)
            for n in (1, 2):
                # A new object per round: what it does must not come from what it remembers.
                Workload(seed).round(conn, n)
            for source, states in played.sources.items():
                assert (fetch_multiset(conn, f"SELECT * FROM shop.{source}") == states[2]) == same, source


def test_results_do_not_depend_on_the_plan_or_the_order_of_rows(played: Played) -> None:
    """A query with two correct results would cause false alarms of the oracle."""
    conn = played.conn
    with conn.transaction(force_rollback=True):
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        for query in CORPUS:
            conn.execute(
                sql.SQL("CREATE TABLE {} AS TABLE {}").format(sql.Identifier("stored_" + query.name), _view(query))
            )
        for source in SOURCES:
            table = sql.Identifier("shop", source)
            conn.execute(sql.SQL("CREATE TEMP TABLE shuffled ON COMMIT DROP AS TABLE {}").format(table))
            conn.execute(sql.SQL("DELETE FROM {}").format(table))
            conn.execute(sql.SQL("INSERT INTO {} SELECT * FROM shuffled s ORDER BY md5(s::text)").format(table))
            conn.execute("DROP TABLE shuffled")
        for setting in ("enable_hashagg", "enable_hashjoin", "enable_indexscan", "enable_bitmapscan"):
            conn.execute(sql.SQL("SET LOCAL {} = off").format(sql.Identifier(setting)))
        for query in CORPUS:
            assert_equal_to_query(conn, f"stored_{query.name}", query.sql, query.by_value)


# --- the oracle must be able to fail ---

NUMBERS = "SELECT * FROM (VALUES (1, 1.5::numeric, 0.1::float8), (1, 1.5, 0.1), (2, NULL, 'NaN')) AS v (id, n, f)"


@pytest.fixture
def stored(conn: psycopg.Connection) -> psycopg.Connection:
    conn.execute(b"CREATE TABLE stored AS " + NUMBERS.encode())
    conn.execute("ALTER TABLE stored ADD COLUMN __pgt_row_id bigint")
    return conn


def test_equal_tables_pass_and_our_own_columns_do_not_count(stored: psycopg.Connection) -> None:
    assert_equal_to_query(stored, "stored", NUMBERS + ";")


@pytest.mark.parametrize(
    ("damage", "shown"),
    [
        ("DELETE FROM stored WHERE id = 2", r"missing \(1 rows\):\n  \('2', None, 'NaN'\) x1\nunexpected \(0 rows\)"),
        ("INSERT INTO stored VALUES (7, 7, 7)", r"missing \(0 rows\):\nunexpected \(1 rows\):\n  \('7', '7', '7'\) x1"),
        ("INSERT INTO stored SELECT * FROM stored LIMIT 1", r"unexpected \(1 rows\):\n  \('1', '1.5', '0.1'\) x1"),
        ("DELETE FROM stored WHERE ctid = '(0,1)'", r"missing \(1 rows\):\n  \('1', '1.5', '0.1'\) x1"),
        ("UPDATE stored SET n = 1.50 WHERE id = 1", r"unexpected \(2 rows\):\n  \('1', '1.50', '0.1'\) x2"),
        ("UPDATE stored SET n = 0 WHERE n IS NULL", r"missing \(1 rows\):\n  \('2', None"),
        ("UPDATE stored SET f = f * (1 + 1e-7) WHERE id = 1", r"missing \(2 rows\)"),
        ("UPDATE stored SET f = 0 WHERE id = 2", r"missing \(1 rows\):\n  \('2', None, 'NaN'\)"),
        ("UPDATE stored SET f = NULL WHERE id = 2", r"missing \(1 rows\):\n  \('2', None, 'NaN'\)"),
        ("ALTER TABLE stored RENAME n TO m", r"has columns .*'m'"),
        ("ALTER TABLE stored ALTER id TYPE bigint", r"has columns \[\('id', 20\)"),
    ],
)
def test_a_wrong_table_is_detected(stored: psycopg.Connection, damage: str, shown: str) -> None:
    stored.execute(damage.encode())
    with pytest.raises(AssertionError, match=shown):
        assert_equal_to_query(stored, "stored", NUMBERS)


def test_float_columns_and_only_those_have_a_tolerance(stored: psycopg.Connection) -> None:
    stored.execute("UPDATE stored SET f = f * (1 + 1e-12)")
    assert_equal_to_query(stored, "stored", NUMBERS)
    stored.execute("UPDATE stored SET n = n + 1e-12")
    with pytest.raises(AssertionError, match="missing"):
        assert_equal_to_query(stored, "stored", NUMBERS)


def test_one_close_float_does_not_match_two(stored: psycopg.Connection) -> None:
    stored.execute("UPDATE stored SET f = f * (1 + 1e-12)")
    stored.execute("DELETE FROM stored WHERE ctid = (SELECT min(ctid) FROM stored WHERE id = 1)")
    with pytest.raises(AssertionError, match=r"missing \(1 rows\)"):
        assert_equal_to_query(stored, "stored", NUMBERS)


def test_columns_compared_by_value_accept_equal_values_only(stored: psycopg.Connection) -> None:
    stored.execute("UPDATE stored SET n = 1.50 WHERE id = 1")
    assert_equal_to_query(stored, "stored", NUMBERS, by_value={"n"})
    stored.execute("UPDATE stored SET n = 1.51 WHERE id = 1")
    with pytest.raises(AssertionError, match=r"'1\.51'"):
        assert_equal_to_query(stored, "stored", NUMBERS, by_value={"n"})
    with pytest.raises(ValueError, match="no column"):
        assert_equal_to_query(stored, "stored", NUMBERS, by_value={"typo"})


def test_a_moving_snapshot_is_refused(stored: psycopg.Connection) -> None:
    with stored.transaction():
        stored.execute("SELECT 1")
        with pytest.raises(ValueError, match="one snapshot"):
            assert_equal_to_query(stored, "stored", NUMBERS)
