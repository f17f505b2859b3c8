"""Measure the memory of torch tensors on the CPU with the torch profiler."""

from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def measure_peak_tensor_bytes(call):
    """Return the peak of bytes that `call()` allocates for tensors, not counting earlier tensors."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
