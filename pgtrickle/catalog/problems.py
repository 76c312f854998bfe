"""What helps a stream table that lacks a part or a right: the remedies for what _ownership_problem() and its like find."""

from __future__ import annotations


def problem_remedy(name: str, problem: str) -> str:
    if "query view was dropped" in problem:
        return f"Give it a query that works with `pgtrickle alter {name} --query …`, or drop it."
    if "may not" in problem:
        return f"Give the right back to the stream table's owner; then run `pgtrickle alter {name} --status ACTIVE`."
    return "Drop the stream table and create it again."
