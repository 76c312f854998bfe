"""Many generated queries, in batches that are refreshed together: each result is exact after every refresh.

Placements alternate: a different query finds more than the same one with the other placement. Queries of the mixed
world compare values of different types and collations (the latter if the server has ICU: `--pg 15`).
PGTRICKLE_GENERATED sets the number of queries, PGTRICKLE_SEED the seed. A failure prints seed and number;
`generated(seed, number)` reproduces the query.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import islice
from typing import Any

import psycopg
import pytest

import pgtrickle
from pgtrickle.api.database import Database
from pgtrickle.errors import PgtrickleError
from tests.support.corpus import SCHEMA_SQL
from tests.support.database import TestDatabase
from tests.support.generate import GeneratedQuery, admitted, generated
from tests.support.mixed import MixedWorkload, mixed_world
from tests.support.oracle import assert_equal_to_query
from tests.support.shared_texts import shared_from
from tests.support.value_kinds import SHOP, World
from tests.support.workload import Workload

NUMBER = int(os.environ.get("PGTRICKLE_GENERATED", "2000"))
SEED = int(os.environ.get("PGTRICKLE_SEED", "20261118"))
BATCH = 50
# Each batch counts from a number of its own, so that it can be run alone.
STRIDE = 10 * BATCH
# The last two empty groups and fill them again.
ROUNDS = (1, 5, 6)
PLACEMENTS = ("auto", "spark")
MOST_FULL = 0.25

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class _Case:
    query: GeneratedQuery
    table: str
    mode: str | None


@pytest.mark.parametrize("world", ["shop", "mixed"])
@pytest.mark.parametrize("batch", range(-(-NUMBER // BATCH)))
def test_generated_queries_are_exact_after_every_round(database: TestDatabase, batch: int, world: str) -> None:
    print(f"seed {SEED}, numbers from {batch * STRIDE}")
    size = min(BATCH, NUMBER - batch * BATCH)
    with psycopg.connect(database.direct_dsn, autocommit=True) as conn, pgtrickle.connect(database.dsn) as db:
        db.install()
        conn.execute("CREATE SCHEMA st")
        sources, workload = _world(conn, world, SEED + batch)
        workload.load(conn)
        found = (query for query in generated(SEED, batch * STRIDE, sources) if admitted(conn, query))
        queries = list(islice(found, size))
        assert queries[-1].number < (batch + 1) * STRIDE, "more queries are thrown away than the stride allows for"
        cases, full, wrong = _create(db, queries)
        for number in (0, *ROUNDS):
            if number:
                workload.round(conn, number)
            with shared_from(1 if number == ROUNDS[-1] else 2):
                failed = _refresh(db, conn, cases, first=number == 0)
            for case, error in failed:
                wrong.append(f"{case.table}, round {number}: {error}\n{case.query.sql}")
                print(wrong[-1], flush=True)
                cases.remove(case)
    print(f"{full} of {len(queries)} run as FULL")
    assert not wrong, f"{len(wrong)} of {len(queries)}, seed {SEED}:\n\n" + "\n\n".join(wrong)
    assert full <= MOST_FULL * len(queries)


def _world(conn: psycopg.Connection[Any], name: str, seed: int) -> tuple[World, Workload | MixedWorkload]:
    """Create the sources of a world, and return the workload that changes them."""
    if name == "mixed":
        mixed = mixed_world(conn)
        return mixed, MixedWorkload(seed, mixed)
    conn.execute(SCHEMA_SQL)
    return SHOP, Workload(seed)


def _create(db: Database, queries: list[GeneratedQuery]) -> tuple[list[_Case], int, list[str]]:
    """Create a stream table for each query; return how many of them are FULL, and the errors."""
    cases: list[_Case] = []
    wrong: list[str] = []
    full = 0
    for query in queries:
        placement = PLACEMENTS[query.number % 2]
        name = f"st.{placement}_{query.number}"
        try:
            table = db.create_stream_table(name, query.sql, placement=placement, initialize=False)
        except (PgtrickleError, psycopg.Error) as error:
            wrong.append(f"{name} cannot be created: {error}\n{query.sql}")
            continue
        cases.append(_Case(query, name, table.effective_mode))
        full += table.effective_mode == "FULL"
    return cases, full, wrong


def _refresh(
    db: Database, conn: psycopg.Connection[Any], cases: list[_Case], *, first: bool
) -> list[tuple[_Case, Exception]]:
    """Refresh all at once and compare each; return those that failed."""
    failed: dict[_Case, Exception] = {}
    actions: dict[_Case, str] = {}
    try:
        results = db.refresh([case.table for case in cases])
        actions = {case: result.action for case, result in zip(cases, results, strict=True)}
    except (PgtrickleError, psycopg.Error):
        for case in cases:  # whose error was it?
            try:
                db.refresh(case.table)
            except (PgtrickleError, psycopg.Error) as error:
                failed[case] = error
    for case in cases:
        if case in failed:
            continue
        try:
            # Starting over would make a wrong change good, and hide it.
            if not first and case.mode == "DIFFERENTIAL":
                assert actions.get(case, "NO_DATA") in {"DIFFERENTIAL", "NO_DATA"}, f"it started over: {actions[case]}"
            assert_equal_to_query(conn, case.table, case.query.sql, case.query.by_value)
        except AssertionError as error:
            failed[case] = error
    return list(failed.items())
