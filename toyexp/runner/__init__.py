"""One experiment from a request."""
