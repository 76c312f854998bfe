"""The apply: the transaction that writes a delta to the stream table."""
