"""A PostgreSQL of our own, for the demo and the tests."""
