"""Sessions with PostgreSQL: connections, transactions, COPY, and the fence around owners' code."""
