"""From PostgreSQL's canonical text of a query to a plan, without a connection."""
