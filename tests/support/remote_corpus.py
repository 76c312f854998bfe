"""The corpus over two databases: both have all tables with the same rows, and queries read some from the other one.

So the original query, run in the stream table's own database, gives the expected result.
"""

from __future__ import annotations

import re

import psycopg

import pgtrickle
from pgtrickle.errors import NotDifferentiableError
from tests.support.corpus import SCHEMA_SQL, CorpusQuery
from tests.support.database import TestDatabase
from tests.support.oracle import assert_equal_to_query
from tests.support.workload import Workload

OTHER = "other"
REMOTE_TABLES = ("customers", "items", "events")


def over_two_databases(query: str) -> str:
    """The query, changed to read some of its tables from the other database."""
    return re.sub(rf"\bshop\.({'|'.join(REMOTE_TABLES)})\b", rf"{OTHER}.shop.\1", query)


def run_remote_corpus(
    home: TestDatabase, other: TestDatabase, queries: list[CorpusQuery], seed: int, rounds: int
) -> tuple[list[str], dict[str, str]]:
    """Run all rounds; return the names of the queries that were refreshed, and those that are refused with reasons."""
    print(f"seed {seed}, {len(queries)} queries")
    with (
        psycopg.connect(home.direct_dsn, autocommit=True) as conn,
        psycopg.connect(other.direct_dsn, autocommit=True) as there,
        pgtrickle.connect(other.dsn) as source,
        pgtrickle.connect(home.dsn) as db,
    ):
        workloads = {conn: Workload(seed), there: Workload(seed)}
        for each, workload in workloads.items():
            each.execute(SCHEMA_SQL)
            workload.load(each)
        source.install()
        db.install()
        db.add_database(OTHER, other.dsn)
        conn.execute("CREATE SCHEMA st")
        accepted: list[CorpusQuery] = []
        refused: dict[str, str] = {}
        for query in queries:
            if over_two_databases(query.sql) == query.sql:
                continue
            try:
                db.create_stream_table(f'st."{query.name}"', over_two_databases(query.sql), initialize=False)
                accepted.append(query)
            except NotDifferentiableError as error:
                refused[query.name] = error.message
        names = [f'st."{query.name}"' for query in accepted]
        for number in range(rounds + 1):
            if number:
                for each, workload in workloads.items():
                    workload.round(each, number)
            print(f"round {number}", flush=True)
            results = db.refresh(names)
            for query, result in zip(accepted, results, strict=True):
                if number:
                    assert result.action in {"DIFFERENTIAL", "NO_DATA"}, f"{query.name}: {result}"
                assert_equal_to_query(conn, f'st."{query.name}"', query.sql, query.by_value)
    return [query.name for query in accepted], refused
