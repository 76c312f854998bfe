"""Why a query cannot be maintained differentially."""

from __future__ import annotations

from sqlglot import exp


class Unsupported(Exception):
    """Raised while a plan is built; the caller turns it into FULL or into an error that names reason and fragment."""

    def __init__(self, reason: str, node: exp.Expression | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fragment = node.sql(dialect="postgres") if node is not None else None
