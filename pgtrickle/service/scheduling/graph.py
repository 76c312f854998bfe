"""Which stream tables read which, and which of them belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class DependencyGraph:
    """The stream tables of a database with what they read: other stream tables (by id) and tables (by name)."""

    upstream: Mapping[int, frozenset[int]] = field(default_factory=dict)
    tables: Mapping[int, frozenset[str]] = field(default_factory=dict)
    groups: Mapping[int, frozenset[int]] = field(default_factory=dict)  # the atomic group of each member

    @classmethod
    def of(
        cls,
        upstream: Mapping[int, Iterable[int]],
        tables: Mapping[int, Iterable[str]],
        asked: Mapping[int, str] = MappingProxyType({}),  # the group that somebody put a stream table into
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
    """Stream tables that a reader must see at one moment: by request, or where two ways lead from one table to a stream table.

    Refreshed one after the other, what comes by one way would show before what comes by the other. What they read belongs
    to it: read at different moments, it would say different things. But a group is of one owner: its members fail together.
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
    """Groups that share a member are one."""
    for id_ in list(members):
        members |= merged.get(id_, set())
    for id_ in members:
        merged[id_] = members


def _ordered(upstream: Mapping[int, frozenset[int]]) -> list[int]:
    """Sources before their readers. The catalog refuses cycles; one that is there all the same has some order."""
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
