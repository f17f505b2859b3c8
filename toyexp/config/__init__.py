"""Configuration: from typed words to checked parts. Only this package, cli, runner and sweeps use Hydra."""
