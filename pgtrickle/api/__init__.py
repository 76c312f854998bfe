"""The Python API: databases and their stream tables, remote databases, and the translation of PostgreSQL's errors."""
