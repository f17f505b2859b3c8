"""What a Python program or a notebook calls, in place of a command line: the same functions do the work."""
