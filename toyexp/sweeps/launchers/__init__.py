"""How the jobs of a sweep are started."""
