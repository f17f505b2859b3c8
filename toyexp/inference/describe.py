"""Describe a GGUF file and the commands that can use it.

Text from the file is printed only through `printable`, which escapes control characters.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from toyexp.base.errors import UserError, printable
from toyexp.base.formatting import format_bytes, format_count, pluralise
from toyexp.base.tables import align_table, fit_table
from toyexp.base.terminal import text_width
from toyexp.formats.file_plan import check_adapter
from toyexp.formats.gguf.ggml_types import FAST_CHECK_TYPES
from toyexp.formats.gguf.header import GGUFError, source_path
from toyexp.formats.gguf.open_model import load_open_model, models_by_architecture, open_gguf
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import read_tokenizer
from toyexp.formats.gguf.write import PLAIN
from toyexp.inference.export import default_target, require_free
from toyexp.inference.model_files import ADAPTER, MODEL, find_model_file
from toyexp.interfaces.command import Answer
from toyexp.interfaces.data import Data
from toyexp.interfaces.format import TensorInfo
from toyexp.interfaces.kind import IMAGES, TOKENS
from toyexp.interfaces.model import Model, model_settings
from toyexp.interfaces.recipe import Recipe, Setup
from toyexp.plugins.compatibility import matching_data, model_mismatch
from toyexp.plugins.registry import Registry
from toyexp.reference.forward_listing import BLOCK, Listing, WeightInfo, listing, name_in_block
from toyexp.tokenizers.tokenizer import CONTROL, Tokenizer

LOCATION = ("offset", "bytes")  # columns: where a tensor lies in the file
SPECIAL = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask")  # llama.cpp's spelling of the keys


@dataclass(frozen=True)
class Description(Answer):
    """Contents of a GGUF header."""

    file: str
    bytes: int
    converted: bool  # True if the file had another format and was converted to GGUF to be read
    version: int
    kind: str  # general.type: model, adapter, ...
    architecture: str
    family: str | None  # name of toyexp's model that implements the architecture
    refused: str | None  # why toyexp cannot load the model or list its forward pass; None if it can
    sizes: dict[str, Any]  # the model's settings, or the architecture's own keys if no model can load it
    parameters: dict[str, int]  # total, embedding, blocks (how many), per_block (of the largest block)
    outside: dict[str, int]  # parameters of each tensor outside the blocks
    types: dict[str, dict[str, int]]  # tensors and bytes per type, largest first
    tokenizer: dict[str, Any] | None
    general: dict[str, str]
    adapter: dict[str, Any] | None
    parts: dict[str, int] | None  # for a split file: `part`, the number of this file (from 1), `of` how many files
    uses: list[Use]
    forward: Listing | None
    metadata: dict[str, Any] = field(default_factory=dict)  # every key, with --metadata
    tensors: list[dict[str, Any]] = field(default_factory=list)  # with --tensors

    def plain(self) -> dict[str, Any]:
        """Return the description as JSON data, with the forward pass as a list of ops."""
        fields = asdict(replace(self, forward=None))
        if self.forward:
            fields["forward"] = [
                {
                    "op": op.op, "block": op.block, "tensors": [w.name for w in op.weights], "result": op.result,
                    "detail": op.detail, "operations": op.operations, "per": op.per,
                }
                for op in self.forward.all()
            ]  # fmt: skip
        return {name: value for name, value in fields.items() if value or name not in ("metadata", "tensors")}

    def lines(self) -> list[str]:
        """Return the description as text, one block of lines per topic."""
        part = f", part {self.parts['part']} of {self.parts['of']}" if self.parts else ""
        path = self.file if self.file.isprintable() else printable(self.file, 200)
        version = f"{' read as' if self.converted else ','} GGUF version {self.version}"
        rows = [("file", f"{path}, {format_bytes(self.bytes)}{part}{version}")]
        if self.adapter:
            rows += self._adapter_rows()
        else:
            model = printable(self.architecture) or "no architecture"
            rows.append(("model", f"{model} (model={self.family})" if self.family else model))
            rows += _wrap("sizes", [f"{k}={_short(v)}" for k, v in self.sizes.items()], " ")
        rows += _wrap("parameters", self._parameter_words())
        types = [f"{t} {format_bytes(n['bytes'])} in {n['tensors']}" for t, n in self.types.items()]
        rows += _wrap("types", types or ["no tensors"])
        rows += self._tokenizer_rows()
        rows += [(name, printable(text, 100)) for name, text in self.general.items()]
        lines = [f"{name:<10}  {text}".rstrip() for name, text in rows]
        lines += ["", "with toyexp"]
        for before, use in zip([None, *self.uses], self.uses, strict=False):
            use_name = "" if before and before.what == use.what else use.what
            lines.append(f"  {use_name:<8}  {use.command or 'no: ' + printable(str(use.reason), 200)}")
        if self.tensors:
            table = [
                [printable(t["name"], 64), " x ".join(map(str, t["shape"])), *(str(t[k]) for k in ("type", *LOCATION))]
                for t in self.tensors
            ]
            lines += ["", *fit_table([["tensor", "shape", "type", *LOCATION], *table], LOCATION, [*LOCATION, "type"])]
        if self.metadata:
            keys = [[printable(key, 90), _short(value)] for key, value in self.metadata.items()]
            lines += ["", *align_table([["key", "value"], *keys], ())]
        if self.forward:
            operations = self.forward.operations().items()
            costs = [" ".join(filter(None, (format_count(n), factor))) for factor, n in operations]
            unit = self.forward.unit
            per_unit = f"{'an' if unit[0] in 'aeiou' else 'a'} {unit}"
            lines += ["", f"forward pass, {' + '.join(costs)} operations {per_unit}", *self.forward.lines()]
        return lines

    def _adapter_rows(self) -> list[tuple[str, str]]:
        assert self.adapter
        ranks = " or ".join(map(str, self.adapter["ranks"])) or "none"
        alpha = self.adapter["alpha"]
        description = f"{printable(self.adapter['type'])} for a base of architecture {printable(self.architecture)}"
        rows = [("adapter", f"{description}, rank {ranks}, alpha {'not given' if alpha is None else f'{alpha:g}'}")]
        return rows + _wrap("targets", [printable(t) for t in self.adapter["targets"]])

    def _parameter_words(self) -> list[str]:
        n = self.parameters
        words = [f"{format_count(n['total'])} in all"]
        if n["blocks"]:
            words.append(f"{pluralise(n['blocks'], 'block')} of {format_count(n['per_block'])}")
        top = sorted(self.outside.items(), key=lambda item: -item[1])
        return words + [f"{printable(name)} {format_count(size)}" for name, size in top[:6]] + ["..."] * (len(top) > 6)

    def _tokenizer_rows(self) -> list[tuple[str, str]]:
        t = self.tokenizer
        if t is None:
            return []
        words = [printable(t["model"])]
        words += [f"pre-tokenizer {printable(t['pre'])}"] if t["pre"] else []
        words += [pluralise(t["size"], "token")] if t["size"] else ["no tokens"]
        words += [f"{t['controls']} of them control"] if t["controls"] else []
        rows = [("tokenizer", ", ".join(words))]
        if t["refused"]:
            rows += _wrap("", [f"not supported here, so only token ids are read: {printable(t['refused'], 200)}"])
        special = [f"{name} {s['id']}" + (f" {printable(s['token'], 30)}" if s["token"] is not None else "")
                   for name, s in t["special"].items()]  # fmt: skip
        rows += _wrap("", special) if special else []
        bos, eos = ({None: "unspecified"}.get(t[key], "yes" if t[key] else "no") for key in ("add_bos", "add_eos"))
        template = "yes" if t["chat_template"] else "no"
        rows.append(("", f"prepends bos: {bos}; appends eos: {eos}; chat template: {template}"))
        return rows


def describe(path: Path, registry: Registry, metadata: bool = False, tensors: bool = False) -> Description:
    """Describe a GGUF file, or the model of a run or checkpoint. Raise GGUFError if the file is broken.

    If `metadata` is True, the description includes every key of the header; if `tensors` is True, every tensor.
    """
    path = find_model_file(path, (MODEL, ADAPTER), registry)
    file, path = open_gguf(str(path)), source_path(path)  # recipes get the same open file from its cache
    kind = file.text("general.type") or "model"
    offers = FileUses(file, path, registry)
    model, refused, forward = offers.model, offers.refused, None
    uses = offers.all()
    if model is not None:
        try:
            forward = listing(model, [WeightInfo(t.shape, t.name, t.type) for t in file.tensors.values()])
        except Exception as error:  # a plugin's model may fail on shapes; describe the rest
            refused = f"its forward pass cannot be listed: {type(error).__name__}: {error}"
    architecture, meta = file.text("general.architecture"), file.metadata
    prefix = f"{architecture or None}."  # of the metadata keys that belong to the architecture
    own_keys = {k.removeprefix(prefix): v for k, v in meta.items() if k.startswith(prefix)}
    sizes = {printable(k): v for k, v in own_keys.items() if isinstance(v, bool | int | float | str)}
    parameters, outside = _parameters(file.tensors.values())
    part, count = meta.get("split.no"), meta.get("split.count")
    parts = {"part": part + 1, "of": count} if isinstance(part, int) and isinstance(count, int) and count > 1 else None
    return Description(
        file=str(path), bytes=file.size, converted=path != file.path or file.is_converted, version=file.version,
        kind=kind, architecture=architecture,
        family=model.name if model else None, refused=refused,
        sizes=model_settings(model) if model else sizes, parameters=parameters, outside=outside,
        types=count_types(file), tokenizer=_tokenizer(file, offers), general=_general(file),
        adapter=_adapter(file) if kind == "adapter" else None,
        parts=parts, uses=uses, forward=forward,
        metadata=dict(meta) if metadata else {},
        tensors=[
            {"name": t.name, "shape": t.shape, "type": t.type, "offset": t.offset, "bytes": t.nbytes}
            for t in file.tensors.values() if tensors
        ],
    )  # fmt: skip


# -- contents of a header ---------------------------------------------------------------------------------------------


def count_types(file: GGUFFile) -> dict[str, dict[str, int]]:
    """Return the numbers of `tensors` and `bytes` for each tensor type. The type with the most bytes comes first."""
    number, size = Counter[str](), Counter[str]()
    for t in file.tensors.values():
        number[t.type] += 1
        size[t.type] += t.nbytes
    return {kind: {"tensors": number[kind], "bytes": n} for kind, n in size.most_common()}


def _parameters(tensors: Iterable[TensorInfo]) -> tuple[dict[str, int], dict[str, int]]:
    """Return parameter counts of the whole model, and the parameter count of each tensor outside the blocks.

    The first dict has the keys `total`, `embedding`, `blocks` (the number of transformer blocks) and `per_block` (the
    parameters of the largest block).
    """
    blocks, outside = Counter[str](), Counter[str]()
    for t in tensors:
        match = BLOCK.search(t.name)
        part, name = (blocks, match[1]) if match else (outside, re.sub(r"\.(weight|bias)$", "", t.name))
        part[name] += math.prod(t.shape)
    embedding = sum(size for name, size in outside.items() if "embd" in name)
    total, largest = blocks.total() + outside.total(), max(blocks.values(), default=0)
    return {"total": total, "embedding": embedding, "blocks": len(blocks), "per_block": largest}, dict(outside)


def _tokenizer(file: GGUFFile, offers: FileUses) -> dict[str, Any] | None:
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
    refused = offers.tokenizer if texts and isinstance(offers.tokenizer, str) else None
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
    def join_texts(*keys: str) -> str:
        return ", ".join(text for key in keys if (text := file.text(f"general.{key}")))

    run, step = join_texts("run_id"), file.metadata.get("general.step")
    origins = [f"run {run}"] if run else []
    origins += [f"step {step}"] if run and isinstance(step, int) else []
    origins += [f"configuration {digest[:12]}"] if run and (digest := join_texts("config_sha256")) else []
    rows = {
        "name": join_texts("name"),
        "licence": join_texts("license", "license.link"),
        "base model": join_texts("base_model.0.name", "base_model.0.organization", "base_model.0.repo_url"),
        "made by": ", ".join(origins),
        "about": join_texts("description"),
    }
    return {name: text for name, text in rows.items() if text}


def _adapter(file: GGUFFile) -> dict[str, Any]:
    alpha = file.metadata.get("adapter.lora.alpha")
    pairs = {n.removesuffix(".lora_a"): t for n, t in file.tensors.items() if n.endswith(".lora_a")}
    per_target = Counter(name_in_block(name).removesuffix(".weight") for name in pairs)
    return {
        "type": file.text("adapter.type"),
        "ranks": sorted({t.shape[0] for t in pairs.values()}),
        "alpha": alpha if isinstance(alpha, int | float) else None,
        "targets": [name if n == 1 else f"{name} in {n} blocks" for name, n in per_target.items()],
    }


# -- formatting -------------------------------------------------------------------------------------------------------


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            single = np.float32(value)
        is_float32 = float(single) == value or math.isnan(value)  # otherwise the value is float64
        return str(single if is_float32 else value).removesuffix(".0")
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, np.ndarray | list) and len(value) > 8:
        return f"[{len(value)} values: {', '.join(map(_short, value[:3]))}, ...]"
    if isinstance(value, np.ndarray | list):
        return f"[{', '.join(map(_short, value))}]"
    return str(value)


def _wrap(name: str, words: Sequence[str], between: str = ", ") -> list[tuple[str, str]]:
    lines = textwrap.wrap(between.join(words), text_width() - 12, break_long_words=False, break_on_hyphens=False)
    return [(name if i == 0 else "", line) for i, line in enumerate(lines)]


# -- commands that can use the file -----------------------------------------------------------------------------------


# A path that needs no quotes in Hydra. Of other relative paths, only words that Hydra reads as text are.
PLAIN_WORD = re.compile(
    r"[\w/.][\w/.+%@?|: -]*\.gguf|/[\w/.+%@?|:-]*|(?!(?i:null|true|false|nan|inf)$)[a-zA-Z][\w/.-]*", re.ASCII
)
MAX_CHECKED_BYTES = 256 << 20  # the numbers of larger files are only checked when a run reads them
PROMPT = "Once upon a time"
EXPORTS = ("q8_0", "f16", "f32")


@dataclass(frozen=True)
class Use:
    """A way to use a model file: the command to type, or the reason why the file cannot be used so."""

    what: str  # name of the use, such as eval or donor
    command: str | None  # None if `reason` is set
    reason: str | None = None


class FileUses:
    """The toyexp commands that can use an open GGUF file.

    A file of up to `MAX_CHECKED_BYTES` bytes is read completely to check its tensors for NaN and infinity.
    """

    def __init__(self, file: GGUFFile, path: Path, registry: Registry):
        self._file, self._path, self._registry = file, path, registry
        self.model: Model | None = None
        self.refused: str | None = None  # why toyexp cannot load the model; None if it can
        try:
            self.model = load_open_model(file, registry)
        except UserError as error:
            self.refused = _reason(error, file)
        except Exception as error:  # a plugin may raise anything; the header is still shown
            self.refused = f"{type(error).__name__}: {printable(str(error))}"

    @cached_property
    def tokenizer(self) -> Tokenizer | str:
        """The file's tokenizer, or the reason why it cannot be used."""
        if "tokenizer.ggml.tokens" not in self._file.metadata:
            return "it has no tokenizer"
        try:
            return read_tokenizer(self._file)
        except UserError as error:
            return _reason(error, self._file).partition(";")[0]

    @cached_property
    def _bad_numbers(self) -> str | None:
        """The error about the first tensor with NaN or infinity; None if there is none.

        A file of more than MAX_CHECKED_BYTES bytes is not checked, because that would take too long; the result is
        None.
        """
        if self._file.size > MAX_CHECKED_BYTES:
            return None
        try:
            for info in self._file.tensors.values():
                if info.type in FAST_CHECK_TYPES:
                    self._file.check_finite(info.name)
        except GGUFError as error:
            return _reason(error, self._file)
        return None

    def all(self) -> list[Use]:
        """Return all ways to use the file. If the current command has a `plugins=` override, the commands repeat it."""
        is_adapter = self._file.metadata.get("general.type") == "adapter"
        model_uses = (self._training_uses, self._donor_uses, self._inference_uses)
        uses = self._adapter_uses() if is_adapter else [use for group in model_uses for use in group()]
        plugins = self._registry.plugins_override
        return [replace(use, command=None if use.reason else f"{use.command}{plugins}") for use in uses]

    def _inference_uses(self) -> list[Use]:
        if self.model is None:
            return []
        path, broken = quote_for_shell(str(self._path)), self._bad_numbers
        uses = [Use("eval", f"toyexp eval {path}{self._data}", broken)]
        if self.model.reads.sequence:
            uses.append(Use("generate", f"toyexp generate {path} {self._prompt(self.model)}", broken))
        if self.model.reads == IMAGES:
            uses.append(Use("predict", f"toyexp predict {path} IMAGE.png", broken or self._image_error(self.model)))
        return [*uses, self._export_use()]

    @cached_property
    def _data(self) -> str:
        """The `data=...` settings to add to a command; empty if the default data fits this file, or no data fits."""
        tokenizer, sizes = self.tokenizer, model_settings(self.model) if self.model else {}
        for name in matching_data(self.model.reads if self.model else TOKENS, self._registry):
            cls = cast("type[Data]", self._registry.get("data", name))
            words = cls.suggest_settings(sizes, tokenizer if isinstance(tokenizer, Tokenizer) else None)
            if words is not None:
                return f" data={name} {words}" if words else ""
        return ""

    def _recipes_by_source(self, source: str) -> list[type[Recipe]]:
        recipes = self._registry.classes("recipe").values()
        return [recipe for recipe in recipes if recipe.starts_from == source and self._default_model(recipe)]

    def _default_model(self, recipe: type[Recipe]) -> Model | None:
        """Return a model with default sizes, of the first model class that reads the recipe's kind of data; or None."""
        return next((model() for model in self._registry.models() if model.reads in recipe.reads), None)

    def _accepts(self, recipe: type[Recipe]) -> bool:
        return self.model is None or self.model.reads in recipe.reads

    def _command(self, recipe: type[Recipe], context: str = "") -> str:
        file = f"recipe.{recipe.starts_from}={quote_for_hydra(self._path)}"
        return f"toyexp recipe={recipe.name} {file}{self._data}{context} {recipe.hint}".rstrip()

    def _training_uses(self) -> list[Use]:
        uses, new_heads = [], []
        for recipe in self._recipes_by_source("base"):
            length, default = self.model.context if self.model else 0, self._default_model(recipe)
            context = f" model.context={length}" if default and 0 < length < default.context else ""
            model = self.model
            reason = self.refused if model is None else self._bad_numbers or self._plan_error(recipe, model)
            uses.append(Use("train on", self._command(recipe, context), reason))
            if model and "classes" in model_settings(model) and "new_head" in recipe.__dataclass_fields__:
                new_heads.append(Use("new head", self._command(recipe, " recipe.new_head=true"), reason))
        return uses + new_heads if not all(use.reason for use in uses) else uses[:1]

    def _donor_uses(self) -> list[Use]:
        tokenizer, table = self.tokenizer, self._file.tensors.get("token_embd.weight")
        rows = tokenizer.vocab if isinstance(tokenizer, Tokenizer) else 1
        if self._file.size > MAX_CHECKED_BYTES and table is not None and rows <= table.shape[0]:
            rows = 1  # only a run checks the other rows
        recipes = filter(self._accepts, self._recipes_by_source("donor"))
        return [Use("donor", self._command(recipe), self._donor_error(recipe, rows)) for recipe in recipes]

    def _donor_error(self, recipe: type[Recipe], rows: int = 1) -> str | None:
        """Return why the recipe cannot copy `rows` rows of the file's embedding to a new model; None if it can.

        The new model has default sizes and is of the first model class that reads the recipe's kind of data.
        """
        model = cast("Model", self._default_model(recipe))
        vocab = {"vocab": rows} if "vocab" in model_settings(model) else {}
        return self._plan_error(recipe, replace(model, **vocab))

    @property
    def best(self) -> str:
        """The file's best use in one word; empty if toyexp cannot use it.

        `base`: the model can be fine-tuned. A kind of data, such as images: the model cannot be fine-tuned, but
        evaluated on such data. `donor`: toyexp cannot load the model, but a new model can copy its embeddings.
        """
        if self.model is not None:
            is_base = any(self._accepts(recipe) for recipe in self._recipes_by_source("base"))
            return "base" if is_base else self.model.reads.name
        return "donor" if any(self._donor_error(r) is None for r in self._recipes_by_source("donor")) else ""

    def _plan_error(self, cls: type[Recipe], model: Model) -> str | None:
        """Return why the recipe `cls` cannot plan a run of `model` that starts from this file; None if it can."""
        recipe = cls(**{cls.starts_from: str(self._file.path)})
        if mismatch := model_mismatch(recipe, model):
            return mismatch
        try:
            recipe.check()
            recipe.plan(model, Setup(model.reads.inputs(max(model.context, 1)), rows=1))
        except UserError as error:
            return _reason(error, self._file)
        return None

    def _prompt(self, model: Model) -> str:
        tokenizer, context, vocab = self.tokenizer, model.context, int(model_settings(model).get("vocab", 2))
        if isinstance(tokenizer, Tokenizer):
            with contextlib.suppress(UserError):
                if len(tokenizer.prompt(PROMPT)) <= context:
                    return f"--prompt '{PROMPT}'"
            vocab = min(vocab, tokenizer.vocab)
        return f"--ids {','.join(map(str, range(min(3, vocab, context))))}"

    def _export_use(self) -> Use:
        quantised = any(t.type not in PLAIN for t in self._file.tensors.values())
        reason = None
        for kind in ("f32",) if quantised else EXPORTS:
            try:
                target = default_target(self._file, f"-{kind}.gguf")
                require_free(f"--to {target}", target, [], force=False)
            except UserError as error:
                reason = reason or _reason(error, self._file)
            else:
                return Use("export", f"toyexp export {quote_for_shell(str(self._path))} --type {kind}")
        return Use("export", None, reason)

    def _image_error(self, model: Model) -> str | None:
        from toyexp.inference.predict import ImageInput  # deferred: it imports Hydra, which only image models need here

        try:
            ImageInput.from_file(self._file, model, self._path)
        except UserError as error:
            return _reason(error, self._file)
        return None

    def _adapter_uses(self) -> list[Use]:
        path = quote_for_shell(str(self._path))
        commands = {
            "generate": f"toyexp generate BASE.gguf --adapter {path} --prompt '{PROMPT}'",
            "merge": f"toyexp merge BASE.gguf {path} --out merged.gguf",
        }
        for recipe in self._recipes_by_source("base"):
            if "adapter" in recipe.__dataclass_fields__:
                settings = f"recipe.base=BASE.gguf recipe.adapter={quote_for_hydra(self._path)} {recipe.hint}"
                commands["train on"] = f"toyexp recipe={recipe.name} {settings}".rstrip()
        try:
            check_adapter(self._file)
            base = models_by_architecture(self._registry.models()).get(self._file.architecture)
        except UserError as error:
            return [Use("generate", None, _reason(error, self._file))]
        unknown = None if base else f"no model has its architecture, {printable(self._file.architecture)}"
        reason = unknown or self._bad_numbers
        return [Use(name, command, reason) for name, command in commands.items() if not reason or name == "generate"]


def _reason(error: UserError, file: GGUFFile) -> str:
    text = str(error)
    for start in (f"donor {source_path(file.path)}: ", f"{source_path(file.path)}: "):
        text = text.removeprefix(start)
    return text


# -- quoting ----------------------------------------------------------------------------------------------------------


def quote_for_shell(path: str) -> str:
    """Quote a path for the shell. If the path has control characters, the result is only for display."""
    path = f"./{path}" if path.startswith("-") else path  # not to be read as an option
    return shlex.quote(path) if path.isprintable() else printable(path, 200)


def quote_for_hydra(path: Path) -> str:
    """Quote a path for Hydra and the shell, so that it can follow `recipe.base=` on the command line.

    If the path has control characters, they are escaped and the result is only for display.
    """
    text = str(path)
    if not text.isprintable():
        return printable(text, 200)
    if PLAIN_WORD.fullmatch(text):
        return shlex.quote(text)
    quoted = "'" + text.replace("${", "\\${").replace("'", "\\'") + "'"
    return shlex.quote(quoted) if re.search(r'["$`\\!]', quoted) else f'"{quoted}"'
