"""Rewrites to equivalent plans that are cheaper to maintain, one per file."""
