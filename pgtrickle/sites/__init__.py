"""Where sources live, apart from the stream table's own database."""
