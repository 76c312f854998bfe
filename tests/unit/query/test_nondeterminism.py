"""Queries that PostgreSQL may answer in more than one way."""

from __future__ import annotations

import pytest

from pgtrickle.query.nondeterminism import nondeterministic_part

OPEN = {
    "SELECT k, array_agg(x) AS a FROM t GROUP BY k": "array_agg() without ORDER BY",
    "SELECT k, string_agg(x, ','::text) AS a FROM t GROUP BY k": "string_agg() without ORDER BY",
    "SELECT jsonb_object_agg(k, v) AS a FROM t": "jsonb_object_agg() without ORDER BY",
    "SELECT json_agg(t.*) FILTER (WHERE x > 1) AS a FROM t": "json_agg() without ORDER BY",
    "SELECT x FROM t LIMIT 3": "LIMIT or OFFSET",
    "SELECT x FROM (SELECT x FROM t ORDER BY x OFFSET 2) AS s": "LIMIT or OFFSET",
    "SELECT DISTINCT ON (k) k, x FROM t": "DISTINCT ON",
    "SELECT row_number() OVER (PARTITION BY k ORDER BY x) AS n FROM t": "row_number() among rows that it orders alike",
    "SELECT mode() WITHIN GROUP (ORDER BY x) AS m FROM t": "mode() among values that are as frequent",
}
CLOSED = (
    "SELECT k, array_agg(x ORDER BY x) AS a, string_agg(y, ','::text ORDER BY y) AS b FROM t GROUP BY k",
    "SELECT DISTINCT k, x FROM t",
    "SELECT k, sum(x) OVER (PARTITION BY k) AS s, rank() OVER (ORDER BY x) AS r FROM t",
    "SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY x) AS m, max(x) AS most FROM t",
)


@pytest.mark.parametrize(("query", "part"), OPEN.items())
def test_undetermined_results_are_named(query: str, part: str) -> None:
    assert nondeterministic_part(query) == part


@pytest.mark.parametrize("query", CLOSED)
def test_results_determined_by_rows_are_not_named(query: str) -> None:
    assert nondeterministic_part(query) is None
