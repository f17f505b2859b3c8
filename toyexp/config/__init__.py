"""From typed words to checked parts; with commands/ the only place that knows Hydra."""
