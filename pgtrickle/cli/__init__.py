"""The command line, a thin layer over the API and the service."""
