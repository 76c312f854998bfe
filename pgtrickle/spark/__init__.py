"""Spark in this process: its session, its files, and what runs in its workers."""
