"""Incremental view maintenance: from a query's plan to the plan of its change."""
