"""Triton kernels, and weights that stay in the types of a GGUF file."""
