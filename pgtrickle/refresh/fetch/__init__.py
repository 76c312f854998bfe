"""Reading changes and lookups from PostgreSQL in the snapshot of the cut."""
