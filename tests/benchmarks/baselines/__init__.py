"""The loops that `toyexp bench --baseline` sets beside the engines.

Every other file here lists its classes as BASELINES, whose constructors take (plan, adamw, engine), and names the
ENGINE whose library it uses: the process that measures one alone imports no other. BESIDE are the engines that it is
set beside, and KEEPS the settings of engines that it goes by too.
"""

import runpy
from dataclasses import replace
from pathlib import Path

from toyexp import AdamW, UserError
from toyexp.cli.bench_stepper import Entry


def entries(settings, engines):
    """Each for one of these engines by its name, as an entry or as the reason why there is none.

    `settings` are those of the experiment, and of all engines.
    """
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
    """The baseline with what an engine would be given."""
    group = prepared.plan.updates[0]
    if not isinstance(group.rule, AdamW):
        raise UserError(f"--baseline: the baselines train with AdamW; leave optim={prepared.optim.name} out")
    adamw = replace(group.rule, lr=prepared.config.settings.lr, weight_decay=group.weight_decay)
    make = {baseline.name: baseline for baseline in runpy.run_path(entry.file)["BASELINES"]}[entry.name]
    return make(prepared.plan, adamw, prepared.config.engine)
