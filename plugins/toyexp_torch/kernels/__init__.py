"""Triton kernels, and matrices that stay in the types of a GGUF file."""
