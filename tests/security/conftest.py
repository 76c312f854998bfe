"""Fixtures for tests that attack an installation."""

from tests.security.roles import roles

__all__ = ["roles"]
