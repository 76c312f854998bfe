"""Spark in this process: its session, its files, and the code that runs in its workers."""
