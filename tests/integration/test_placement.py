"""The work that refreshes make sources do, according to the server's own log.

The corpus is filled once. Then its stream tables are refreshed with each placement until everything is fetched, and the
statements in the server's log are analysed. The oracle tests check the results.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

import pgtrickle
from pgtrickle.embedded.server import EmbeddedServer
from tests.support.corpus import CORPUS, SCHEMA_SQL, CorpusQuery, load_corpus
from tests.support.database import fresh_database
from tests.support.oracle_rounds import create_corpus, stored
from tests.support.server_log import recorded
from tests.support.shapes import shape_of
from tests.support.source_sql import copied_query, tables_read, work_at_source
from tests.support.workload import Workload

SEED = 20261117
AT_SOURCE: dict[str, dict[str, str]] = tomllib.loads((CORPUS / "at_source.toml").read_text(encoding="utf-8"))
MOST = 0.15

Connection = psycopg.Connection[Any]


class _Fetched(Exception):
    """Everything has been read; the rest of the refresh is skipped."""


@dataclass(frozen=True)
class Logged:
    """The server's log: for each pass and case the queries that were copied; and the explanation of each case."""

    cases: dict[str, CorpusQuery]
    copied: dict[tuple[str, str], list[str]]
    explained: dict[str, str]


def _stop_before_spark(step: str) -> None:
    if step == "spark":
        raise _Fetched


def _fetch(dsn: str, conn: Connection, queries: list[CorpusQuery], label: str, placement: str) -> None:
    """Refresh all up to the end of the fetch; the application_name of every read names its stream table.

    Because each stream table has its own setting, none gets its rows from another's read.
    """
    conn.execute(
        "UPDATE pgtrickle.pgt_stream_tables SET placement = %s, session_settings = session_settings"
        " || jsonb_build_object('application_name', 'case ' || %s || ' ' || pgt_id)",
        [placement, label],
    )
    with pgtrickle.connect(dsn, on_step=_stop_before_spark) as db, pytest.raises(_Fetched):
        db.refresh([stored(query) for query in queries])


@pytest.fixture(scope="module", params=[4, pytest.param(1, marks=pytest.mark.long)], ids=["quarter", "all"])
def logged(server: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[Logged]:
    queries = [query for query in load_corpus() if query.mode == "DIFFERENTIAL"][:: request.param]
    print(f"seed {SEED}, {len(queries)} queries")
    with (
        fresh_database(server, "placement") as database,
        recorded(database) as log,
        psycopg.connect(database.direct_dsn, autocommit=True) as conn,
    ):
        conn.execute(SCHEMA_SQL)
        workload = Workload(SEED)
        workload.load(conn)
        with pgtrickle.connect(database.dsn) as db:
            create_corpus(db, conn, queries, "auto")
            db.refresh([stored(query) for query in queries])
            explained = {query.name: db.explain(stored(query)) for query in queries}
        workload.round(conn, 1)
        _fetch(database.dsn, conn, queries, "auto", "auto")
        _fetch(database.dsn, conn, queries, "change", "spark")
        conn.execute("UPDATE pgtrickle.pgt_stream_tables SET reinit_reason = 'to see it'")
        _fetch(database.dsn, conn, queries, "whole", "spark")
        rows = conn.execute("SELECT pgt_id::text, pgt_name FROM pgtrickle.pgt_stream_tables").fetchall()
        names: dict[str, str] = dict(rows)
        copied: dict[tuple[str, str], list[str]] = defaultdict(list)
        for application, statement in log.statements():
            word, _, rest = application.partition(" ")
            query = copied_query(statement)
            if word == "case" and query is not None:
                label, _, pgt_id = rest.partition(" ")
                copied[label, names[pgt_id]].append(query)
        yield Logged({query.name: query for query in queries}, copied, explained)


def test_every_case_was_read_in_every_pass(logged: Logged) -> None:
    assert len(logged.cases) >= 60
    assert set(logged.copied) == {(label, name) for label in ("auto", "change", "whole") for name in logged.cases}


def test_with_placement_spark_sources_join_and_group_only_in_listed_cases(logged: Logged) -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for (label, name), queries in logged.copied.items():
        if label == "auto":
            continue
        for query in queries:
            found[name] |= work_at_source(query)
            # A view would hide what it does: the fetch reads tables, change buffers and the stream table itself.
            found[name] |= {f"view {table}" for schema, table in tables_read(query) if schema == "pgtrickle_views"}
    working = {name: sorted(words) for name, words in found.items() if words}
    _assert_listed(working, "spark", logged)


def test_with_placement_auto_changes_are_joined_and_aggregated_on_spark(logged: Logged) -> None:
    shapes = {name: shape for name, query in logged.cases.items() if (shape := shape_of(query.sql)) is not None}
    assert sum("join" in shape for shape in shapes.values()) >= 6
    assert sum("sum" in shape for shape in shapes.values()) >= 6
    working: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        changes = [query for query in logged.copied["auto", name] if _reads_changes(query)]
        assert changes, f"{name} read no changes"
        words = sorted({word for query in changes for word in work_at_source(query)})
        text = logged.explained[name]
        if "sum" in shape and "groups: added up from the changes" not in text:
            words.append("recomputed groups")
        if "join" in shape and "Spark: inner join" not in text:
            words.append("no join on Spark")
        if words:
            working[name] = words
    _assert_listed(working, "auto", logged)


def _reads_changes(query: str) -> bool:
    return any(schema == "pgtrickle_changes" for schema, _ in tables_read(query))


def _assert_listed(working: dict[str, list[str]], placement: str, logged: Logged) -> None:
    """The list names exactly those cases of this run that need it."""
    listed = [name for name in AT_SOURCE[placement] if name in logged.cases]
    missing = [f"{name} is not listed: {words}" for name, words in working.items() if name not in listed]
    needless = [f"{name} is listed and need not be" for name in listed if name not in working]
    assert not missing + needless, "\n".join(missing + needless)


def test_the_list_names_cases_of_the_corpus() -> None:
    differential = {query.name for query in load_corpus() if query.mode == "DIFFERENTIAL"}
    assert {name for names in AT_SOURCE.values() for name in names} <= differential
    assert len(AT_SOURCE["spark"]) <= MOST * len(differential)


def test_operations_that_count_as_work() -> None:
    free = "SELECT x FROM (SELECT 'a JOIN b GROUP BY c' AS x FROM t UNION ALL SELECT \"JOIN\" FROM u, generate_series(1, w)) s"
    assert work_at_source(free) == set()
    assert work_at_source("SELECT a FROM t WHERE a IN (SELECT v::int[] FROM unnest('{}'::text[]) AS v)") == set()
    assert work_at_source("SELECT 1 FROM t JOIN u ON true") >= {"JOIN"}
    assert work_at_source("SELECT 1 FROM t, u") == {"comma join"}
    assert work_at_source("SELECT a FROM t GROUP BY a") == {"GROUP BY"}
    assert work_at_source("SELECT DISTINCT a FROM t") == {"DISTINCT"}
    assert work_at_source("SELECT max(a) FROM t") == {"aggregate"}
    assert work_at_source("SELECT EXISTS (SELECT FROM u) FROM t") == {"subquery"}
    assert work_at_source("SELECT a FROM t UNION SELECT a FROM u") == {"UNION"}
