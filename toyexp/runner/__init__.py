"""Prepare and run one experiment."""
