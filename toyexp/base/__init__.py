"""Python, files and words for people; no experiment in it."""
