"""How much torch's tensors take on the CPU, by its own count of what it allocates and frees."""

from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def measure_peak_tensor_bytes(call):
    """The most bytes that are allocated at a time in `call()`, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
