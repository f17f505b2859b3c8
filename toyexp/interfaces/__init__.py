"""Abstract base classes and plain data types that plugins implement and use."""
