"""The time of a training step on Vulkan by op, and the number of waits between its nodes.

    python tests/benchmarks/vulkan_ops.py [100k|1m|6m] [engine] [rounds]

The engine is `vulkan` by default; `vulkan:half=true` is another. ggml reports the figures: one process runs with its
timer of ops, one with its log of waits, and one with neither, whose steps are timed; `ggml_cuda` is measured too if
available. With the timer, every op waits for the one before, so the times of ops add up to more than a step.
"""

import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict

TIMED = re.compile(r"(?P<op>[A-Z_0-9]+)\b.*: (?P<count>\d+) x [\d.e+-]+ us = (?P<total>[\d.e+-]+) us")
STEP = "-- a step"


def child(shape, engine, steps):
    """Take steps and print the milliseconds of each."""
    from toyexp.config.request import Request
    from toyexp.interfaces.recipe import start_session
    from toyexp.training.experiment import prepare

    request = Request.parse([f"experiment=bench_{shape}", "callbacks=[]", "steps=5"])
    ((_, asked),) = request.per_engine([engine]).items()
    prepared = prepare(asked.build_config())
    plan = prepared.plan
    with start_session(prepared.config.recipe, prepared.config.engine, plan) as session:
        print(f"{session.describe()['nodes']} nodes", flush=True)
        for step in range(steps):
            batch = prepared.batches.batch(step)
            sys.stdout.flush()
            print(STEP, file=sys.stderr, flush=True)
            began = time.perf_counter()
            session.step(batch, plan.numbers(step, 1e-3))
            print(f"{1000 * (time.perf_counter() - began):.3f} ms", flush=True)


def run(shape, engine, steps, **environment):
    """Run a separate process; return its output and the part of its log after the last step."""
    words = [sys.executable, __file__, "--child", shape, engine, str(steps)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise SystemExit(f"{engine}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout, done.stderr.rpartition(STEP)[2]


def milliseconds(shape, engine, rounds):
    """Return the median of the steps without the first few, and the number of nodes of a step."""
    out, _ = run(shape, engine, rounds + 3)
    return statistics.median(float(n) for n in re.findall(r"([\d.]+) ms", out.partition(" nodes")[2])[3:]), out.split()[
        0
    ]


def main():
    """Print the table."""
    shape, engine, rounds = ([*sys.argv[1:], *("1m", "vulkan", "20")[len(sys.argv) - 1 :]])[:3]
    took, nodes = milliseconds(shape, engine, int(rounds))
    _, waits = run(shape, engine, 2, GGML_VK_SYNC_LOGGER="1")
    out, log = run(shape, engine, 3, GGML_VK_PERF_LOGGER="1")
    timed = defaultdict(lambda: [0, 0.0])
    for line in (log if TIMED.search(log) else out).rpartition("Vulkan Timings")[2].splitlines():
        if found := TIMED.match(line):
            timed[found["op"]][0] += int(found["count"])
            timed[found["op"]][1] += float(found["total"])
    total = sum(us for _, us in timed.values())
    print(f"{engine}, bench_{shape}: {took:.2f} ms a step, {nodes} nodes, {waits.count('sync')} waits")
    print(f"its ops one by one, {total / 1000:.2f} ms in all:")
    for op, (count, us) in sorted(timed.items(), key=lambda item: -item[1][1]):
        print(f"  {op:<16} {count:>4} x {us / count:>9.1f} us = {us / 1000:>8.2f} ms  {us / total:>4.0%}")
    try:
        beside, nodes = milliseconds(shape, "ggml_cuda:tf32=true", int(rounds))
    except SystemExit as reason:
        print(reason)
        return
    print(
        f"ggml_cuda:tf32=true: {beside:.2f} ms a step, {nodes} nodes; {engine} takes {took / beside:.2f} times as long"
    )


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(*sys.argv[2:4], int(sys.argv[4]))
    else:
        main()
