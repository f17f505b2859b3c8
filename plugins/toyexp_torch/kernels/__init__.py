"""Triton kernels, and frozen matrices that are kept in the quantised type of a GGUF file."""
