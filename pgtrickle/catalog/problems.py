"""Remedies for missing parts and rights of stream tables, as reported by _ownership_problem() and similar functions."""

from __future__ import annotations

from pgtrickle.errors import PrivilegeError


def problem_remedy(name: str, problem: str) -> str:
    if "query view was dropped" in problem:
        return f"Give it a query that works with `pgtrickle alter {name} --query …`, or drop it."
    if "may not" in problem:
        return f"Give the right back to the stream table's owner; then run `pgtrickle alter {name} --status ACTIVE`."
    if "row-level security" in problem:
        return "Policies on a source cannot be followed: let a role own the stream table that sees all rows, or take them off."
    return "Drop the stream table and create it again."


def lacking(name: str, problem: str) -> PrivilegeError:
    """The error for a stream table that cannot be refreshed because a part or a right is missing."""
    return PrivilegeError(f"{name} cannot be refreshed: {problem}", problem_remedy(name, problem))
