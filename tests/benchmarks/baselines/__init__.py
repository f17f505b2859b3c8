"""The training loops that `toyexp bench --baseline` compares with engines.

Every other file here lists its classes as BASELINES; their constructors take (plan, adamw, engine). ENGINE names the
engine whose library the file uses, so that a measuring process imports no other. BESIDE lists the engines that the
file is compared with, and KEEPS the engine settings that it supports.
"""

import runpy
from dataclasses import replace
from pathlib import Path

from toyexp import AdamW, UserError
from toyexp.cli.bench_stepper import Entry


def entries(settings, engines):
    """Yield, by name, an entry for each baseline of these engines, or the reason why it is unavailable."""
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        try:
            module = runpy.run_path(str(path))
        except ImportError as error:
            yield path.stem.replace("_", " "), str(error)
            continue
        if not module["BESIDE"] & set(engines):
            continue
        keys = tuple(f"engine.{key}=" for key in module["KEEPS"])
        kept = [s for s in settings if not s.startswith("engine.") or s.startswith(keys)]
        for baseline in module["BASELINES"]:
            yield baseline.name, Entry(baseline.name, kept, module["ENGINE"], str(path))


def opened(entry, prepared):
    """Open the baseline with the inputs that an engine gets."""
    group = prepared.plan.updates[0]
    if not isinstance(group.rule, AdamW):
        raise UserError(f"--baseline: the baselines train with AdamW; leave optim={prepared.optim.name} out")
    adamw = replace(group.rule, lr=prepared.config.settings.lr, weight_decay=group.weight_decay)
    make = {baseline.name: baseline for baseline in runpy.run_path(entry.file)["BASELINES"]}[entry.name]
    return make(prepared.plan, adamw, prepared.config.engine)
