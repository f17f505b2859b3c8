"""Preference objectives: of two completions of a prompt, the model prefers the chosen one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from toyexp import Batch, InputSpec, Model, Objective, Ops, Params, Tensor, UserError, is_changed
from toyexp.base import numpy as np
from toyexp.base import require_choice, require_range

KINDS = ("dpo", "ipo", "hinge", "kto", "orpo", "simpo")
WITHOUT_REFERENCE = ("orpo", "simpo")
TIE = 1e-4  # nats: smaller differences of log-probabilities are rounding errors of float32


@dataclass
class Preference(Objective):
    """Preference for chosen over rejected completions: DPO and its relatives, for data=preference."""

    name: ClassVar[str] = "preference"
    rows_together: ClassVar[int] = 2  # the chosen and the rejected completion
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy", "margin")

    kind: str = "dpo"  # dpo | ipo | hinge | kto (reference point 0) | orpo, simpo (both need no reference)
    beta: float = 0.1  # strength of the preference; for dpo, kto and ipo, larger values stay closer to the reference
    gamma: float = 0.5  # with kind=simpo: margin between the rewards

    def check(self) -> None:
        """Raise UserError for invalid settings."""
        require_choice("objective", self, kind=KINDS)
        require_range("objective", self, beta="[0.00001,1000]", gamma="[0,1000]")

    def warnings(self) -> Iterable[str]:
        """Warn if `gamma` has no effect."""
        if self.kind != "simpo" and is_changed(self, "gamma"):
            yield f"objective.gamma={self.gamma}: has no effect with objective.kind={self.kind}; it applies to simpo"

    def check_inputs(self, model: Model, inputs: Mapping[str, InputSpec]) -> None:
        """Raise UserError unless the batch has pairs of rows with a mask of their completions."""
        if "mask" not in inputs or inputs["weights"].shape != ():
            raise UserError(
                "objective=preference: needs pairs of completions; use data=preference data.path=FILE.jsonl"
            )

    def precomputed(self, inputs: Mapping[str, InputSpec]) -> Mapping[str, InputSpec]:
        """Return `reference`, the log-probability of each completion before training, if the kind needs it."""
        if self.kind in WITHOUT_REFERENCE:
            return {}
        return {"reference": InputSpec((), "float32")}

    def precompute(self, log_probs: np.ndarray, batch: Batch) -> Mapping[str, np.ndarray]:
        """Return the sum of the log-probabilities of each completion's tokens, [B]."""
        by_token = np.take_along_axis(log_probs, batch["targets"][..., None], -1)[..., 0]
        return {"reference": (by_token * batch["mask"]).sum(1)}

    def loss(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum over pairs of the loss that the setting `kind` names.

        Let c and r be log p - log p_reference of the chosen and the rejected completion, and n and k their lengths in
        tokens. Let u and v be their mean log p per token, and odds(p) = p / (1 - p):

        - dpo: -log sigmoid(beta (c - r)) (Rafailov et al. 2023)
        - ipo: (c/n - r/k - 1/(2 beta))^2 (Azar et al. 2023)
        - hinge: max(0, 1 - beta (c - r)) (Zhao et al. 2023)
        - kto: (sigmoid(-beta c) + sigmoid(beta r)) / 2 (Ethayarajh et al. 2024)
        - simpo: -log sigmoid(beta (u - v) - gamma) (Meng et al. 2024)
        - orpo: -u - beta log sigmoid(log odds(exp u) - log odds(exp v)) (Hong et al. 2024)
        """
        by_pair = self._by_pair(ops, *self._log_probs(ops, model, p, batch))
        return ops.sum(ops.mul(by_pair, ops.add(*_pairs(ops, batch["weights"]))))

    def metrics(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return two metrics of pairs of completions: `accuracy` and `margin`.

        The margin is the reward of the chosen completion minus that of the rejected one, and the accuracy is the share
        of pairs with a positive margin. A pair whose completions differ by at most TIE counts as half a pair. The
        reward is beta times the log-ratio of the model's and the reference model's probabilities. For a loss without a
        reference model, it is beta times the mean log-probability per token.
        """
        total, mean = self._log_probs(ops, model, p, batch)
        gap = _difference(ops, mean if self.kind in WITHOUT_REFERENCE else total)
        weights = ops.add(*_pairs(ops, batch["weights"]))
        wins = ops.add(*(ops.step(ops.scale(gap, 1.0, tie)) for tie in (-TIE, TIE)))
        return {
            "accuracy": ops.sum(ops.mul(wins, ops.scale(weights, 0.5))),
            "margin": ops.sum(ops.mul(gap, ops.scale(weights, self.beta))),
        }

    def _log_probs(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return two tensors [B]: the log-probability of each completion, and the same per token.

        If the loss uses a reference model, the reference's log-probability is subtracted from the model's.
        """
        mask = batch["mask"]
        log_probs = ops.token_log_probs(model.forward(ops, p, batch), batch["targets"])
        total = ops.sum(ops.mul(log_probs, mask), 1)
        if self.kind not in WITHOUT_REFERENCE:
            total = ops.add(total, ops.scale(batch["reference"], -1.0))
        return total, ops.div(total, ops.sum(mask, 1))

    def _by_pair(self, ops: Ops, total: Tensor, mean: Tensor) -> Tensor:
        """Return the loss of each pair, [B/2], for the results of `_log_probs`."""

        def surprise(x: Tensor) -> Tensor:
            return ops.softplus(ops.scale(x, -1.0))  # -log sigmoid(x)

        values = total if self.kind in ("dpo", "hinge", "kto") else mean
        (chosen, rejected), gap = _pairs(ops, values), _difference(ops, values)
        if self.kind == "dpo":
            return surprise(ops.scale(gap, self.beta))
        if self.kind == "ipo":
            error = ops.scale(gap, 1.0, -1 / (2 * self.beta))
            return ops.mul(error, error)
        if self.kind == "hinge":
            return ops.relu(ops.scale(gap, -self.beta, 1.0))
        if self.kind == "kto":
            shares = ops.sigmoid(ops.scale(chosen, -self.beta)), ops.sigmoid(ops.scale(rejected, self.beta))
            return ops.scale(ops.add(*shares), 0.5)
        if self.kind == "simpo":
            return surprise(ops.scale(gap, self.beta, -self.gamma))
        odds = ops.div(*(ops.scale(ops.exp(x), -1.0, 1.0 + 1e-7) for x in (rejected, chosen)))
        return ops.add(ops.scale(chosen, -1.0), ops.scale(surprise(ops.add(gap, ops.log(odds))), self.beta))


def _pairs(ops: Ops, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values [B/2] of the chosen rows and those of the rejected rows, for x [B]."""
    count = x.shape[0] // 2
    by_pair = ops.reshape(x, (count, 2))
    chosen, rejected = (ops.reshape(ops.part(by_pair, 1, i, i + 1), (count,)) for i in (0, 1))
    return chosen, rejected


def _difference(ops: Ops, x: Tensor) -> Tensor:
    """Return the values of the chosen rows minus those of the rejected rows, [B/2] for x [B]."""
    chosen, rejected = _pairs(ops, x)
    return ops.add(chosen, ops.scale(rejected, -1.0))
