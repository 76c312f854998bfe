"""What is due, in which order, and who gets the next worker. Without threads and connections."""
