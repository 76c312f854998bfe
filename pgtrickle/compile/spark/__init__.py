"""Spark SQL with the semantics of PostgreSQL's operators."""
