"""Errors for stream tables that lack a part or a right or were dropped, with remedies."""

from __future__ import annotations

from pgtrickle.errors import PrivilegeError, StreamTableNotFoundError


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


def dropped(name: str) -> StreamTableNotFoundError:
    """The error for a stream table that was dropped between the request for its refresh and the refresh."""
    return StreamTableNotFoundError(f"{name} was dropped while it was to be refreshed")
