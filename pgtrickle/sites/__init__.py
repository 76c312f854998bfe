"""The sites that sources are read from, apart from the home database."""
