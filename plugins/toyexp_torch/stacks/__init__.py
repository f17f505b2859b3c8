"""Stacks: several runs of one shape that are trained as one program."""
