"""The cut: a consistent snapshot of a database, and what happened to the sources up to it."""
