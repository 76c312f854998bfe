"""PostgreSQL sessions: connections, transactions, COPY, and the fence around owners' code."""
