"""The service, which keeps the stream tables of many databases fresh."""
