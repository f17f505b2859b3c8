"""Preference objectives: of two completions of a prompt, the model prefers the chosen one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import toyexp
from toyexp import AdaptedWeight, InputSpec, Model, Objective, Ops, Params, Plan, PlanTensor, Tensor, UserError

KINDS = ("dpo", "ipo", "hinge", "kto", "orpo", "simpo")
WITHOUT_REFERENCE = ("orpo", "simpo")
PREFIX = "reference."


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
        if self.kind not in KINDS:
            raise UserError(f"objective.kind={self.kind}: {toyexp.suggest(self.kind, KINDS)}")
        if not 0 < self.beta < float("inf") or not 0 <= self.gamma < float("inf"):
            raise UserError(f"objective: beta={self.beta} must be above 0, and gamma={self.gamma} at least 0")

    def check_inputs(self, model: Model, inputs: Mapping[str, InputSpec]) -> None:
        """Raise UserError unless the batch has pairs of rows with a mask of their completions."""
        if "mask" not in inputs or inputs["weights"].shape != ():
            raise UserError(
                "objective=preference: needs pairs of completions; use data=preference data.path=FILE.jsonl"
            )

    def tensors(self, plan: Plan) -> Sequence[PlanTensor]:
        """Return the reference: frozen copies of the plan's tensors, as they are before training.

        There are none if the kind needs no reference, or if the plan trains adapters: the weights below the adapters
        are the reference then.
        """
        if self.kind in WITHOUT_REFERENCE or plan.adapters:
            return ()
        return [replace(t, name=PREFIX + t.name, trainable=False) for t in plan.tensors]

    def loss(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum over pairs of the loss of `kind`, from log-probabilities of whole completions.

        With the difference d of the two completions' log-ratios to the reference, dpo is -log sigmoid(beta d)
        (Rafailov et al. 2023), ipo (d - 1/(2 beta))^2 with ratios per token (Azar et al. 2023), hinge
        max(0, 1 - beta d) (Zhao et al. 2023), kto the mean of 1 - sigmoid(+-beta ratio) (Ethayarajh et al. 2024). With
        the difference a of mean log-probabilities, simpo is -log sigmoid(beta a - gamma) (Meng et al. 2024). orpo adds
        -beta log sigmoid(log odds ratio) to the chosen completion's -log p per token (Hong et al. 2024).
        """
        by_pair = getattr(self, f"_{self.kind}")(ops, *self._log_probs(ops, model, p, batch))
        return ops.sum(ops.mul(by_pair, ops.add(*_pairs(ops, batch["weights"]))))

    def metrics(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return accuracy, the share of pairs whose chosen completion has the larger reward, and the mean margin.

        The reward is beta times the log-ratio to the reference, or times the mean log-probability without one.
        """
        total, mean, _ = self._log_probs(ops, model, p, batch)
        margin = ops.scale(_difference(ops, mean if self.kind in WITHOUT_REFERENCE else total), self.beta)
        weights = ops.add(*_pairs(ops, batch["weights"]))
        return {
            "accuracy": ops.sum(ops.mul(ops.step(margin), weights)),
            "margin": ops.sum(ops.mul(margin, weights)),
        }

    def _log_probs(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return three tensors [B]: log-probability of each completion, the same per token, and its number of tokens.

        With a reference, the reference's log-probability is subtracted.
        """
        mask = batch["mask"]
        length = ops.sum(mask, 1)

        def measure(params: Params) -> Tensor:
            log_probs = ops.token_log_probs(model.forward(ops, params, batch), batch["targets"])
            return ops.sum(ops.mul(log_probs, mask), 1)

        total = measure(p)
        if self.kind not in WITHOUT_REFERENCE:
            total = ops.add(total, ops.scale(measure(_reference(p)), -1.0))
        return total, ops.div(total, length), length

    @staticmethod
    def _losses(ops: Ops, x: Tensor) -> Tensor:
        """Return -log sigmoid(x)."""
        return ops.softplus(ops.scale(x, -1.0))

    def _dpo(self, ops: Ops, total: Tensor, mean: Tensor, length: Tensor) -> Tensor:
        return self._losses(ops, ops.scale(_difference(ops, total), self.beta))

    def _ipo(self, ops: Ops, total: Tensor, mean: Tensor, length: Tensor) -> Tensor:
        gap = ops.scale(_difference(ops, mean), 1.0, -1 / (2 * self.beta))
        return ops.mul(gap, gap)

    def _hinge(self, ops: Ops, total: Tensor, mean: Tensor, length: Tensor) -> Tensor:
        return ops.relu(ops.scale(_difference(ops, total), -self.beta, 1.0))

    def _kto(self, ops: Ops, total: Tensor, mean: Tensor, length: Tensor) -> Tensor:
        chosen, rejected = _pairs(ops, total)
        values = ops.sigmoid(ops.scale(chosen, -self.beta)), ops.sigmoid(ops.scale(rejected, self.beta))
        return ops.scale(ops.add(*values), 0.5)

    def _simpo(self, ops: Ops, total: Tensor, mean: Tensor, length: Tensor) -> Tensor:
        return self._losses(ops, ops.scale(_difference(ops, mean), self.beta, -self.gamma))

    def _orpo(self, ops: Ops, total: Tensor, mean: Tensor, length: Tensor) -> Tensor:
        chosen, rejected = _pairs(ops, mean)
        odds = [
            ops.add(a, ops.scale(ops.log(ops.scale(ops.exp(a), -1.0, 1.0 + 1e-7)), -1.0)) for a in (chosen, rejected)
        ]
        ratio = ops.add(odds[0], ops.scale(odds[1], -1.0))
        return ops.add(ops.scale(chosen, -1.0), ops.scale(self._losses(ops, ratio), self.beta))


def _reference(p: Params) -> Params:
    """Return the parameters of the reference: the tensors below `reference.`, or the weights without adapters."""
    if any(name.startswith(PREFIX) for name in p):
        return p.below(PREFIX)
    return Params({name: x.base if isinstance(x, AdaptedWeight) and x.low_rank else x for name, x in p.items()})


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
