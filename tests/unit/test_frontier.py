"""Frontiers and the Arrow part of a fetch, without a server."""

from __future__ import annotations

import pyarrow as pa

from pgtrickle.frontier.frontier import Frontier
from pgtrickle.frontier.snapshot import Snapshot
from pgtrickle.refresh.apply.load import as_arrays
from pgtrickle.refresh.fetch.medium import consolidate


def test_a_snapshot_prints_as_postgresql_does() -> None:
    snapshot = Snapshot.parse("100:110:103,105")
    assert snapshot == Snapshot(100, 110, (103, 105))
    assert str(snapshot) == "100:110:103,105"
    assert Snapshot.parse("7:7:").in_progress == ()


def test_a_frontier_survives_the_catalog() -> None:
    frontier = Frontier("sys/5", Snapshot(1, 9, (3,)), "abc")
    assert Frontier.from_json(frontier.to_json()) == frontier
    assert Frontier.from_json(None) is None


def test_rows_that_cancel_out_are_removed_and_null_is_a_value() -> None:
    table = pa.table({"a": ["x", "x", None, None, "y"], "w": pa.array([1, -1, 1, 1, -1], pa.int64())})
    rows = {row["a"]: row["w"] for row in consolidate(table).to_pylist()}
    assert rows == {None: 2, "y": -1}


def test_rows_without_columns_are_counted() -> None:
    assert consolidate(pa.table({"w": pa.array([1, 1, -1], pa.int64())})).to_pylist() == [{"w": 1}]


def test_arrays_quote_what_postgresql_would_misread() -> None:
    values = pa.table({"a": ['say "hi"', "back\\slash", "NULL", None, "", "a,b{}"]})
    assert as_arrays(values) == ['{"say \\"hi\\"","back\\\\slash","NULL",NULL,"","a,b{}"}']
