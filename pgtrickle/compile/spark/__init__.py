"""Spark's SQL for what PostgreSQL's operators mean."""
