"""What is in a GGUF file, and what can be done with it here: what `toyexp describe` shows.

Reads headers, and numbers as far as `uses` looks. What a file says of itself is a stranger's text: shown through
`printable`, and never rendered.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.errors import printable
from toyexp.base.formatting import columns, count, counted, in_bytes
from toyexp.formats.gguf.header import origin
from toyexp.formats.gguf.open_model import opened
from toyexp.formats.gguf.read import GGUFFile
from toyexp.inference.model_files import ADAPTER, MODEL, file_of
from toyexp.inference.uses import Offers, Use
from toyexp.interfaces.command import Answer
from toyexp.interfaces.format import TensorInfo
from toyexp.interfaces.model import sizes_of
from toyexp.plugins.registry import Registry
from toyexp.reference.forward_listing import BLOCK, Listing, Traced, inside, listing
from toyexp.tokenizers.tokenizer import CONTROL

PLACE = ("offset", "bytes")  # of a tensor in the file
WIDTH = 110  # of a line, where one is broken
SPECIAL = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask")  # as llama.cpp spells their keys


@dataclass(frozen=True)
class Description(Answer):
    """What the header of a file says."""

    file: str
    bytes: int
    converted: bool  # whether it is no GGUF itself and was made one, to be read
    version: int
    kind: str  # general.type: model, adapter, ...
    architecture: str
    family: str | None  # the model of toyexp's that it is
    refused: str | None  # why it is none
    sizes: dict[str, Any]  # the model's settings, or what the architecture's keys say
    parameters: dict[str, int]  # total, embedding, blocks, per_block (of the largest)
    outside: dict[str, int]  # parameters of what stands outside the blocks
    types: dict[str, dict[str, int]]  # tensors and bytes of each type, the most bytes first
    tokenizer: dict[str, Any] | None
    general: dict[str, str]
    adapter: dict[str, Any] | None
    parts: dict[str, int] | None  # of a split file: which this one is, and of how many
    uses: list[Use]
    forward: Listing | None
    metadata: dict[str, Any] = field(default_factory=dict)  # every key, if it was asked for
    tensors: list[dict[str, Any]] = field(default_factory=list)  # likewise

    def plain(self) -> dict[str, Any]:
        """The keys and the tensors where they were asked for, and the forward pass as a list of ops."""
        found = asdict(replace(self, forward=None))
        if self.forward:
            found["forward"] = [
                {
                    "op": op.op, "block": op.block, "tensors": [w.name for w in op.weights], "result": op.result,
                    "detail": op.detail, "operations": op.operations, "per": op.per,
                }
                for op in self.forward.all()
            ]  # fmt: skip
        return {name: value for name, value in found.items() if value or name not in ("metadata", "tensors")}

    def lines(self) -> list[str]:
        """A block for each of them."""
        part = f", part {self.parts['part']} of {self.parts['of']}" if self.parts else ""
        path = self.file if self.file.isprintable() else printable(self.file, 200)
        held = f"{' read as' if self.converted else ','} GGUF version {self.version}"
        rows = [("file", f"{path}, {in_bytes(self.bytes)}{part}{held}")]
        if self.adapter:
            rows += self._adapter_rows()
        else:
            model = printable(self.architecture) or "no architecture"
            rows.append(("model", f"{model} (model={self.family})" if self.family else model))
            rows += _wrapped("sizes", [f"{k}={_short(v)}" for k, v in self.sizes.items()], " ")
        rows += _wrapped("parameters", self._parameter_words())
        kinds = [f"{t} {in_bytes(n['bytes'])} in {n['tensors']}" for t, n in self.types.items()]
        rows += _wrapped("types", kinds or ["no tensors"])
        rows += self._tokenizer_rows()
        rows += [(name, printable(text, 100)) for name, text in self.general.items()]
        lines = [f"{name:<10}  {text}".rstrip() for name, text in rows]
        lines += ["", "with toyexp"]
        for before, use in zip([None, *self.uses], self.uses, strict=False):
            what = "" if before and before.what == use.what else use.what
            lines.append(f"  {what:<8}  {use.command or 'no: ' + printable(str(use.reason), 200)}")
        if self.tensors:
            table = [
                [printable(t["name"], 64), " x ".join(map(str, t["shape"])), *(str(t[k]) for k in ("type", *PLACE))]
                for t in self.tensors
            ]
            lines += ["", *columns([["tensor", "shape", "type", *PLACE], *table], right=(3, 4))]
        if self.metadata:
            keys = [[printable(key, 90), _short(value)] for key, value in self.metadata.items()]
            lines += ["", *columns([["key", "value"], *keys])]
        if self.forward:
            costs = [" ".join(filter(None, (count(n), factor))) for factor, n in self.forward.operations().items()]
            unit = self.forward.unit
            one = f"{'an' if unit[0] in 'aeiou' else 'a'} {unit}"
            lines += ["", f"forward pass, {' + '.join(costs)} operations {one}", *self.forward.lines()]
        return lines

    def _adapter_rows(self) -> list[tuple[str, str]]:
        assert self.adapter
        ranks = " or ".join(map(str, self.adapter["ranks"])) or "none"
        alpha = self.adapter["alpha"]
        what = f"{printable(self.adapter['type'])} for a base of architecture {printable(self.architecture)}"
        rows = [("adapter", f"{what}, rank {ranks}, alpha {'not given' if alpha is None else f'{alpha:g}'}")]
        return rows + _wrapped("targets", [printable(t) for t in self.adapter["targets"]])

    def _parameter_words(self) -> list[str]:
        n = self.parameters
        words = [f"{count(n['total'])} in all"]
        if n["blocks"]:
            words.append(f"{counted(n['blocks'], 'block')} of {count(n['per_block'])}")
        top = sorted(self.outside.items(), key=lambda item: -item[1])
        return words + [f"{printable(name)} {count(size)}" for name, size in top[:6]] + ["..."] * (len(top) > 6)

    def _tokenizer_rows(self) -> list[tuple[str, str]]:
        t = self.tokenizer
        if t is None:
            return []
        words = [printable(t["model"])]
        words += [f"pre-tokenizer {printable(t['pre'])}"] if t["pre"] else []
        words += [counted(t["size"], "token")] if t["size"] else ["no tokens"]
        words += [f"{t['controls']} of them control"] if t["controls"] else []
        rows = [("tokenizer", ", ".join(words))]
        if t["refused"]:
            rows += _wrapped("", [f"of ids only here: {printable(t['refused'], 200)}"])
        special = [f"{name} {s['id']}" + (f" {printable(s['token'], 30)}" if s["token"] is not None else "")
                   for name, s in t["special"].items()]  # fmt: skip
        rows += _wrapped("", special) if special else []
        adds = [f"{name} {'not said' if t[f'add_{name}'] is None else 'added' if t[f'add_{name}'] else 'not added'}"
                for name in ("bos", "eos")]  # fmt: skip
        rows.append(("", f"{', '.join(adds)}; {'a' if t['chat_template'] else 'no'} chat template"))
        return rows


def describe(path: Path, registry: Registry, metadata: bool = False, tensors: bool = False) -> Description:
    """Reads the header of the file, or of a run's directory; GGUFError for a file that is broken."""
    path = file_of(path, (MODEL, ADAPTER), registry)
    file, path = opened(str(path)), origin(path)  # opened as by the recipes, who are asked about it
    kind = file.text("general.type") or "model"
    offers = Offers(file, path, registry)
    model, refused, forward = offers.model, offers.refused, None
    uses = offers.all()
    if model is not None:
        try:
            forward = listing(model, [Traced(t.shape, t.name, t.type) for t in file.tensors.values()])
        except Exception as error:  # a plugin's model may ask shapes for what they cannot do; the rest is told
            refused = f"its forward pass cannot be listed: {type(error).__name__}: {error}"
    architecture, meta = file.text("general.architecture"), file.metadata
    parameters, outside = _parameters(file.tensors.values())
    number, of = meta.get("split.no"), meta.get("split.count")
    parts = {"part": number + 1, "of": of} if isinstance(number, int) and isinstance(of, int) and of > 1 else None
    return Description(
        file=str(path), bytes=file.size, converted=path != file.path, version=file.version,
        kind=kind, architecture=architecture,
        family=model.name if model else None, refused=refused,
        sizes=sizes_of(model) if model else _sizes(file, architecture), parameters=parameters, outside=outside,
        types=types_of(file), tokenizer=_tokenizer(file, offers), general=_general(file),
        adapter=_adapter(file) if kind == "adapter" else None,
        parts=parts, uses=uses, forward=forward,
        metadata=dict(meta) if metadata else {},
        tensors=[
            {"name": t.name, "shape": t.shape, "type": t.type, "offset": t.offset, "bytes": t.nbytes}
            for t in file.tensors.values() if tensors
        ],
    )  # fmt: skip


