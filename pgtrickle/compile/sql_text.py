"""SQL text with holes for what is known only during a refresh: key sets, and the changes between frontier and cut."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from psycopg import sql

from pgtrickle.query.plan import KeyFilter

# The nonce ensures that no literal in a user's query looks like a hole.
_NONCE = secrets.token_hex(8)
_HOLE = re.compile(rf"⟦{_NONCE}:(\w+)⟧")
PART = "part"  # a condition on a table's blocks
SHARDS = "shards"  # the shards of a distributed table on one node; the table's OID follows
CHANGES = "changes_"  # a table's changes between frontier and cut; the rest of its buffer's name follows


_MEANINGS = {SHARDS: "(its shards here)"}


def hole(name: str) -> str:
    return f"⟦{_NONCE}:{name}⟧"


@dataclass(frozen=True)
class SqlText:
    """A statement with holes: `key0` and so on, one for each of `keys`; changes; the part; and shards."""

    text: str
    keys: tuple[KeyFilter, ...] = field(default=())

    def fill(self, value: Callable[[str], sql.Composable]) -> sql.Composed:
        """The statement with every hole filled; `value` is called with the name of a hole."""
        parts: list[sql.Composable] = []
        end = 0
        for match in _HOLE.finditer(self.text):
            parts.append(sql.SQL(self.text[end : match.start()]))
            parts.append(value(match.group(1)))
            end = match.end()
        parts.append(sql.SQL(self.text[end:]))
        return sql.Composed(parts)


def readable(text: str) -> str:
    """The text for a human reader: each hole is replaced by a description."""
    return _HOLE.sub(lambda match: _meaning(match.group(1)), text)


def _meaning(name: str) -> str:
    if name.startswith(CHANGES):
        return f"pgtrickle_changes.{name} WHERE (the window)"
    return _MEANINGS.get(name.rstrip("0123456789"), "(the keys)")


def ident(name: str) -> str:
    """The quoted identifier."""
    return '"' + name.replace('"', '""') + '"'
