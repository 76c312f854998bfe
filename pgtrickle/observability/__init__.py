"""Looking at a service from outside: how busy its workers are, what its settings should be, what it costs."""
