"""How due stream tables are combined into units."""

from __future__ import annotations

from datetime import UTC, datetime

from pgtrickle.service.scheduling.graph import DependencyGraph
from pgtrickle.service.scheduling.units import MOST_FUSED, Due, Unit, plan_units

NOW = datetime.now(UTC)


def due(
    id_: int,
    *,
    asked: bool = False,
    seconds: float = 0.1,
    fills_long: bool = False,
    tier: str = "hot",
    owner: int = 1,
    every: float = 60.0,
    proven: bool = True,
) -> Due:
    return Due(id_, asked, NOW, seconds, fills_long, tier, owner=owner, every=every, proven=proven)


def test_quick_ones_share_a_unit_and_slow_ones_do_not() -> None:
    units = plan_units(
        [due(1), due(2), due(3, seconds=60), due(4, fills_long=True)], DependencyGraph(), set(), tiered=True
    )
    assert {(unit.kind, unit.ids) for unit in units} == {("FUSED", (1, 2)), ("SINGLETON", (3,)), ("SINGLETON", (4,))}


def test_requests_come_first_then_groups_then_the_rest_by_tier() -> None:
    graph = DependencyGraph.of({3: [1, 2], 7: [5, 6]}, {1: ["a"], 2: ["a"], 5: ["b"], 6: ["b"]})
    items = [due(1), due(5, tier="cold"), due(8, seconds=9, tier="cold"), due(9, seconds=9), due(10, asked=True)]
    units = plan_units(items, graph, set(), tiered=True)
    assert [unit.ids for unit in units] == [(10,), (1, 2, 3), (5, 6, 7), (9,), (8,)]
    assert [unit.kind for unit in units] == ["IMMEDIATE", "GROUP", "GROUP", "SINGLETON", "SINGLETON"]
    assert [unit.ids for unit in plan_units(items[1:2] + items[:1], graph, set(), tiered=False)] == [
        (5, 6, 7),
        (1, 2, 3),
    ]


def test_a_group_waits_for_a_member_that_is_being_refreshed() -> None:
    graph = DependencyGraph.of({3: [1, 2]}, {1: ["a"], 2: ["a"]})
    assert plan_units([due(1), due(4)], graph, {2}, tiered=True) == [Unit("SINGLETON", (4,), 0, False, 1, 60.0)]
    assert plan_units([due(1)], graph, {1}, tiered=True) == []


def test_a_request_for_a_member_makes_the_group_urgent() -> None:
    graph = DependencyGraph.of({3: [1, 2]}, {1: ["a"], 2: ["a"]})
    (unit,) = plan_units([due(3, asked=True)], graph, set(), tiered=True)
    assert (unit.kind, unit.ids, unit.priority[0]) == ("GROUP", (1, 2, 3), 0)


def test_very_many_are_several_units() -> None:
    units = plan_units([due(i) for i in range(2 * MOST_FUSED + 1)], DependencyGraph(), set(), tiered=True)
    assert [len(unit.ids) for unit in units] == [MOST_FUSED, MOST_FUSED, 1]


def test_requests_and_unpredictable_refreshes_share_a_unit_only_within_one_owner() -> None:
    items = [due(1), due(2, owner=2), due(3, proven=False), due(4, owner=2, proven=False), due(5, proven=False)]
    units = plan_units([*items, due(6, asked=True), due(7, asked=True, owner=2)], DependencyGraph(), set(), tiered=True)
    assert {(unit.ids, unit.owner) for unit in units} == {
        ((1, 2), None),
        ((3, 5), 1),
        ((4,), 2),
        ((6,), 1),
        ((7,), 2),
    }


def test_a_unit_has_the_patience_of_the_shortest_schedule_in_it() -> None:
    (unit,) = plan_units([due(1, every=0.5), due(2, every=3600.0)], DependencyGraph(), set(), tiered=True)
    assert unit.patience == 0.5
