"""Launchers: a class for each value of sweep.launcher, which runs the jobs of a sweep."""
