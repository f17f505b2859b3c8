"""Runs that are there: found, read, chosen, compared and shown."""
