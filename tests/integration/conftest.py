"""Fixtures for tests that need more than one server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pgtrickle.embedded.server import EmbeddedServer
from tests.support.citus import servers
from tests.support.citus_shop import Shop, citus_shop


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[EmbeddedServer]]:
    """Four servers with Citus: a coordinator, two workers, and one that can be added."""
    with servers(4) as made:
        yield made


@pytest.fixture
def shop(nodes: list[EmbeddedServer]) -> Iterator[Shop]:
    """The shop of the Citus tests; other tests have their own."""
    with citus_shop(nodes) as made:
        yield made
