"""Claims on stream tables, and the leases that they hold under."""
