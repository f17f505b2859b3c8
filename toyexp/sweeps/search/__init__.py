"""Searches: sweeps that choose their trials one by one with Optuna."""
