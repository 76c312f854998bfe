"""Texts on Spark as if every stream table shared its own with others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pgtrickle.engine import sharing


@contextmanager
def shared_from(number: int) -> Iterator[None]:
    """Texts are shared from so many stream tables on: with 1, each is written as one that others share."""
    before, sharing.SHARED_FROM = sharing.SHARED_FROM, number
    try:
        yield
    finally:
        sharing.SHARED_FROM = before
