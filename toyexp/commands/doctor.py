"""What runs where: the graphs of an experiment, op by op, for `toyexp doctor --graph`."""

from __future__ import annotations

from collections.abc import Iterable

from toyexp.commands.variants import Variant
from toyexp.contract.recipe import start


def report(variants: Iterable[Variant]) -> list[str]:
    """For each engine, on which device the nodes of its training step run, and which ops they are."""
    lines = []
    for variant in variants:
        prepared = variant.prepared
        with start(prepared.config.recipe, prepared.config.engine, prepared.plan) as session:
            facts = session.describe()
        where = facts.get("residency")
        if where is None:
            lines.append(f"{variant.label}: builds no graph of its own, so there is nothing to place")
            continue
        size = f"{facts['nodes']} nodes, {facts['off_device']} off the device, {facts['compute_bytes'] / 1e6:.1f} MB"
        lines.append(f"{variant.label}: {facts['profile']}'s graph, {size}")
        for device, ops in where.items():
            named = ", ".join(f"{op} {n}" for op, n in sorted(ops.items(), key=lambda item: -item[1]))
            lines.append(f"  {device:<8} {sum(ops.values()):>5}  {named}")
    return lines
