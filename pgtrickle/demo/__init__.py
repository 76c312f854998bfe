"""The demo: a shop with ongoing changes, and stream tables over it."""
