"""Text for what runs a plan: where each part runs, PostgreSQL's SQL, Spark's SQL and the apply."""
