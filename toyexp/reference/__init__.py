"""Everything once more in float64: the ruler."""
