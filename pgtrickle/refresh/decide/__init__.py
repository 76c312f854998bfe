"""What a refresh does, and what it costs."""
