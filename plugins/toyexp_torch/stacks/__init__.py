"""Stacks: several runs with the same shapes that are trained as one program."""
