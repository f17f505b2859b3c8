"""Reference implementation of ops and optimisers in float64, with which the tests compare every engine."""
