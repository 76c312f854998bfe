"""Run the workload over the corpus, and compare every stream table with its query after every round."""

from __future__ import annotations

from collections.abc import Collection

import psycopg

import pgtrickle
from pgtrickle.api.database import Database
from tests.support.corpus import SCHEMA_SQL, CorpusQuery
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query
from tests.support.shared_texts import shared_from
from tests.support.workload import ROUNDS, Workload

ALL_ROUNDS = range(1, ROUNDS + 1)
# The rounds with special changes, and an ordinary one.
SOME_ROUNDS = (1, 4, 5, 6)
# The rounds in which every stream table uses a shared text on Spark: more expensive, but it must be just as correct.
SHARED_ROUNDS = (6,)


def create_corpus(db: Database, conn: psycopg.Connection, queries: list[CorpusQuery], placement: str) -> None:
    """Install the catalog and create a stream table for every query."""
    db.install()
    conn.execute("CREATE SCHEMA st")
    for query in queries:
        table = db.create_stream_table(stored(query), query.sql, placement=placement, initialize=False)
        assert table.effective_mode == query.mode, f"{query.name} runs as {table.effective_mode}: {table.mode_reason}"


def stored(query: CorpusQuery) -> str:
    return f'st."{query.name}"'


def run_rounds(
    database: TestDatabase,
    queries: list[CorpusQuery],
    placement: str,
    seed: int,
    rounds: Collection[int] = ALL_ROUNDS,
    shared: Collection[int] = (),
) -> list[str]:
    """Run these rounds of the workload; return all statements that were sent to the sources."""
    print(f"seed {seed}, placement {placement}, {len(queries)} queries")
    statements: list[str] = []
    with psycopg.connect(database.direct_dsn, autocommit=True) as conn, pgtrickle.connect(database.dsn) as db:
        conn.execute(SCHEMA_SQL)
        workload = Workload(seed)
        workload.load(conn)
        create_corpus(db, conn, queries, placement)
        for number in (0, *rounds):
            if number:
                workload.round(conn, number)
            print(f"round {number}", flush=True)
            with shared_from(1 if number in shared else 2):
                results = db.refresh([stored(query) for query in queries])
            statements += db.engine.statements
            for query, result in zip(queries, results, strict=True):
                if number and query.mode == "DIFFERENTIAL":
                    assert result.action in {"DIFFERENTIAL", "NO_DATA"}, f"{query.name}: {result}"
                assert_equal_to_query(conn, stored(query), query.sql, query.by_value)
    return statements
