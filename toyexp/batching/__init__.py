"""Data sets of tokens and images, whose batches can be made in any order: batch k depends on seed and k only."""
