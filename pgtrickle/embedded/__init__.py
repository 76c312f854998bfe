"""An embedded PostgreSQL server for the demo and the tests."""
