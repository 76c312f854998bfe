"""Texts on Spark as if every stream table shared its own with others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pgtrickle.refresh.compute import shared_text


@contextmanager
def shared_from(number: int) -> Iterator[None]:
    """Texts are shared from so many stream tables on: with 1, each is written as one that others share."""
    before, shared_text.SHARED_FROM = shared_text.SHARED_FROM, number
    try:
        yield
    finally:
        shared_text.SHARED_FROM = before
