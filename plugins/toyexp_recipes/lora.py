"""LoRA: a frozen model, and low-rank updates of chosen linears that alone are trained (Hu et al. 2021).

The seed's LoRAMetal: A [r, in] from N(0, init_scale), B [out, r] zero, so that training starts from the base itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar

from toyexp import (
    Constant,
    InputSpec,
    LoraAdapter,
    Model,
    Normal,
    Plan,
    Planned,
    PlanTensor,
    Setup,
    TensorSpec,
    UserError,
    choose,
    lora_names,
)
from toyexp.base import require_positive, require_within
from toyexp_recipes.base import FromBase

SHORT = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "qkv": "attn_qkv",
         "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}  # fmt: skip
QUERIES = ("attn_q", "attn_qkv")  # what is adapted by default: the first that the model has


@dataclass
class Lora(FromBase):
    """Low-rank adapters on a frozen GGUF model."""

    name: ClassVar[str] = "lora"
    hint: ClassVar[str] = "lr=1e-3"

    rank: int = 8  # inner size of an adapter
    alpha: float | None = None  # an adapter is scaled by alpha / rank; null: alpha = rank
    rslora: bool = False  # scale by alpha / sqrt(rank) instead (rsLoRA)
    targets: list[str] | None = None  # q k v o gate up down qkv; patterns: ffn_*, blk.0.*; null: q, or gpt2's qkv
    init_scale: float = 0.01  # standard deviation of A's initial values
    dropout: float = 0.0  # share of an adapter's inputs that a training step hides

    def check(self) -> None:
        """Raises UserError for settings that cannot work and a base that is not given."""
        super().check()
        for key in ("alpha", "init_scale"):
            value = getattr(self, key)
            if value is not None:
                require_positive(f"recipe.{key}", value)
        require_within("recipe", self, rank="[1,inf)", dropout="[0,1)")
        if self.targets == []:
            raise UserError("recipe.targets=[]: name at least one linear, such as recipe.targets=[q,v]")

    def warnings(self, planned: Planned) -> Iterable[str]:
        """That both ways to scale are the same."""
        yield from super().warnings(planned)
        if self.rslora and self.rank == 1:
            yield "recipe.rslora=true: with recipe.rank=1 an adapter is scaled by alpha either way"

    def plan(self, model: Model, setup: Setup) -> Plan:
        """The model's tensors from the base, frozen, and a trainable pair for each target."""
        specs = {t.name: t for t in model.tensors()}
        alpha = self.rank if self.alpha is None else self.alpha
        scale = alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
        tensors = [self._from_base(t, trainable=False) for t in specs.values()]
        adapters = [LoraAdapter(t, scale, self.dropout) for t in self._targets(specs)]
        masks = {}
        for adapter in adapters:
            outputs, inputs = specs[adapter.target].shape
            if self.rank > min(outputs, inputs):
                raise UserError(
                    f"recipe.rank={self.rank}: {adapter.target} is {outputs} x {inputs}; "
                    f"use recipe.rank={min(outputs, inputs)} or less"
                )
            a, b = lora_names(adapter.target)
            tensors += [
                PlanTensor(a, (self.rank, inputs), Normal(self.init_scale)),
                PlanTensor(b, (outputs, self.rank), Constant(0)),
            ]
            if self.dropout:
                masks[adapter.mask] = InputSpec((*setup.inputs["tokens"].shape, inputs), "float32", optional=True)
        return replace(setup, inputs={**setup.inputs, **masks}).plan(model, tensors, adapters)

    def _targets(self, specs: Mapping[str, TensorSpec]) -> list[str]:
        """The linears that `targets` names, in the model's order; UserError for a target that is none."""
        linears = {n: n.split(".")[2] for n, t in specs.items() if n.startswith("blk.") and len(t.shape) == 2}
        queries = next(([q] for q in QUERIES if q in linears.values()), None)
        targets = queries if self.targets is None else self.targets
        if targets is None:
            raise UserError(f"recipe.targets: {' or '.join(QUERIES)} is not here; {choose('', set(linears.values()))}")
        chosen = set()
        for target in targets:
            patterns = (target, SHORT.get(target, target))  # a model may call its own linears by the short names
            matches = ([n for n, own in linears.items() if fnmatchcase(own, p) or fnmatchcase(n, p)] for p in patterns)
            found = next(filter(None, matches), None)
            if not found:
                raise UserError(f"recipe.targets=[{target}]: {choose(patterns[1], set(linears.values()))}")
            chosen.update(found)
        return [name for name in linears if name in chosen]
