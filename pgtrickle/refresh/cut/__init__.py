"""One consistent state of a database, and what happened to the sources until then."""
