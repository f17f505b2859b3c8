"""The focal loss, which counts targets less the better the model predicts them. Change it into your own objective.

`loss` runs the model and combines its logits with operations of `ops`, so every engine can compute and differentiate
it. Adapters, accumulation, checkpoints and stacks work without further code.
"""

from dataclasses import dataclass
from typing import ClassVar

from toyexp import Objective, UserError, hookimpl


@dataclass
class MyObjective(Objective):
    """Focal loss: -(1 - p)^gamma log p of the target's probability p (Lin et al. 2017)."""

    name: ClassVar[str] = "my_objective"  # the name to type: `objective=my_objective`
    metric_names: ClassVar[tuple[str, ...]] = ("confidence",)  # what `metrics` returns

    # Fields are settings: `objective.gamma=1.0`. The comment after a field is its help text.
    gamma: float = 2.0  # 0 is cross-entropy; larger values count well predicted targets less

    def check(self):
        """Raise UserError for bad settings. The message names the key, its value and the allowed values."""
        if not self.gamma >= 0:
            raise UserError(f"objective.gamma={self.gamma}: must be at least 0")

    def loss(self, ops, model, p, batch):
        """Return the loss, a scalar. `batch["weights"]` sum to 1, so the sum over all targets is a mean."""
        logits = model.forward(ops, p, batch)
        log_p = ops.token_log_probs(logits, batch["targets"])
        missing = ops.scale(ops.exp(log_p), -1.0, 1.0 + 1e-6)  # 1 - p, above 0
        focus = ops.exp(ops.scale(ops.log(missing), self.gamma))
        return ops.scale(ops.sum(ops.mul(ops.mul(focus, log_p), batch["weights"])), -1.0)

    def metrics(self, ops, model, p, batch):
        """Return metrics for evaluations: each is a weighted sum, as the loss is. This one is the targets' probability."""
        log_p = ops.token_log_probs(model.forward(ops, p, batch), batch["targets"])
        return {"confidence": ops.sum(ops.mul(ops.exp(log_p), batch["weights"]))}


@hookimpl
def register_objectives(register):
    """Register the class. toyexp calls this function when it loads the module."""
    register(MyObjective)
