"""The Python API: a database, its stream tables, other databases it reads, and errors as a Python user gets them."""
