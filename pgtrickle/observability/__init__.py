"""Observing a service: logs, metrics over HTTP, samples of the worker pool, and advice on its settings."""
