"""Settings of the whole test suite."""

import os

# Tests share two cores with whatever else runs: a waiting thread that spins costs the others their time, up to a
# factor of ten. Read by OpenMP when the first library that uses it loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
