"""The stream tables that failed in one pass of a refresh."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from pgtrickle.catalog.problems import lacking
from pgtrickle.sites.stream_tables import StreamTable

S = TypeVar("S", bound=StreamTable)


@dataclass
class Failures:
    """The errors of stream tables, by id. One that has failed takes no part in the stages that follow."""

    errors: dict[int, Exception] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)  # for which a stream table is suspended

    def add(self, error: Exception, values: Iterable[StreamTable]) -> None:
        """Let these stream tables fail with an error."""
        self.errors |= {value.row.pgt_id: error for value in values}

    def suspend(self, value: StreamTable, problem: str) -> None:
        """Let a stream table fail because a part or a right is missing, which a retry cannot help."""
        self.errors[value.row.pgt_id] = lacking(value.row.label, problem)
        self.problems[value.row.pgt_id] = problem

    def forgive(self, value: StreamTable) -> None:
        """Let the stream table take part again."""
        self.errors.pop(value.row.pgt_id, None)
        self.problems.pop(value.row.pgt_id, None)

    def of(self, value: StreamTable) -> Exception | None:
        return self.errors.get(value.row.pgt_id)

    def healthy(self, values: Iterable[S]) -> list[S]:
        """Those that have not failed."""
        return [value for value in values if value.row.pgt_id not in self.errors]
