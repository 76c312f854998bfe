"""What planning one query may cost.

Plans of joins within each other multiply, so planning counts the operators it makes and looks at the clock, and ends where a
limit is passed: without them it would end when memory does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from pgtrickle.query.unsupported import Unsupported

MOST_MADE = 100_000  # operators, of all plans on the way to the last; about 100 MB
MOST_CHARACTERS = 8_000_000  # of one statement
MOST_SECONDS = 5.0  # of this thread's processor time: what others do meanwhile does not count
NESTED = "the query is nested too deeply"
STEPS_PER_LOOK = 64  # at the clock


class OverBudget(Unsupported):
    """Planning a query costs more than it may."""


@dataclass
class Budget:
    """The limits of planning one query, and what is used of them."""

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
    """What is planned in the block is counted; raises OverBudget where it costs too much."""
    token = _current.set(budget)
    try:
        yield
    except RecursionError:
        raise OverBudget(NESTED) from None
    finally:
        _current.reset(token)


def count_operator() -> None:
    """An operator is made."""
    budget = _current.get()
    if budget is not None:
        budget.count_operator()


def count_step() -> None:
    """An operator is visited."""
    budget = _current.get()
    if budget is not None:
        budget.count_step()


def check_text(text: str) -> str:
    """The text, if it is not too long."""
    budget = _current.get()
    if budget is not None:
        budget.count_step()
        budget.check_text(text)
    return text
