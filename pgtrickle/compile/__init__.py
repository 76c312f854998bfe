"""From a plan to the texts that run it: placement of its parts, PostgreSQL's SQL, Spark's SQL and the apply."""
