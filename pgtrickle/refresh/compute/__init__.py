"""Running jobs on Spark: from fetched rows to the delta."""
