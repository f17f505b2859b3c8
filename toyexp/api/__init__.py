"""The Python API, for programs and notebooks. It calls the same functions as the command line."""
