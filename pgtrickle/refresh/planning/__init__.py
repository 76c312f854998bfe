"""Compiling a stream table's query to the jobs of a refresh. Both are cached for the next refresh."""
