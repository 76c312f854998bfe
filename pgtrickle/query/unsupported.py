"""The error for queries that cannot be maintained differentially."""

from __future__ import annotations

from collections.abc import Iterable

from sqlglot import exp


def require_only(node: exp.Expression, known: Iterable[str]) -> None:
    """Raise Unsupported if a syntax node has parts other than `known`: ignoring a part would produce wrong rows."""
    unknown = sorted(name for name, value in node.args.items() if value and name not in set(known))
    if unknown:
        raise Unsupported(f"{', '.join(unknown)} of {node.key.upper()} is not maintained differentially", node)


class Unsupported(Exception):
    """A query cannot be maintained differentially.

    Raised while a plan is built; the caller falls back to FULL, or raises an error with the reason and the fragment.
    """

    def __init__(self, reason: str, node: exp.Expression | None = None, *, time_dependent: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.time_dependent = time_dependent  # the result may change although the sources do not
        self.fragment = node.sql(dialect="postgres") if node is not None else None
