"""Let stream tables use shared texts on Spark even if there are no others to share with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pgtrickle.refresh.compute import shared_text


@contextmanager
def shared_from(number: int) -> Iterator[None]:
    """Set the number of stream tables from which they share a text; with 1, every stream table uses a shared text."""
    before, shared_text.SHARED_FROM = shared_text.SHARED_FROM, number
    try:
        yield
    finally:
        shared_text.SHARED_FROM = before
