"""Sweeps: run many jobs on one machine or a cluster."""
