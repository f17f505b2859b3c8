"""Batches of tokens and images, addressed by number."""
