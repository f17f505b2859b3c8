"""From typed words to checked parts; with cli/, runner/ and sweeps/ the only place that knows Hydra."""
