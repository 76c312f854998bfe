"""Limits on the cost of planning one query.

The plans of nested joins multiply. Planning therefore counts the operators that it creates, checks its processor time,
and stops when a limit is exceeded. Without limits it would continue until memory is exhausted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from pgtrickle.query.unsupported import Unsupported

MOST_MADE = 100_000  # operators in all plans, intermediate ones included; about 100 MB
MOST_CHARACTERS = 8_000_000  # in one statement
MOST_SECONDS = 5.0  # of this thread's processor time: other threads do not count
NESTED = "the query is nested too deeply"
STEPS_PER_LOOK = 64  # steps between two checks of the clock


class OverBudget(Unsupported):
    """Planning a query exceeds its budget."""


@dataclass
class Budget:
    """The limits for planning one query, and how much of them is used."""

    operators: int = MOST_MADE
    characters: int = MOST_CHARACTERS
    seconds: float = MOST_SECONDS
    made: int = 0
    steps: int = 0
    _started: float = field(default_factory=time.thread_time)

    def count_operator(self) -> None:
        self.made += 1
        if self.made > self.operators:
            raise OverBudget(f"planning its change takes more than {self.operators} operators")
        self.count_step()

    def count_step(self) -> None:
        self.steps += 1
        if self.steps % STEPS_PER_LOOK == 0 and time.thread_time() - self._started > self.seconds:
            raise OverBudget(f"planning its change takes more than {self.seconds:g} seconds")

    def check_text(self, text: str) -> None:
        if len(text) > self.characters:
            raise OverBudget(f"its change takes a statement of more than {self.characters} characters")


_current: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def planning_within(budget: Budget) -> Iterator[None]:
    """Charge planning in the block to the budget; raises OverBudget if it is exceeded."""
    token = _current.set(budget)
    try:
        yield
    except RecursionError:
        raise OverBudget(NESTED) from None
    finally:
        _current.reset(token)


def count_operator() -> None:
    """Count an operator that is created."""
    budget = _current.get()
    if budget is not None:
        budget.count_operator()


def count_step() -> None:
    """Count an operator that is visited."""
    budget = _current.get()
    if budget is not None:
        budget.count_step()


def check_text(text: str) -> str:
    """Return the text; raises OverBudget if it is too long."""
    budget = _current.get()
    if budget is not None:
        budget.count_step()
        budget.check_text(text)
    return text
