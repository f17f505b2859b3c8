"""How the jobs of a sweep are run: a class for each value of sweep.launcher."""
