"""Up to where a stream table has seen its sources."""
