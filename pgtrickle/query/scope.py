"""Name resolution: which column an identifier refers to."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqlglot import exp

from pgtrickle.query.plan import Column
from pgtrickle.query.unsupported import Unsupported


@dataclass(frozen=True)
class Entry:
    """One name in FROM and its columns. `hidden` columns (merged by USING) are found only by their qualified names."""

    alias: str
    columns: tuple[tuple[str, Column], ...]
    hidden: frozenset[str] = frozenset()


@dataclass
class Scope:
    """The names that a SELECT can use; `outer` is the scope of the enclosing query."""

    entries: list[Entry] = field(default_factory=list)
    outer: Scope | None = None

    def resolve(self, node: exp.Column) -> Column:
        """Return the column that a reference means, in this query or an enclosing one."""
        if isinstance(node.this, exp.Star):
            raise Unsupported("a whole row is used as a value", node)
        table = node.table
        for entry in self.entries:
            if table and entry.alias != table:
                continue
            for name, column in entry.columns:
                if name == node.name and (table or name not in entry.hidden):
                    return column
        if self.outer is not None:
            return self.outer.resolve(node)
        raise Unsupported(f'column "{node.sql()}" could not be resolved', node)
