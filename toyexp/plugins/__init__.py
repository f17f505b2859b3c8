"""How plugins are found, what they must be, and what there is of each kind."""
