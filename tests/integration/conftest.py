"""Fixtures for tests that need more than one server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pgtrickle.embedded.server import EmbeddedServer
from tests.support.citus import servers


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[EmbeddedServer]]:
    """Four servers with Citus: a coordinator, two workers, and one that can be added."""
    with servers(4) as made:
        yield made
