"""LoRA: a frozen model with trainable low-rank updates of selected linear layers (Hu et al. 2021).

The update of a layer is the product B A. A [r, in] starts with normal values of standard deviation `init_scale`, and
B [out, r] starts with zeros. At first B A is zero, so the first step computes the outputs of the base model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

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
    Values,
    is_changed,
    lora_names,
    suggest,
)
from toyexp.base import numpy as np
from toyexp.base import require_positive, require_range
from toyexp_recipes.base import FromBase

SHORT_NAMES = {  # short names and PEFT's names of linear layers, each with the names in toyexp
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_out*", "qkv": "attn_[qkv]*", "gate": "ffn_gate",
    "up": "ffn_up", "down": "ffn_down", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_out*", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "all-linear": "*",
    "c_attn": "attn_[qkv]*", "c_fc": "ffn_up", "c_proj": "attn_out* ffn_down", "attn.c_proj": "attn_out*",
    "mlp.c_proj": "ffn_down", "in_proj": "in_proj ssm_in", "out_proj": "out_proj ssm_out",
    "embed_tokens": "token_embd", "wte": "token_embd", "embeddings": "token_embd", "lm_head": "output",
    "query": "attn_q", "key": "attn_k", "value": "attn_v", "fc1": "ffn_up", "fc2": "ffn_down",
}  # fmt: skip
# What a name in transformers has before the linear layer's own name; the group is the block's number.
TRANSFORMERS_PATH = re.compile(r"^(?:.*\b(?:h|layers)\.(\d+|\*)\.)?(?:(?:self_attn|attn|mlp|mixer)\.(?!c_proj))?")
RANK = 8  # default
ROUTER = "ffn_gate_inp"  # chooses experts; the only linear layer of a block that is no target by default


@dataclass(frozen=True)
class RowNorms(Values):
    """Euclidean norms of the rows of a matrix, whose values are `matrix`."""

    matrix: Values

    def draw(self, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
        """Return the norms [rows] in float32, computed in float64."""
        rows = self.matrix.draw(shape, seed, name).astype("float64")
        return ((rows**2).sum(1) ** 0.5).astype("float32")


@dataclass
class Lora(FromBase):
    """Train low-rank adapters on a frozen GGUF model."""

    name: ClassVar[str] = "lora"
    hint: ClassVar[str] = "lr=1e-3"

    adapter: str | None = None  # adapter to continue: a lora run's directory, its adapter.gguf, or a PEFT directory
    rank: int | None = None  # rank of the adapters; null: the rank of recipe.adapter, or 8 without it
    alpha: float | None = None  # adapters are scaled by alpha / rank; null: alpha = rank
    dora: bool = False  # true: also train the norm of each row of the adapted weights (DoRA)
    rslora: bool = False  # true: scale by alpha / sqrt(rank) instead (rsLoRA)
    rank_pattern: dict[str, int] = field(default_factory=dict)  # ranks of some targets, {down: 16}; else rank
    alpha_pattern: dict[str, float] = field(default_factory=dict)  # other alphas of some targets
    targets: list[str] | None = None  # q k v o gate up down, PEFT's names (q_proj), ffn_*; null: all in the blocks
    init_scale: float = 0.01  # standard deviation of A's initial values
    dropout: float = 0.0  # dropout probability of the adapters' inputs

    def check(self) -> None:
        """Raise UserError for an invalid setting, or if the setting `base` is empty."""
        super().check()
        if self.adapter == "":
            raise UserError("recipe.adapter='': is empty; leave it out, or set null, to start new adapters")
        try:
            self.further_files()
        except UserError as error:
            raise UserError(f"recipe.adapter={error}") from None
        patterns: Mapping[str, Any] = {"rank_pattern": self.rank_pattern, "alpha_pattern": self.alpha_pattern}
        numbers = {f"{name}.{key}": value for name, values in patterns.items() for key, value in values.items()}
        for key, value in {"alpha": self.alpha, "init_scale": self.init_scale, **numbers}.items():
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
        self.require_text(model, "dropout", "neftune")
        masks = {}
        for adapter in (a for a in adapters if a.dropout):
            rows = setup.inputs[model.reads.sequence].shape
            masks[adapter.mask] = InputSpec((*rows, specs[adapter.target].shape[1]), "float32", optional=True)
        tensors = [*self._from_base(model, lambda name: True), *pairs]
        values = {t.name: t.values for t in tensors}
        for adapter in adapters if self.dora else ():
            magnitude, norm = adapter.tensors[2:]
            norms = PlanTensor(magnitude, specs[adapter.target].shape[:1], RowNorms(values[adapter.target]))
            tensors += [norms, replace(norms, name=norm, trainable=False)]
        setup = replace(setup, inputs={**setup.inputs, **masks}, neftune=self.neftune)
        return setup.plan(model, tensors, adapters)

    def _new_adapters(self, specs: Mapping[str, TensorSpec]) -> tuple[list[PlanTensor], list[LoraAdapter]]:
        """Return new LoRA adapters, one per target layer, and their tensors A and B.

        Their initial values do not change the model's outputs. Raise UserError if the rank exceeds the number of a
        target's rows or columns.
        """
        targets = self._targets(specs)
        ranks = self._by_pattern("rank", targets, specs, self.rank or RANK)
        alphas = self._by_pattern("alpha", targets, specs, (self.rank or RANK) if self.alpha is None else self.alpha)
        pairs, adapters = list[PlanTensor](), list[LoraAdapter]()
        for target in targets:
            (outputs, inputs), (a, b), (rank, key) = specs[target].shape, lora_names(target), ranks[target]
            if rank > min(outputs, inputs):
                remedy = f"use {key}={min(outputs, inputs)} or less"
                raise UserError(f"{key}={rank}: {target} is {outputs} x {inputs}; {remedy}")
            scale = alphas[target][0] / (math.sqrt(rank) if self.rslora else rank)
            adapter, small = LoraAdapter(target, scale, self.dropout, self.dora), Normal(self.init_scale)
            if adapter.is_embedding and self.dora:
                raise UserError(f"recipe.dora=true: applies to linear layers; leave {target} out of recipe.targets")
            if adapter.is_embedding:  # as in PEFT, A is zero, and dropout does not apply
                adapter = replace(adapter, dropout=0.0)
                pairs += [PlanTensor(a, (outputs, rank), Constant(0)), PlanTensor(b, (inputs, rank), small)]
            else:
                pairs += [PlanTensor(a, (rank, inputs), small), PlanTensor(b, (outputs, rank), Constant(0))]
            adapters.append(adapter)
        return pairs, adapters

    def _by_pattern(
        self, name: str, targets: Sequence[str], specs: Mapping[str, TensorSpec], default: float
    ) -> dict[str, tuple[Any, str]]:
        """Return each target's rank or alpha, with the key of the setting; of the patterns the first one counts."""
        values: dict[str, tuple[Any, str]] = dict.fromkeys(targets, (default, f"recipe.{name}"))
        for pattern, value in reversed(getattr(self, f"{name}_pattern").items()):
            key = f"recipe.{name}_pattern.{pattern}"
            matches = [target for target in self._match(pattern, key, specs) if target in targets]
            if not matches:
                raise UserError(f"{key}: matches no target of this run, such as {targets[0]}")
            values |= dict.fromkeys(matches, (value, key))
        return values

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
        ranks = {a.target: shapes[lora_names(a.target)[1]][1] for a in adapters}
        alphas = {float(f"{a.scale * ranks[a.target]:.12g}") for a in adapters}
        targets = self._targets(specs) if self.targets is not None else [*ranks]
        subject = f"recipe.adapter={self.adapter} has"
        for key, stored in (("rank", {*ranks.values()}), ("alpha", alphas)):
            typed = getattr(self, key)
            if typed is not None and not all(math.isclose(typed, value, rel_tol=1e-6) for value in stored):  # float32
                values = ", ".join(f"{value:g}" for value in sorted(stored))
                raise UserError(f"recipe.{key}={typed:g}: {subject} {key} {values}; leave recipe.{key} out")
        for key in ("dora", "rslora", "rank_pattern", "alpha_pattern"):
            if value := getattr(self, key):
                problem = f"{subject} its own form, ranks and alpha; leave recipe.{key} out"
                raise UserError(f"recipe.{key}={str(value).lower()}: {problem}")
        if {*targets} != {*ranks}:
            name = min({*targets} ^ {*ranks})
            difference = f"{'' if name in ranks else 'no '}matrices on {name}"
            names = ",".join(self.targets or ())
            raise UserError(f"recipe.targets=[{names}]: {subject} {difference}; leave recipe.targets out")
        return [replace(t, trainable=True) for t in frozen], [
            a if a.is_embedding else replace(a, dropout=self.dropout) for a in adapters
        ]

    def _targets(self, specs: Mapping[str, TensorSpec]) -> list[str]:
        """Return the names of the linear layers that the setting `targets` selects, in the model's order.

        Raise UserError if one of the targets matches no layer.
        """
        if self.targets is None:
            if default := [n for n, module in _linears(specs).items() if module != ROUTER]:
                return default
            raise UserError("recipe=lora: the model's blocks have no linear layer; use recipe=full")
        selected = {n for target in self.targets for n in self._match(target, f"recipe.targets=[{target}]", specs)}
        return [name for name in specs if name in selected]

    @staticmethod
    def _match(target: str, key: str, specs: Mapping[str, TensorSpec]) -> list[str]:
        """Return the weights that `target` names; raise UserError, whose message starts with `key`, if none."""
        table = target.removesuffix(".weight").rpartition(".")[2]
        table = f"{SHORT_NAMES.get(table, table)}.weight"
        if table in ("token_embd.weight", "output.weight") and "token_embd.weight" in specs:
            if "output.weight" in specs:
                return [table]
            problem = "the model's embedding is also its output layer, which an adapter cannot change"
            raise UserError(f"{key}: {problem}; leave it out, or use recipe=full")
        linears = _linears(specs)
        names = {n: (module, n, n[n.find("blk.") :]) for n, module in linears.items()}
        _, block, module = TRANSFORMERS_PATH.split(target, 1)
        short = [f"blk.{block or '*'}.{p}.*" for p in SHORT_NAMES.get(module, target).split()]
        matches = (  # try the model's own names first, because one may equal a short name
            [n for n, forms in names.items() if any(fnmatchcase(name, p) for p in patterns for name in forms)]
            for patterns in ([target], short)
        )
        if match := next(filter(None, matches), None):
            return match
        modules = {*linears.values()}
        if any(target in n.split(".") for n in specs):
            raise UserError(f"{key}: is not a linear layer of a block; {suggest('', modules)}")
        raise UserError(f"{key}: {suggest(SHORT_NAMES.get(target, target), modules)}")


def _linears(specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Return the linear layers of a model's blocks: names of their weights, and names within the block."""
    blocks = {n: n[n.find("blk.") :] for n in specs if n.startswith(("blk.", "v.blk."))}  # ViT names start with v.
    others = ("_norm.weight", "conv.weight", "conv1d.weight", ".ssm_a", ".ssm_d")
    matrices = {n: form for n, form in blocks.items() if len(specs[n].shape) == 2 and not n.endswith(others)}
    return {n: ".".join(form.split(".")[2:-1]) for n, form in matrices.items()}
