"""Batches by number."""
