"""The optimisers that ship with toyexp."""

from toyexp import Register, hookimpl


@hookimpl
def register_optimisers(register: Register) -> None:
    """Register the optimisers `adamw`, `sgd`, `lion`, `adafactor` and `muon`."""
    from toyexp_optimisers.adamw import AdamWOptimiser
    from toyexp_optimisers.muon import Adafactor, Muon
    from toyexp_optimisers.sgd import SGD, Lion

    register(AdamWOptimiser)
    register(SGD)
    register(Lion)
    register(Adafactor)
    register(Muon)
