"""What plugins are written in: abstract classes and plain data, and how plugins are found."""
