"""The refresh groups that follow from the dependencies between stream tables."""

from __future__ import annotations

import pytest

from pgtrickle.service.scheduling.graph import DependencyGraph


@pytest.mark.parametrize(
    ("upstream", "tables", "groups"),
    [
        pytest.param({2: [1]}, {1: ["a"]}, {}, id="chain"),
        pytest.param({}, {1: ["a"], 2: ["a"]}, {}, id="fan"),
        pytest.param({3: [1, 2]}, {1: ["a"], 2: ["a"]}, {frozenset({1, 2, 3})}, id="diamond"),
        pytest.param({3: [1, 2]}, {1: ["a"], 2: ["b"]}, {}, id="two ways from two tables"),
        pytest.param({2: [1]}, {1: ["a"], 2: ["a"]}, {frozenset({1, 2})}, id="a table and what reads it"),
        pytest.param(
            {2: [1], 3: [1], 4: [2, 3]},
            {1: ["a"]},
            {frozenset({1, 2, 3, 4})},
            id="with the stream table both ways begin at",
        ),
        pytest.param(
            {3: [1, 2], 4: [3]}, {1: ["a"], 2: ["a"]}, {frozenset({1, 2, 3})}, id="who reads the result is no part"
        ),
        pytest.param(
            {3: [1, 2], 5: [2, 4]},
            {1: ["a"], 2: ["a"], 4: ["a"]},
            {frozenset({1, 2, 3, 4, 5})},
            id="diamonds that share a side are one",
        ),
    ],
)
def test_groups(upstream: dict[int, list[int]], tables: dict[int, list[str]], groups: object) -> None:
    graph = DependencyGraph.of(upstream, tables)
    assert set(graph.groups.values()) == set(groups)  # type: ignore[call-overload]
    for id_, members in graph.groups.items():
        assert id_ in members


def test_a_long_chain_and_a_ladder_of_diamonds() -> None:
    chain = {i: [i - 1] for i in range(1, 3000)}
    assert DependencyGraph.of(chain, {0: ["a"]}).groups == {}
    ladder: dict[int, list[int]] = {}
    for i in range(0, 120, 3):
        ladder |= {i + 1: [i], i + 2: [i], i + 3: [i + 1, i + 2]}
    assert len(DependencyGraph.of(ladder, {0: ["a"]}).groups[0]) == 121


def test_requested_groups_include_what_their_members_read() -> None:
    upstream = {2: [1], 3: [2], 6: [5]}
    tables = {1: ["a"], 4: ["b"], 5: ["c"], 7: ["c"], 8: ["c"]}
    graph = DependencyGraph.of(upstream, tables, {3: "one", 4: "one", 6: "other", 7: "other"})
    assert set(graph.groups.values()) == {frozenset({1, 2, 3, 4}), frozenset({5, 6, 7})}


def test_a_cycle_in_the_catalog_does_not_loop_forever() -> None:
    graph = DependencyGraph.of({1: [2], 2: [3], 3: [1], 5: [4]}, {4: ["a"], 5: ["a"]})
    assert set(graph.groups.values()) == {frozenset({4, 5})}


def test_a_group_has_one_owner() -> None:
    """Its members fail together, so an owner's code must not break stream tables of another owner."""
    graph = DependencyGraph.of({3: [1, 2]}, {1: ["a"], 2: ["a"]}, owners={1: 10, 2: 10, 3: 20})
    assert set(graph.groups.get(1, frozenset({1}))) == {1}
    assert set(graph.groups.get(3, frozenset({3}))) == {3}
    asked = DependencyGraph.of(
        {}, {1: ["a"], 2: ["b"], 3: ["c"]}, {1: "g", 2: "g", 3: "g"}, owners={1: 10, 2: 10, 3: 20}
    )
    assert asked.groups[1] == frozenset({1, 2})
    assert asked.groups.get(3, frozenset({3})) == frozenset({3})
