"""Find, read, filter, compare and plot runs."""
