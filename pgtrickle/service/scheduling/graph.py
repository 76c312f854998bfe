"""The dependencies between stream tables, and the refresh groups that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class DependencyGraph:
    """The stream tables of a database and what they read: other stream tables (by id) and tables (by name)."""

    upstream: Mapping[int, frozenset[int]] = field(default_factory=dict)
    tables: Mapping[int, frozenset[str]] = field(default_factory=dict)
    groups: Mapping[int, frozenset[int]] = field(default_factory=dict)  # the refresh group of each member

    @classmethod
    def of(
        cls,
        upstream: Mapping[int, Iterable[int]],
        tables: Mapping[int, Iterable[str]],
        asked: Mapping[int, str] = MappingProxyType({}),  # names of the groups from create_refresh_group()
        owners: Mapping[int, int] = MappingProxyType({}),
    ) -> DependencyGraph:
        ups = {id_: frozenset(upstream.get(id_, ())) for id_ in (*upstream, *tables)}
        bases = {id_: frozenset(tables.get(id_, ())) for id_ in ups}
        return cls(ups, bases, _groups(ups, bases, asked, owners))


def _groups(
    upstream: Mapping[int, frozenset[int]],
    tables: Mapping[int, frozenset[str]],
    asked: Mapping[int, str],
    owners: Mapping[int, int],
) -> dict[int, frozenset[int]]:
    """The refresh group of each member: requested ones, and those where two paths lead from a table to a stream table.

    If the stream tables on the two paths were refreshed one after the other, changes would arrive by one path before
    the other. The stream tables that members read belong to the group too: read at different moments, they would
    contradict each other. All members have one owner, because they fail together.
    """
    roots: dict[int, frozenset[str]] = {}
    above: dict[int, frozenset[int]] = {}
    for id_ in _ordered(upstream):
        ups = upstream[id_]
        roots[id_] = frozenset(tables[id_]).union(*(roots.get(up, frozenset()) for up in ups))
        above[id_] = ups.union(*(above.get(up, frozenset()) for up in ups))
    merged: dict[int, set[int]] = {}
    for id_, ups in upstream.items():
        ways = [*(roots[up] for up in ups), tables[id_]]
        if ups and sum(len(way) for way in ways) > len(frozenset().union(*ways)):
            _merge(merged, {id_, *(up for up in above[id_] if owners.get(up) == owners.get(id_))})
    for name, owner in {(name, owners.get(id_)) for id_, name in asked.items()}:
        members = [id_ for id_, group in asked.items() if group == name and owners.get(id_) == owner]
        _merge(merged, {*members, *(up for id_ in members for up in above[id_] if owners.get(up) == owner)})
    return {id_: frozenset(members) for id_, members in merged.items()}


def _merge(merged: dict[int, set[int]], members: set[int]) -> None:
    """Merge groups that share a member."""
    for id_ in list(members):
        members |= merged.get(id_, set())
    for id_ in members:
        merged[id_] = members


def _ordered(upstream: Mapping[int, frozenset[int]]) -> list[int]:
    """Ids with sources before their readers. The catalog refuses cycles; if there is one, its order is arbitrary."""
    order: list[int] = []
    seen: set[int] = set()
    done: set[int] = set()
    for start in upstream:
        pending = [start]
        while pending:
            id_ = pending[-1]
            missing = [up for up in upstream[id_] if up not in seen] if id_ not in seen else []
            seen.add(id_)
            if missing:
                pending += missing
            else:
                pending.pop()
                if id_ not in done:
                    done.add(id_)
                    order.append(id_)
    return order
