"""Sweeps whose points are chosen one by one."""
