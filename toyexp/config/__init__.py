"""Turn the command line and configuration files into the checked parts of a run (model, data, recipe, ...).

Only this package, cli, runner and sweeps use Hydra.
"""
