"""Deciding on the action of a refresh, by its sources and its cost."""
