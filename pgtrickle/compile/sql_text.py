"""SQL text with holes for what only the refresh knows: key sets, and the changes between frontier and cut."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from psycopg import sql

from pgtrickle.query.plan import KeyFilter

# A user's literal could look like a hole: the nonce makes sure that it does not.
_NONCE = secrets.token_hex(8)
_HOLE = re.compile(rf"⟦{_NONCE}:(\w+)⟧")
PART = "part"  # of a table's blocks
SHARDS = "shards"  # of a distributed table on one node; the number of the table follows
CHANGES = "changes_"  # of a table, between frontier and cut; the rest of the name of its buffer follows


_MEANINGS = {SHARDS: "(its shards here)"}


def hole(name: str) -> str:
    return f"⟦{_NONCE}:{name}⟧"


@dataclass(frozen=True)
class SqlText:
    """A statement whose holes are `key0` and so on, one for each of `keys`, changes, the part, and shards."""

    text: str
    keys: tuple[KeyFilter, ...] = field(default=())

    def fill(self, value: Callable[[str], sql.Composable]) -> sql.Composed:
        """The statement with every hole filled; `value` is given the hole's name."""
        parts: list[sql.Composable] = []
        end = 0
        for match in _HOLE.finditer(self.text):
            parts.append(sql.SQL(self.text[end : match.start()]))
            parts.append(value(match.group(1)))
            end = match.end()
        parts.append(sql.SQL(self.text[end:]))
        return sql.Composed(parts)


def readable(text: str) -> str:
    """The text for a person: holes say what will stand there."""
    return _HOLE.sub(lambda match: _meaning(match.group(1)), text)


def _meaning(name: str) -> str:
    if name.startswith(CHANGES):
        return f"pgtrickle_changes.{name} WHERE (the window)"
    return _MEANINGS.get(name.rstrip("0123456789"), "(the keys)")


def ident(name: str) -> str:
    """An identifier, quoted."""
    return '"' + name.replace('"', '""') + '"'
