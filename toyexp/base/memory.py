"""Available memory of this process, and out-of-memory errors."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from toyexp.base.errors import RunFailed, printable

CGROUP_ROOT = Path("/sys/fs/cgroup")
TRAIN_REMEDY = (
    "reduce batch_size, model.context or model.d_model, or raise optim.accumulate, or set engine.recompute=true"
)
EVALUATE_REMEDY = "reduce batch_size or model.context"  # for commands that do not train


def available_bytes() -> int | None:
    """Return the bytes of memory that this process can still allocate; None if unknown.

    It is the minimum of what the machine, the container and `ulimit -v` leave free.
    """
    limits = list(_cgroup_limits())
    with contextlib.suppress(OSError, KeyError):
        meminfo = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text()))
        limits.append(1024 * (int(meminfo["MemAvailable"]) + int(meminfo["SwapFree"])))
    with contextlib.suppress(OSError, ValueError, ImportError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limits.append(max(limit - pages * os.sysconf("SC_PAGE_SIZE"), 0))
    if not limits:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # not available on Windows
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def _cgroup_limits() -> Iterator[int]:
    """Yield the free memory in bytes of each Linux control group (cgroup v2) that this process is in."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        group_path = CGROUP_ROOT / next(line for line in lines if line.startswith("0::")).removeprefix("0::/")
        for group in (group_path, *group_path.parents):
            if group.is_relative_to(CGROUP_ROOT) and (limit := _read(group / "memory.max")) is not None:
                cache = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
                yield max(limit - (_read(group / "memory.current") or 0) + int(cache[1] if cache else 0), 0)


def _read(path: Path) -> int | None:
    text = path.read_text().strip() if path.is_file() else "max"
    return None if text == "max" else int(text)


@contextlib.contextmanager
def convert_memory_errors(remedy: str = TRAIN_REMEDY) -> Iterator[None]:
    """Convert out-of-memory errors of Python and PyTorch to a RunFailed whose message ends with `remedy`."""
    try:
        yield
    except MemoryError as error:
        raise RunFailed(f"out of memory ({str(error) or 'allocation failed'}); {remedy}") from error
    except RuntimeError as error:  # PyTorch has no type for it, only the message
        if not re.search(r"out of memory|allocate memory", str(error)):
            raise
        message = str(error).strip().splitlines()[0].rpartition("DefaultCPUAllocator: ")[2]
        raise RunFailed(f"out of memory ({printable(message, 160)}); {remedy}") from error
