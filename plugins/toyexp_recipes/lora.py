"""LoRA: a frozen model with trainable low-rank updates of selected linear layers (Hu et al. 2021).

The update of a layer is the product B A. A [r, in] starts with normal values of standard deviation `init_scale`, and
B [out, r] starts with zeros. At first B A is zero, so the first step computes the outputs of the base model.
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

SHORT_NAMES = {  # short names and PEFT's names of linear layers, each with the names in toyexp
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_out*", "qkv": "attn_[qkv]*", "gate": "ffn_gate",
    "up": "ffn_up", "down": "ffn_down", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_out*", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "all-linear": "*",
    "c_attn": "attn_[qkv]*", "c_fc": "ffn_up", "c_proj": "attn_out* ffn_down", "attn.c_proj": "attn_out*",
    "mlp.c_proj": "ffn_down", "in_proj": "in_proj ssm_in", "out_proj": "out_proj ssm_out",
    "query": "attn_q", "key": "attn_k", "value": "attn_v", "fc1": "ffn_up", "fc2": "ffn_down",
}  # fmt: skip
# What a name in transformers has before the linear layer's own name; the group is the block's number.
TRANSFORMERS_PATH = re.compile(r"^(?:.*\b(?:h|layers)\.(\d+|\*)\.)?(?:(?:self_attn|attn|mlp|mixer)\.(?!c_proj))?")
RANK = 8  # default
ROUTER = "ffn_gate_inp"  # chooses experts; the only linear layer of a block that is no target by default


@dataclass
class Lora(FromBase):
    """Train low-rank adapters on a frozen GGUF model."""

    name: ClassVar[str] = "lora"
    hint: ClassVar[str] = "lr=1e-3"

    adapter: str | None = None  # adapter to continue: a lora run's directory, its adapter.gguf, or a PEFT directory
    rank: int | None = None  # rank of the adapters; null: the rank of recipe.adapter, or 8 without it
    alpha: float | None = None  # adapters are scaled by alpha / rank; null: alpha = rank
    rslora: bool = False  # true: scale by alpha / sqrt(rank) instead (rsLoRA)
    targets: list[str] | None = None  # q k v o gate up down, PEFT's names (q_proj), ffn_*; null: all in the blocks
    init_scale: float = 0.01  # standard deviation of A's initial values
    dropout: float = 0.0  # dropout probability of the adapters' inputs

    def check(self) -> None:
        """Raise UserError for an invalid setting, or if the setting `base` is empty."""
        super().check()
        if self.adapter == "":
            raise UserError("recipe.adapter='': is empty; leave it out, or set null, to start new adapters")
        self.further_files()
        for key in ("alpha", "init_scale"):
            value = getattr(self, key)
            if value is not None:
                require_positive(f"recipe.{key}", value)
        require_range("recipe", self, dropout="[0,1)", **({} if self.rank is None else {"rank": "[1,inf)"}))
        if self.targets == []:
            raise UserError("recipe.targets=[]: name at least one linear, such as recipe.targets=[q,v]")

    def warnings(self, preview: RunPreview) -> Iterable[str]:
        """Yield a warning for each setting without effect, and a warning if the adapter belongs to another base."""
        yield from super().warnings(preview)
        if self.rslora and self.rank == 1:
            yield "recipe.rslora=true: has no effect with recipe.rank=1"
        if self.adapter and is_changed(self, "init_scale"):
            yield f"recipe.init_scale={self.init_scale}: has no effect, because the values come from recipe.adapter"
        if self.adapter and (base := self.base_file()):
            yield from toyexp.check_base(toyexp.find_adapter_file(Path(self.adapter), lambda: preview.plan.model), base)

    def further_files(self) -> Sequence[Path]:
        """Return the files of the adapter that `recipe.adapter` names; empty if the setting is not set."""
        return toyexp.adapter_files(Path(self.adapter)) if self.adapter else ()

    def origin(self) -> tuple[str, str]:
        """Return "base" and the path of the base, followed by the path of the adapter to continue if one is set."""
        return "base", f"{super().origin()[1]}{f', on it {self.adapter}' if self.adapter else ''}"

    def plan(self, model: Model, setup: Setup) -> Plan:
        """Return a plan with the base model's tensors, frozen, and trainable LoRA matrices for each target layer."""
        specs = {t.name: t for t in model.tensors()}
        pairs, adapters = self._load_adapters(model, specs) if self.adapter else self._new_adapters(specs)
        if self.dropout and not model.reads.sequence:
            problem = f"applies to text models only; model={model.name} reads {model.reads}"
            raise UserError(f"recipe.dropout={self.dropout}: {problem}")
        masks = {}
        for adapter in adapters if self.dropout else ():
            rows = setup.inputs[model.reads.sequence].shape
            masks[adapter.mask] = InputSpec((*rows, specs[adapter.target].shape[1]), "float32", optional=True)
        tensors = [*self._from_base(model, lambda name: True), *pairs]
        return replace(setup, inputs={**setup.inputs, **masks}).plan(model, tensors, adapters)

    def _new_adapters(self, specs: Mapping[str, TensorSpec]) -> tuple[list[PlanTensor], list[LoraAdapter]]:
        """Return new LoRA adapters, one per target layer, and their tensors A and B.

        Their initial values do not change the model's outputs. Raise UserError if the rank exceeds the number of a
        target's rows or columns.
        """
        rank = self.rank or RANK
        alpha = rank if self.alpha is None else self.alpha
        scale = alpha / (math.sqrt(rank) if self.rslora else rank)
        pairs, adapters = [], [LoraAdapter(t, scale, self.dropout) for t in self._targets(specs)]
        for adapter in adapters:
            outputs, inputs = specs[adapter.target].shape
            if rank > min(outputs, inputs):
                remedy = f"use recipe.rank={min(outputs, inputs)} or less"
                raise UserError(f"recipe.rank={rank}: {adapter.target} is {outputs} x {inputs}; {remedy}")
            a, b = lora_names(adapter.target)
            pairs.append(PlanTensor(a, (rank, inputs), Normal(self.init_scale)))
            pairs.append(PlanTensor(b, (outputs, rank), Constant(0)))
        return pairs, adapters

    def _load_adapters(
        self, model: Model, specs: Mapping[str, TensorSpec]
    ) -> tuple[list[PlanTensor], list[LoraAdapter]]:
        """Read the adapters and their tensors from `recipe.adapter`, and return them as trainable.

        Raise UserError for settings that contradict the file, such as another rank.
        """
        path = toyexp.find_adapter_file(Path(str(self.adapter)), lambda: model)
        frozen, adapters = toyexp.formats.read_adapter(path, model)
        if base := self.base_file():
            toyexp.check_base(path, base)
        shapes = {t.name: t.shape for t in frozen}
        ranks = {a.target: shapes[lora_names(a.target)[0]][0] for a in adapters}
        alphas = sorted({float(f"{a.scale * ranks[a.target]:.12g}") for a in adapters})
        targets = self._targets(specs) if self.targets is not None else [*ranks]
        subject = f"recipe.adapter={self.adapter} has"
        if len(alphas) > 1:
            problem = "matrices of several ranks and stores no alpha, so their scales differ"
            raise UserError(f"{subject} {problem}; all adapted matrices of a run must have the same alpha")
        if self.rank is not None and {*ranks.values()} != {self.rank}:
            actual = ", ".join(map(str, sorted({*ranks.values()})))
            raise UserError(f"recipe.rank={self.rank}: {subject} rank {actual}; leave recipe.rank out")
        if self.alpha is not None and not math.isclose(self.alpha, alphas[0], rel_tol=1e-6):  # the file stores float32
            raise UserError(f"recipe.alpha={self.alpha:g}: {subject} alpha {alphas[0]:g}; leave recipe.alpha out")
        if self.rslora:
            raise UserError(
                f"recipe.rslora=true: {subject} its own scale (alpha {alphas[0]:g}); leave recipe.rslora out"
            )
        if {*targets} != {*ranks}:
            name = min({*targets} ^ {*ranks})
            difference = f"{'' if name in ranks else 'no '}matrices on {name}"
            typed = ",".join(self.targets or ())
            raise UserError(f"recipe.targets=[{typed}]: {subject} {difference}; leave recipe.targets out")
        return [replace(t, trainable=True) for t in frozen], [replace(a, dropout=self.dropout) for a in adapters]

    def _targets(self, specs: Mapping[str, TensorSpec]) -> list[str]:
        """Return the names of the linear layers that the setting `targets` selects, in the model's order.

        Raise UserError if one of the targets matches no layer.
        """
        blocks = {n: n[n.find("blk.") :] for n in specs if n.startswith(("blk.", "v.blk."))}  # ViT names start with v.
        others = ("_norm.weight", "conv.weight", "conv1d.weight", ".ssm_a", ".ssm_d")
        matrices = {n: form for n, form in blocks.items() if len(specs[n].shape) == 2 and not n.endswith(others)}
        linears = {n: ".".join(form.split(".")[2:-1]) for n, form in matrices.items()}
        if self.targets is None:
            if default := [n for n, module in linears.items() if module != ROUTER]:
                return default
            raise UserError("recipe=lora: the model's blocks have no linear layer; use recipe=full")
        names, selected = {n: (module, n, blocks[n]) for n, module in linears.items()}, set[str]()
        for target in self.targets:
            _, block, module = TRANSFORMERS_PATH.split(target, 1)
            short = [f"blk.{block or '*'}.{p}.*" for p in SHORT_NAMES.get(module, target).split()]
            matches = (  # try the model's own names first, because one may equal a short name
                [n for n, forms in names.items() if any(fnmatchcase(name, p) for p in patterns for name in forms)]
                for patterns in ([target], short)
            )
            match = next(filter(None, matches), None)
            if not match:
                modules = {*linears.values()}
                if any(target in n.split(".") for n in specs):
                    problem = "is not a linear layer of a block"
                    raise UserError(f"recipe.targets=[{target}]: {problem}; {suggest('', modules)}")
                raise UserError(f"recipe.targets=[{target}]: {suggest(SHORT_NAMES.get(target, target), modules)}")
            selected.update(match)
        return [name for name in linears if name in selected]
