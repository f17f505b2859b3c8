"""One run, from its parts to its directory."""
