"""Reference implementation in float64, with which every engine is compared."""
