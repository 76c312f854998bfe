"""The transaction that brings a delta into the stream table."""
