"""Use finished models: evaluate, predict, write text, inspect, export and merge."""
