"""Pure scheduling logic, without threads and connections: what is due, in which order, and what runs next."""
