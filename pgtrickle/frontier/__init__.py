"""Frontiers: how far a stream table has read its sources."""
