"""Why a query cannot be maintained differentially."""

from __future__ import annotations

from collections.abc import Iterable

from sqlglot import exp


def require_only(node: exp.Expression, known: Iterable[str]) -> None:
    """Refuse a syntax node with a part that its reader does not know: a part that is overlooked is a wrong row."""
    unknown = sorted(name for name, value in node.args.items() if value and name not in set(known))
    if unknown:
        raise Unsupported(f"{', '.join(unknown)} of {node.key.upper()} is not maintained differentially", node)


class Unsupported(Exception):
    """Raised while a plan is built; the caller turns it into FULL or into an error that names reason and fragment."""

    def __init__(self, reason: str, node: exp.Expression | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fragment = node.sql(dialect="postgres") if node is not None else None
