"""Training on several devices: rank 0 supervises worker ranks, which compute their rows of every batch."""
