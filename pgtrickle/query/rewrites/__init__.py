"""Equivalent plans that are cheaper to maintain, one rewrite per file."""
