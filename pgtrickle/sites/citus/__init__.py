"""Citus: the nodes of a cluster, and the shards of distributed tables on them."""
