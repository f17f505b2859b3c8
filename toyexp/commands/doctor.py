"""Which engines work here, what they compute and where: what `toyexp doctor` shows."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import toyexp
from toyexp.base.errors import UserError
from toyexp.base.terminal import tell
from toyexp.commands.first import after_the_doctor
from toyexp.commands.here import not_here, verdict
from toyexp.commands.variants import ALONE, on_engines, prepared_on
from toyexp.contract.command import Arguments
from toyexp.contract.plugins import load
from toyexp.contract.recipe import start
from toyexp.training.parts import Prepared

HELP = """\
usage: toyexp doctor [--numerics [engine=NAME,...]] [--graph [key=value ...]]

Which engines work here, and why the others do not.
  toyexp doctor
  toyexp doctor --numerics engine=ggml        whether it computes every op and a short training as float64 does
  toyexp doctor --graph engine=ggml model=gpt2  which ops of a training step run on which device

--numerics exits with 1 when something is off. plugins=[my_module] goes with both."""


def run(arguments: Arguments) -> int:
    """Tells of the engines, of their numbers, or of their graphs."""
    if "--graph" in arguments.switches:
        request, labels = on_engines("doctor --graph", arguments, {*ALONE, "steps", "lr", "callbacks"}, "ggml")
        print("\n".join(report(prepared_on(request, labels))))
        return 0
    if "--numerics" in arguments.switches:
        return _numerics(arguments)
    if arguments.settings:
        raise UserError(
            f"doctor {arguments.settings[0]}: takes --numerics or --graph and settings behind it, or nothing"
        )
    registry = load()
    tell(f"toyexp {toyexp.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    width = max((len(n) for n in registry.offers["engine"]), default=0)
    working = []
    for offer in registry.engines():
        told = verdict(offer)
        tell(f"  {offer.name:<{width}}  {told}")
        working += [offer.name] if told.startswith("PASS") else []
    for line in not_here(registry):
        tell(f"  {line}")
    for problem in registry.problems:
        tell(f"  broken plugin {problem.plugin} ({problem.package}): {problem.reason}")
    tell("\n".join(after_the_doctor(working)))
    return 0


def _numerics(arguments: Arguments) -> int:
    """Whether the engines compute every op's values and gradients, and a short training, as float64 does."""
    from toyexp.commands.doctor_numerics import engines, examine, references_for, table
    from toyexp.config.request import take_engines
    from toyexp.reference.opmodel import rows_for

    labels, strange = take_engines(arguments.rest, "")
    if strange:
        raise UserError(f"doctor --numerics {strange[0]}: takes engine=name[:key=value],... and plugins=[...]")
    chosen = engines(labels, load(arguments.modules))
    references = references_for([engine for _, engine in chosen])
    passed = True
    for label, engine in chosen:
        lines = list(examine(engine, *references[rows_for(engine)]))
        passed = passed and all(line.passed for line in lines)
        tell("\n".join(table(label, engine, lines)))
    return 0 if passed else 1


def report(runs: Mapping[str, Prepared]) -> list[str]:
    """For each engine, on which device the nodes of its training step run, and which ops they are."""
    lines = []
    for label, prepared in runs.items():
        with start(prepared.config.recipe, prepared.config.engine, prepared.plan) as session:
            facts = session.describe()
        where = facts.get("residency")
        if where is None:
            lines.append(f"{label}: builds no graph of its own, so there is nothing to place")
            continue
        size = f"{facts['nodes']} nodes, {facts['off_device']} off the device, {facts['compute_bytes'] / 1e6:.1f} MB"
        lines.append(f"{label}: {facts['profile']}'s graph, {size}")
        for device, ops in where.items():
            named = ", ".join(f"{op} {n}" for op, n in sorted(ops.items(), key=lambda item: -item[1]))
            lines.append(f"  {device:<8} {sum(ops.values()):>5}  {named}")
    return lines
