"""Prepare, train, checkpoint and resume a run, and write its directory."""
