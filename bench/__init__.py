"""Measurements: what a refresh costs, what capture costs the writer, what refreshing together saves."""
