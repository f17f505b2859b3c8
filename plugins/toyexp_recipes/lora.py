"""LoRA: a frozen model, and low-rank updates of chosen linears that alone are trained (Hu et al. 2021).

LoRAMetal of the original program: A [r, in] from N(0, init_scale), B [out, r] zero, so that training starts from the
base itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar

import toyexp.formats
from toyexp import (
    Constant,
    InputSpec,
    LoraAdapter,
    Model,
    Normal,
    Plan,
    PlanTensor,
    RunPreview,
    Setup,
    TensorSpec,
    UserError,
    is_changed,
    lora_names,
    suggest,
)
from toyexp.base import require_positive, require_range
from toyexp_recipes.base import FromBase

SHORT = {  # what may be typed for a linear, here and in PEFT
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_out*", "qkv": "attn_[qkv]*", "gate": "ffn_gate",
    "up": "ffn_up", "down": "ffn_down", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_out*", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "all-linear": "*",
    "c_attn": "attn_[qkv]*", "c_fc": "ffn_up", "c_proj": "attn_out* ffn_down", "attn.c_proj": "attn_out*",
    "mlp.c_proj": "ffn_down",
}  # fmt: skip
THEIRS = re.compile(r"^(?:.*\b(?:h|layers)\.(\d+|\*)\.)?(?:(?:self_attn|attn|mlp)\.(?!c_proj))?")  # transformers'
RANK = 8  # unless told
QUERIES = ("attn_q", "attn_qkv")  # what is adapted by default: the first that the model has


@dataclass
class Lora(FromBase):
    """Low-rank adapters on a frozen GGUF model."""

    name: ClassVar[str] = "lora"
    hint: ClassVar[str] = "lr=1e-3"

    adapter: str | None = None  # to train on from: a lora run's directory, its adapter.gguf, or a directory of PEFT's
    rank: int | None = None  # inner size of an adapter; null: 8, or what recipe.adapter has
    alpha: float | None = None  # an adapter is scaled by alpha / rank; null: alpha = rank
    rslora: bool = False  # scale by alpha / sqrt(rank) instead (rsLoRA)
    targets: list[str] | None = None  # q k v o gate up down qkv; patterns: ffn_*, blk.0.*; null: q, or gpt2's qkv
    init_scale: float = 0.01  # standard deviation of A's initial values
    dropout: float = 0.0  # share of an adapter's inputs that a training step hides

    def check(self) -> None:
        """Raises UserError for settings that cannot work and a base that is not given."""
        super().check()
        if self.adapter == "":
            raise UserError("recipe.adapter='': names no file; leave it out, or null, to begin new adapters")
        self.further_files()
        for key in ("alpha", "init_scale"):
            value = getattr(self, key)
            if value is not None:
                require_positive(f"recipe.{key}", value)
        require_range("recipe", self, dropout="[0,1)", **({} if self.rank is None else {"rank": "[1,inf)"}))
        if self.targets == []:
            raise UserError("recipe.targets=[]: name at least one linear, such as recipe.targets=[q,v]")

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """That both ways to scale are the same, and that an adapter that is there has its values."""
        yield from super().warnings(preview)
        if self.rslora and self.rank == 1:
            yield "recipe.rslora=true: with recipe.rank=1 an adapter is scaled by alpha either way"
        if self.adapter and is_changed(self, "init_scale"):
            yield f"recipe.init_scale={self.init_scale}: is of new adapters, and recipe.adapter has its own values"
        if self.adapter and (base := self.base_file()):
            yield from toyexp.check_base(toyexp.find_adapter_file(Path(self.adapter), lambda: preview.plan.model), base)

    def further_files(self) -> Sequence[Path]:
        """The adapter that is trained on from."""
        return toyexp.adapter_files(Path(self.adapter)) if self.adapter else ()

    def origin(self) -> tuple[str, str] | None:
        """The base, and the adapter on it."""
        return "base", f"{self.base_file()}{f', on it {self.adapter}' if self.adapter else ''}"

    def plan(self, model: Model, setup: Setup) -> Plan:
        """The model's tensors from the base, frozen, and a trainable pair for each target."""
        specs = {t.name: t for t in model.tensors()}
        pairs, adapters = self._continued(model, specs) if self.adapter else self._new(specs)
        if self.dropout and not model.reads.sequence:
            raise UserError(f"recipe.dropout={self.dropout}: is for models of text; a {model.name} reads {model.reads}")
        masks = {}
        for adapter in adapters if self.dropout else ():
            rows = setup.inputs[model.reads.sequence].shape
            masks[adapter.mask] = InputSpec((*rows, specs[adapter.target].shape[1]), "float32", optional=True)
        tensors = [*(self._from_base(t, trainable=False) for t in specs.values()), *pairs]
        return replace(setup, inputs={**setup.inputs, **masks}).plan(model, tensors, adapters)

    def _new(self, specs: Mapping[str, TensorSpec]) -> tuple[list[PlanTensor], list[LoraAdapter]]:
        """Adapters that change nothing yet."""
        rank = self.rank or RANK
        alpha = rank if self.alpha is None else self.alpha
        scale = alpha / (math.sqrt(rank) if self.rslora else rank)
        pairs, adapters = [], [LoraAdapter(t, scale, self.dropout) for t in self._targets(specs)]
        for adapter in adapters:
            outputs, inputs = specs[adapter.target].shape
            if rank > min(outputs, inputs):
                fits = f"use recipe.rank={min(outputs, inputs)} or less"
                raise UserError(f"recipe.rank={rank}: {adapter.target} is {outputs} x {inputs}; {fits}")
            a, b = lora_names(adapter.target)
            pairs += [
                PlanTensor(a, (rank, inputs), Normal(self.init_scale)),
                PlanTensor(b, (outputs, rank), Constant(0)),
            ]
        return pairs, adapters

    def _continued(self, model: Model, specs: Mapping[str, TensorSpec]) -> tuple[list[PlanTensor], list[LoraAdapter]]:
        """Those of `recipe.adapter`; UserError for a setting that says otherwise."""
        path = toyexp.find_adapter_file(Path(str(self.adapter)), lambda: model)
        frozen, adapters = toyexp.formats.read_adapter(path, model)
        if base := self.base_file():
            toyexp.check_base(path, base)
        shapes = {t.name: t.shape for t in frozen}
        ranks = {a.target: shapes[lora_names(a.target)[0]][0] for a in adapters}
        alphas = sorted({float(f"{a.scale * ranks[a.target]:.12g}") for a in adapters})
        targets = self._targets(specs) if self.targets is not None else [*ranks]
        has = f"recipe.adapter={self.adapter} has"
        if len(alphas) > 1:
            raise UserError(f"{has} pairs of several ranks and no alpha, and a run's adapter.gguf holds one alpha")
        if self.rank is not None and {*ranks.values()} != {self.rank}:
            told = ", ".join(map(str, sorted({*ranks.values()})))
            raise UserError(f"recipe.rank={self.rank}: {has} rank {told}; leave recipe.rank out")
        if self.alpha is not None and not math.isclose(self.alpha, alphas[0], rel_tol=1e-6):  # the file has float32
            raise UserError(f"recipe.alpha={self.alpha:g}: {has} alpha {alphas[0]:g}; leave recipe.alpha out")
        if self.rslora:
            raise UserError(f"recipe.rslora=true: {has} its own scale, alpha {alphas[0]:g}; leave recipe.rslora out")
        if {*targets} != {*ranks}:
            odd = min({*targets} ^ {*ranks})
            but = f"a pair on {odd}" if odd in ranks else f"none on {odd}"
            raise UserError(f"recipe.targets=[{','.join(self.targets or ())}]: {has} {but}; leave recipe.targets out")
        return [replace(t, trainable=True) for t in frozen], [replace(a, dropout=self.dropout) for a in adapters]

    def _targets(self, specs: Mapping[str, TensorSpec]) -> list[str]:
        """The linears that `targets` names, in the model's order; UserError for a target that is none."""
        blocks = {n: n[n.find("blk.") :] for n in specs if n.startswith(("blk.", "v.blk."))}  # of a vit behind v.
        linears = {n: own.split(".")[2] for n, own in blocks.items() if len(specs[n].shape) == 2}
        queries = next(([q] for q in QUERIES if q in linears.values()), None)
        targets = queries if self.targets is None else self.targets
        if targets is None:
            raise UserError(f"recipe.targets: {' or '.join(QUERIES)} is not here; {suggest('', set(linears.values()))}")
        names, chosen = {n: (own, n, blocks[n]) for n, own in linears.items()}, set[str]()
        for target in targets:
            _, block, module = THEIRS.split(target, 1)
            short = [f"blk.{block or '*'}.{p}.*" for p in SHORT.get(module, target).split()]
            matches = (  # a model may call its own linears by the short names
                [n for n, each in names.items() if any(fnmatchcase(name, p) for p in patterns for name in each)]
                for patterns in ([target], short)
            )
            found = next(filter(None, matches), None)
            if not found:
                there = {*linears.values()}
                if any(target in n.split(".") for n in specs):
                    raise UserError(f"recipe.targets=[{target}]: is no linear of a block; {suggest('', there)}")
                raise UserError(f"recipe.targets=[{target}]: {suggest(SHORT.get(target, target), there)}")
            chosen.update(found)
        return [name for name in linears if name in chosen]
