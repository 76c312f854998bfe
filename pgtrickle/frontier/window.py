"""The condition for changes between a frontier and the cut."""

from __future__ import annotations

from psycopg import sql

from pgtrickle.frontier.snapshot import Snapshot


def since(frontier: Snapshot, column: str) -> sql.Composable:
    """A condition for changes that the frontier's snapshot did not see. The cut's own snapshot hides uncommitted ones.

    `NOT pg_visible_in_snapshot(…)` is not used: during a long transaction it would test every row again.
    """
    condition = sql.SQL("{} >= {}").format(sql.Identifier(column), sql.Literal(frontier.xmax))
    if frontier.in_progress:
        running = sql.SQL("{} = ANY ({})").format(sql.Identifier(column), sql.Literal(list(frontier.in_progress)))
        condition = sql.SQL("({} OR {})").format(condition, running)
    if frontier.passed is not None:
        passed = sql.SQL("{} <> {}").format(sql.Identifier(column), sql.Literal(frontier.passed))
        condition = sql.SQL("({} AND {})").format(condition, passed)
    return condition
