"""The commands: one module per command, or per small group of related commands."""