# -- what a header says -----------------------------------------------------------------------------------------------


def types_of(file: GGUFFile) -> dict[str, dict[str, int]]:
    """Tensors and bytes of each type, the most bytes first."""
    number, size = Counter[str](), Counter[str]()
    for t in file.tensors.values():
        number[t.type] += 1
        size[t.type] += t.nbytes
    return {kind: {"tensors": number[kind], "bytes": n} for kind, n in size.most_common()}


def _parameters(tensors: Iterable[TensorInfo]) -> tuple[dict[str, int], dict[str, int]]:
    """How many there are, and those of what stands outside the blocks."""
    blocks, outside = Counter[str](), Counter[str]()
    for t in tensors:
        found = BLOCK.search(t.name)
        part, name = (blocks, found[1]) if found else (outside, re.sub(r"\.(weight|bias)$", "", t.name))
        part[name] += math.prod(t.shape)
    embedding = sum(size for name, size in outside.items() if "embd" in name)
    total, largest = blocks.total() + outside.total(), max(blocks.values(), default=0)
    return {"total": total, "embedding": embedding, "blocks": len(blocks), "per_block": largest}, dict(outside)


def _sizes(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """The architecture's own keys whose values are numbers or words."""
    prefix = f"{architecture}."
    own = {k.removeprefix(prefix): v for k, v in file.metadata.items() if architecture and k.startswith(prefix)}
    return {printable(k): v for k, v in own.items() if isinstance(v, bool | int | float | str)}


def _tokenizer(file: GGUFFile, offers: Offers) -> dict[str, Any] | None:
    """What the tokenizer's keys say."""
    meta = file.metadata
    if not any(key.startswith("tokenizer.") for key in meta):
        return None
    tokens, types = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.token_type")
    texts: list[Any] = tokens if isinstance(tokens, list) else []
    special = {}
    for key, value in meta.items():
        name = key.removeprefix("tokenizer.ggml.").removesuffix("_token_id")
        if key == f"tokenizer.ggml.{name}_token_id" and isinstance(value, int):
            special[name] = {"id": value, "token": texts[value] if 0 <= value < len(texts) else None}
    order = {name: i for i, name in enumerate(SPECIAL)}
    refused = offers.untokenized if texts else None
    adds = {f"add_{x}": meta.get(f"tokenizer.ggml.add_{x}_token") for x in ("bos", "eos")}
    return {
        "model": file.text("tokenizer.ggml.model"),
        "pre": file.text("tokenizer.ggml.pre"),
        "size": len(texts),
        "controls": int((types == CONTROL).sum()) if isinstance(types, np.ndarray) else 0,
        "special": dict(sorted(special.items(), key=lambda item: order.get(item[0], len(order)))),
        **{name: value if isinstance(value, bool) else None for name, value in adds.items()},
        "chat_template": bool(file.text("tokenizer.chat_template")),
        "refused": refused,
    }


def _general(file: GGUFFile) -> dict[str, str]:
    """Where it comes from, as far as it says."""

    def said(*keys: str) -> str:
        return ", ".join(text for key in keys if (text := file.text(f"general.{key}")))

    run, step = said("run_id"), file.metadata.get("general.step")
    made = [f"run {run}"] if run else []
    made += [f"step {step}"] if run and isinstance(step, int) else []
    made += [f"configuration {digest[:12]}"] if run and (digest := said("config_sha256")) else []
    shown = {
        "name": said("name"),
        "licence": said("license", "license.link"),
        "base model": said("base_model.0.name", "base_model.0.organization", "base_model.0.repo_url"),
        "made by": ", ".join(made),
        "about": said("description"),
    }
    return {name: text for name, text in shown.items() if text}


def _adapter(file: GGUFFile) -> dict[str, Any]:
    """What an adapter changes: ranks, alpha, and its targets with the number of blocks."""
    alpha = file.metadata.get("adapter.lora.alpha")
    pairs = {n.removesuffix(".lora_a"): t for n, t in file.tensors.items() if n.endswith(".lora_a")}
    per_target = Counter(inside(name).removesuffix(".weight") for name in pairs)
    return {
        "type": file.text("adapter.type"),
        "ranks": sorted({t.shape[0] for t in pairs.values()}),
        "alpha": alpha if isinstance(alpha, int | float) else None,
        "targets": [name if n == 1 else f"{name} in {n} blocks" for name, n in per_target.items()],
    }


# -- how it is shown --------------------------------------------------------------------------------------------------


def _short(value: Any) -> str:
    """A value of a key in a few words."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            single = np.float32(value)
        same = float(single) == value or math.isnan(value)  # most are float32, a few float64
        return str(single if same else value).removesuffix(".0")
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, np.ndarray | list) and len(value) > 8:
        return f"[{len(value)} of them: {', '.join(map(_short, value[:3]))}, ...]"
    if isinstance(value, np.ndarray | list):
        return f"[{', '.join(map(_short, value))}]"
    return str(value)


def _wrapped(name: str, words: Sequence[str], between: str = ", ") -> list[tuple[str, str]]:
    lines = textwrap.wrap(between.join(words), WIDTH - 12, break_long_words=False, break_on_hyphens=False)
    return [(name if i == 0 else "", line) for i, line in enumerate(lines)]
