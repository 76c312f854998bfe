"""The demonstration: a shop that somebody works in, and stream tables over it."""
