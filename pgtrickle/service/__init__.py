"""The service: looks after the stream tables of many databases by itself."""
