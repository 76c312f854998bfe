"""Who refreshes a stream table: claims, and the leases under which they are held."""
