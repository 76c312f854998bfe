"""Citus: the nodes of a cluster, and the parts of distributed tables on them."""
