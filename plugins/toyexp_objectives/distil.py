"""Distillation: the model learns the probabilities that a teacher gives to all tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import toyexp
from toyexp import (
    Batch,
    InputSpec,
    Model,
    Objective,
    Ops,
    Params,
    Plan,
    Tensor,
    TensorSpec,
    UserError,
    is_changed,
    require_class_targets,
)
from toyexp.base import numpy as np
from toyexp.base import require_choice, require_range

KINDS = ("forward", "reverse", "jsd")
PREFIX = "teacher."


@dataclass
class Distil(Objective):
    """Divergence from a teacher's token probabilities, mixed with cross-entropy."""

    name: ClassVar[str] = "distil"
    in_nats: ClassVar[bool] = True
    metric_names: ClassVar[tuple[str, ...]] = ("kl",)

    teacher: str | None = None  # model with the same tokenizer: a model file, a run's directory, or a checkpoint's
    kind: str = "forward"  # divergence: forward (KL from teacher to model) | reverse | jsd (a mean of both)
    temperature: float = 2.0  # divisor of both models' logits
    hard: float = 0.5  # share of cross-entropy with the data's targets; the rest is the divergence
    beta: float = 0.5  # with kind=jsd: share of the teacher in the mixture
    top_k: int = 0  # learn only the teacher's k likeliest tokens, computed once before training; 0: all, in each step

    def check(self) -> None:
        """Raise UserError for invalid settings or without a teacher."""
        if not self.teacher:
            raise UserError("objective=distil needs a teacher: add objective.teacher=model.gguf")
        require_choice("objective", self, kind=KINDS)
        require_range("objective", self, temperature="[0.001,1000]", hard="[0,1]", beta="(0,1)")
        if self.top_k < 0 or (self.top_k and self.kind != "forward"):
            problem = "must be at least 0" if self.top_k < 0 else f"needs kind=forward, not {self.kind}"
            raise UserError(f"objective.top_k={self.top_k}: {problem}; top_k=0 uses all tokens")

    def warnings(self) -> Iterable[str]:
        """Warn of settings that have no effect."""
        if self.kind != "jsd" and is_changed(self, "beta"):
            yield f"objective.beta={self.beta}: has no effect with objective.kind={self.kind}; it applies to kind=jsd"
        if self.hard == 1:
            yield "objective.hard=1: the teacher has no effect on training"

    def model_file(self) -> Path | None:
        """Return the teacher's GGUF file."""
        return toyexp.find_model_file(Path(self.teacher)) if self.teacher else None

    def check_inputs(self, model: Model, inputs: Mapping[str, InputSpec]) -> None:
        """Raise UserError if targets are not tokens, or if the teacher has another vocabulary or a shorter context."""
        require_class_targets(self.name, inputs)
        if self.second_model is None:
            raise UserError("objective=distil: the teacher is not loaded")
        if self.top_k > getattr(self.second_model, "vocab", 0):
            raise UserError(f"objective.top_k={self.top_k}: the teacher has {self.second_model.vocab} tokens")
        other = getattr(self.second_model, "vocab", None)
        mine = getattr(model, "vocab", other if model.reads == self.second_model.reads else None)  # e.g. a torch module
        if mine != other:
            problem = f"the teacher has {other} tokens, the model {mine}"
            file = self.teacher if str(self.teacher).endswith(".gguf") else self.model_file()
            raise UserError(f"objective.teacher={self.teacher}: {problem}; add data.tokenizer={file}")
        if 0 < self.second_model.context < max(model.context, 1):
            problem = f"the teacher's context is {self.second_model.context}, the model's {model.context}"
            raise UserError(
                f"objective.teacher={self.teacher}: {problem}; set model.context={self.second_model.context}"
            )

    def tensors(self, plan: Plan) -> Sequence[TensorSpec]:
        """Return the teacher's tensors. They are not trained, and engines may map quantised tensors from the file.

        With top_k there are none, because training does not run the teacher.
        """
        assert self.second_model is not None
        if self.top_k:
            return []
        path = str(self.model_file())
        return [
            TensorSpec(PREFIX + t.name, t.shape, toyexp.FromGGUF(path, t.name)) for t in self.second_model.tensors()
        ]

    def precomputed(self, inputs: Mapping[str, InputSpec]) -> Mapping[str, InputSpec]:
        """Return the ids of the teacher's top_k tokens for each target, and their log-probabilities."""
        if not self.top_k:
            return {}
        shape = (*inputs["targets"].shape, self.top_k)
        return {"teacher_ids": InputSpec(shape, "int32"), "teacher_log_probs": InputSpec(shape, "float32")}

    def precompute(self, log_probs: np.ndarray, batch: Batch) -> Mapping[str, np.ndarray]:
        """Return ids and log-probabilities of the top_k tokens of each target."""
        ids = np.argpartition(-log_probs, self.top_k - 1, -1)[..., : self.top_k].astype(np.int32)
        return {"teacher_ids": ids, "teacher_log_probs": np.take_along_axis(log_probs, ids, -1)}

    def loss(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return hard * cross-entropy + (1 - hard) * T^2 * divergence, as a weighted sum over targets.

        `hard` is a setting, and T is the setting `temperature`, which divides the logits in the divergence. The factor
        T^2 keeps the gradients of the divergence comparable (Hinton et al. 2015). The divergence `jsd` is the
        generalised Jensen-Shannon divergence beta KL(p, m) + (1 - beta) KL(q, m), m = beta p + (1 - beta) q, for the
        teacher's probabilities p and the model's q (Agarwal et al. 2023). With the setting `top_k`, the divergence is
        a sum over the teacher's top_k tokens, and p is 0 for all other tokens.
        """
        logits = model.forward(ops, p, batch)
        teacher, ids = self._teacher(ops, p, batch)
        soft = self._divergence(ops, logits, teacher, self.kind, self.temperature, ids)
        total = ops.sum(ops.mul(soft, ops.scale(batch["weights"], (1 - self.hard) * self.temperature**2)))
        if self.hard == 0:
            return total
        hard = ops.cross_entropy(logits, batch["targets"], batch["weights"])
        return ops.add(total, ops.scale(hard, self.hard))

    def held_out_loss(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross-entropy with the data's targets, so that distilled and other runs can be compared."""
        return ops.cross_entropy(model.forward(ops, p, batch), batch["targets"], batch["weights"])

    def metrics(self, ops: Ops, model: Model, p: Params, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return kl: KL(teacher, model) at temperature 1, in nats per target."""
        teacher, ids = self._teacher(ops, p, batch)
        kl = self._divergence(ops, model.forward(ops, p, batch), teacher, "forward", 1.0, ids)
        return {"kl": ops.sum(ops.mul(kl, batch["weights"]))}

    def _teacher(self, ops: Ops, p: Params, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the teacher's logits and None; with top_k, log-probabilities of its likeliest tokens and their ids."""
        if self.top_k:
            return batch["teacher_log_probs"], batch["teacher_ids"]
        assert self.second_model is not None
        return self.second_model.forward(ops, p.below(PREFIX), batch), None

    def _divergence(
        self, ops: Ops, logits: Tensor, teacher: Tensor, kind: str, temperature: float, ids: Tensor | None = None
    ) -> Tensor:
        """Return the divergence of each position [B, T], in nats. `teacher` are logits of all tokens, or of `ids`."""
        log_q, log_p = (ops.log_softmax(ops.scale(x, 1 / temperature)) for x in (logits, teacher))
        if ids is not None:
            log_q = ops.take(log_q, ids)
        if kind == "forward":
            return _kl(ops, log_p, log_q)
        if kind == "reverse":
            return _kl(ops, log_q, log_p)
        mixture = ops.add(ops.scale(ops.exp(log_p), self.beta), ops.scale(ops.exp(log_q), 1 - self.beta, 1e-30))
        log_m = ops.log(mixture)
        parts = ops.scale(_kl(ops, log_p, log_m), self.beta), ops.scale(_kl(ops, log_q, log_m), 1 - self.beta)
        return ops.add(*parts)


def _kl(ops: Ops, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the sum over the last axis of p (log p - log q)."""
    return ops.sum(ops.mul(ops.exp(log_p), ops.add(log_p, ops.scale(log_q, -1.0))), len(log_p.shape) - 1)
