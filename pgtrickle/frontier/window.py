"""Which changes lie between a frontier and the cut."""

from __future__ import annotations

from psycopg import sql

from pgtrickle.frontier.snapshot import Snapshot


def since(frontier: Snapshot, column: str) -> sql.Composable:
    """Changes that the frontier's snapshot did not see. The cut's own snapshot hides what is not yet committed.

    Not `NOT pg_visible_in_snapshot(…)`: behind a long transaction that would test every row again.
    """
    condition = sql.SQL("{} >= {}").format(sql.Identifier(column), sql.Literal(frontier.xmax))
    if frontier.in_progress:
        running = sql.SQL("{} = ANY ({})").format(sql.Identifier(column), sql.Literal(list(frontier.in_progress)))
        condition = sql.SQL("({} OR {})").format(condition, running)
    if frontier.passed is not None:
        passed = sql.SQL("{} <> {}").format(sql.Identifier(column), sql.Literal(frontier.passed))
        condition = sql.SQL("({} AND {})").format(condition, passed)
    return condition
