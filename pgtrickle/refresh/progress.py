"""What happens to stream tables while they go through the stages of a refresh together."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psycopg

from pgtrickle.errors import PgtrickleError
from pgtrickle.refresh.apply.load import Staged
from pgtrickle.refresh.results import Phases
from pgtrickle.refresh.stages import Claimed, Decided
from pgtrickle.sites.failures import Failures
from pgtrickle.sites.stream_tables import StreamTable

log = logging.getLogger("pgtrickle.refresh")

T = TypeVar("T")

# Called with the name of each step when it is reached. Tests use it to stop a process there.
OnStep = Callable[[str], None]


@dataclass
class Progress:
    """The failures and durations of stream tables that go through the stages together."""

    conn: psycopg.Connection[Any]
    on_step: OnStep
    failed: Failures = field(default_factory=Failures)
    phases: defaultdict[int, Phases] = field(default_factory=lambda: defaultdict(Phases))
    tokens: dict[int, int] = field(default_factory=dict)  # of the claims
    decided: dict[int, Decided] = field(default_factory=dict)  # also of stream tables that failed afterwards
    staged: dict[int, Staged] = field(default_factory=dict)  # deltas in tables of their own
    resources: ExitStack = field(default_factory=ExitStack)  # to be released when the refresh ends

    def attempt(self, table: StreamTable, step: Callable[[], T]) -> T | None:
        """The result of a step for one stream table; None if it fails. The others go on without it."""
        try:
            return step()
        except Exception as error:
            if self.conn.broken or self.conn.closed:
                raise
            if not isinstance(error, psycopg.Error | PgtrickleError):
                log.exception("a refresh failed unexpectedly", extra={"stream_table": table.row.label})
            self.failed.add(error, [table])
            return None

    def note_claims(self, tables: Iterable[Claimed]) -> None:
        """Note the claims, which identify the refreshes in the log."""
        for table in tables:
            self.tokens[table.row.pgt_id] = table.token
            self.reached("claim", table, mode=table.row.refresh_mode)

    def reached(self, stage: str, table: StreamTable, **figures: object) -> None:
        """Log that a stream table has passed a stage."""
        if not log.isEnabledFor(logging.DEBUG):
            return
        shown = " ".join(f"{name}={value}" for name, value in figures.items())
        log.debug(
            "%s %s%s",
            stage,
            table.row.label,
            f": {shown}" if shown else "",
            extra={
                "stage": stage,
                "stream_table": table.row.label,
                "pgt_id": table.row.pgt_id,
                "claim": self.tokens.get(table.row.pgt_id),
                "figures": figures,
            },
        )
