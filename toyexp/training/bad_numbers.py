"""Why a run ends at a loss or gradient that is no finite number, in words."""

from __future__ import annotations

import numpy as np

from toyexp.base.errors import RunFailed
from toyexp.contract.batch import Batch
from toyexp.contract.run import Run
from toyexp.contract.session import Session


def gave_up(run: Run, place: str, what: str, batch: Batch, in_a_row: int) -> RunFailed:
    """The error of the run's last step, with the first tensor that is no number and what may help."""
    skipped = f"; {in_a_row} steps in a row were skipped" if in_a_row > 1 else ""
    skip = "" if run.plan.skip_nonfinite else ", or nonfinite=skip"
    first = first_bad_tensor(run.session, batch)
    return RunFailed(f"{place}: {what}{skipped}; {first}; {run.remedy}, optim.grad_clip=1{skip}")


def first_bad_tensor(session: Session, batch: Batch) -> str:
    """Words for where numbers are not finite: the first such weight in the model's order, else the first gradient.

    An engine may have taken the bad step before it was seen, and then weights are no numbers either.
    """
    for kind, values in (("weight", session.download), ("gradient", session.gradients(batch).__getitem__)):
        for tensor in session.plan.tensors if kind == "weight" else session.plan.trainable:
            bad = int((~np.isfinite(values(tensor.name))).sum())
            if bad:
                return f"the first {kind} that is not finite is {tensor.name} ({bad} of {tensor.size} numbers)"
    return "all weights and gradients are finite, so the loss or the norm itself overflowed"
