"""pgtrickle keeps stream tables fresh: PostgreSQL tables defined by a query and maintained incrementally.

The public names are resolved on first use, so that `import pgtrickle` loads neither a database driver nor Spark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgtrickle._version import __version__

if TYPE_CHECKING:
    from pgtrickle.api.database import Database, RefreshResult, StreamTable, StreamTableStatus, Verification, connect

__all__ = ["Database", "RefreshResult", "StreamTable", "StreamTableStatus", "Verification", "__version__", "connect"]

_FROM_API = frozenset({"Database", "RefreshResult", "StreamTable", "StreamTableStatus", "Verification", "connect"})


def __getattr__(name: str) -> object:
    if name not in _FROM_API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pgtrickle.api import database

    value: object = getattr(database, name)
    globals()[name] = value  # the next access no longer comes here
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | _FROM_API)
