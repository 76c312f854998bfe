"""From a stream table's query to the jobs of a refresh, kept for the next one."""
