"""What toyexp does with a GGUF file, by the rules of those who do it, each with the command to type."""

from __future__ import annotations

import contextlib
import re
import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

from toyexp.base.errors import UserError, printable
from toyexp.formats.file_plan import check_adapter
from toyexp.formats.gguf.ggml_types import QUICKLY_TOLD
from toyexp.formats.gguf.header import GGUFError, origin
from toyexp.formats.gguf.open_model import by_architecture, model_in
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import read_tokenizer
from toyexp.formats.gguf.write import PLAIN
from toyexp.inference.export import default_target, require_free
from toyexp.interfaces.data import Data
from toyexp.interfaces.kind import IMAGES, TOKENS
from toyexp.interfaces.model import Model, sizes_of
from toyexp.interfaces.recipe import Recipe, Setup
from toyexp.plugins.compatibility import misfit, of_kind
from toyexp.plugins.registry import Registry
from toyexp.tokenizers.tokenizer import Tokenizer

PLAIN_WORD = re.compile(r"[\w/.][\w/.+%@?|: -]*\.gguf|/[\w/.+%@?|:-]*", re.ASCII)  # what Hydra reads as a text unquoted
LOOKED_THROUGH = 256 << 20  # bytes of a file whose numbers are all looked at; of a larger one a run says
PROMPT = "Once upon a time"
EXPORTS = ("q8_0", "f16", "f32")


@dataclass(frozen=True)
class Use:
    """One thing that toyexp does with models, and how to ask for it with this file, or why not."""

    what: str
    command: str | None
    reason: str | None = None


class Offers:
    """An open file as those see it who train on it, look at it or write it again.

    Reads the tokenizer, and of files of up to `LOOKED_THROUGH` bytes the numbers too.
    """

    def __init__(self, file: GGUFFile, path: Path, registry: Registry):
        self._file, self._path, self._registry = file, path, registry
        self.model: Model | None = None
        self.refused: str | None = None  # why it is none that toyexp can compute
        try:
            self.model = model_in(file, registry)
        except UserError as error:
            self.refused = _reason(error, file)
        except Exception as error:  # whatever a plugin raises, the header can still be shown
            self.refused = f"{type(error).__name__}: {printable(str(error))}"

    @cached_property
    def _tokenizer_or_reason(self) -> Tokenizer | str:
        if "tokenizer.ggml.tokens" not in self._file.metadata:
            return "it has no tokenizer"
        try:
            return read_tokenizer(self._file)
        except UserError as error:
            return _reason(error, self._file).partition(";")[0]

    @property
    def untokenized(self) -> str | None:
        """Why the file knows ids alone; None where its tokenizer works."""
        return self._tokenizer_or_reason if isinstance(self._tokenizer_or_reason, str) else None

    @cached_property
    def _no_numbers(self) -> str | None:
        """Which tensor holds numbers that are none, as far as was looked."""
        if self._file.size > LOOKED_THROUGH:
            return None
        try:
            for info in self._file.tensors.values():
                if info.type in QUICKLY_TOLD:
                    self._file.check_finite(info.name)
        except GGUFError as error:
            return _reason(error, self._file)
        return None

    def all(self) -> list[Use]:
        """Everything, in the order of a work; each command with the local plugins that were named."""
        word = self._registry.loading
        return [replace(use, command=f"{use.command}{word}") if use.command else use for use in self._all()]

    def _all(self) -> list[Use]:
        if self._file.metadata.get("general.type") == "adapter":
            return self._on_a_base()
        found = [self._training(recipe) for recipe in self._starting_from("base")]
        found = found if any(use.command for use in found) else found[:1]
        found += [self._donor(recipe) for recipe in self._starting_from("donor") if self._is_for(recipe)]
        return found + self._looked_at()

    def _looked_at(self) -> list[Use]:
        """By those who train nothing."""
        if self.model is None:
            return []
        path = shell(str(self._path))
        found = [_use("eval", f"toyexp eval {path}{self._data}", self._no_numbers)]
        if self.model.reads.sequence:
            found.append(_use("generate", f"toyexp generate {path} {self._prompt(self.model)}", self._no_numbers))
        if self.model.reads == IMAGES:
            found.append(
                _use("predict", f"toyexp predict {path} IMAGE.png", self._no_numbers or self._unseen(self.model))
            )
        return [*found, self._export()]

    @cached_property
    def _data(self) -> str:
        """The data to name where those that are read by default are not for this file."""
        tokenizer, sizes = self._tokenizer_or_reason, sizes_of(self.model) if self.model else {}
        for name in of_kind(self.model.reads if self.model else TOKENS, self._registry):
            cls = cast("type[Data]", self._registry.get("data", name))
            words = cls.suggested(sizes, tokenizer if isinstance(tokenizer, Tokenizer) else None)
            if words is not None:
                return f" data={name} {words}" if words else ""
        return ""

    def _starting_from(self, what: str) -> list[type[Recipe]]:
        recipes = self._registry.classes("recipe").values()
        return [recipe for recipe in recipes if recipe.starts_from == what and self._models(recipe)]

    def _models(self, recipe: type[Recipe]) -> list[Model]:
        """Those that the recipe trains, the first of them where none is named."""
        return [model() for model in self._registry.models() if model.reads in recipe.reads]

    def _is_for(self, recipe: type[Recipe]) -> bool:
        return self.model is None or self.model.reads in recipe.reads

    def _command(self, recipe: type[Recipe], context: str = "") -> str:
        file = f"recipe.{recipe.starts_from}={pasted(self._path)}"
        return f"toyexp recipe={recipe.name} {file}{self._data}{context} {recipe.hint}".rstrip()

    def _training(self, recipe: type[Recipe]) -> Use:
        if self.model is None:
            return Use("train on", None, self.refused)
        own = self.model.context
        context = f" model.context={own}" if 0 < own < self._models(recipe)[0].context else ""
        reason = self._no_numbers or self._refusal(recipe, self.model)
        return _use("train on", self._command(recipe, context), reason)

    def _donor(self, recipe: type[Recipe]) -> Use:
        tokenizer, table = self._tokenizer_or_reason, self._file.tensors.get("token_embd.weight")
        rows = tokenizer.vocab if isinstance(tokenizer, Tokenizer) else 1
        if self._file.size > LOOKED_THROUGH and table is not None and rows <= table.shape[0]:
            rows = 1  # a run says what is wrong with the others
        return _use("donor", self._command(recipe), self._unfit_donor(recipe, rows))

    def _unfit_donor(self, recipe: type[Recipe], rows: int = 1) -> str | None:
        """Why the recipe cannot take that many rows of the file for the default model; None where it can."""
        model = self._models(recipe)[0]
        vocab = {"vocab": rows} if "vocab" in sizes_of(model) else {}
        return self._refusal(recipe, replace(model, **vocab))

    @property
    def best(self) -> str:
        """The most that the file is good for, in a word: base, or its kind of data, or donor; empty: nothing."""
        if self.model is not None:
            trained_on = any(self._is_for(recipe) for recipe in self._starting_from("base"))
            return "base" if trained_on else self.model.reads.name
        return "donor" if any(self._unfit_donor(r) is None for r in self._starting_from("donor")) else ""

    def _refusal(self, cls: type[Recipe], model: Model) -> str | None:
        """Why a recipe refuses to plan a run of one step from this file; None where it does not."""
        recipe = cls(**{cls.starts_from: str(self._file.path)})
        if unread := misfit(recipe, model):
            return unread
        try:
            recipe.check()
            recipe.plan(model, Setup(model.reads.inputs(max(model.context, 1)), rows=1))
        except UserError as error:
            return _reason(error, self._file)
        return None

    def _prompt(self, model: Model) -> str:
        """What the file's tokenizer and context can take."""
        tokenizer, context, vocab = self._tokenizer_or_reason, model.context, int(sizes_of(model).get("vocab", 2))
        if isinstance(tokenizer, Tokenizer):
            with contextlib.suppress(UserError):
                if len(tokenizer.prompt(PROMPT)) <= context:
                    return f"--prompt '{PROMPT}'"
            vocab = min(vocab, tokenizer.vocab)
        return f"--ids {','.join(map(str, range(min(3, vocab, context))))}"

    def _export(self) -> Use:
        quantised = any(t.type not in PLAIN for t in self._file.tensors.values())
        reason = None
        for kind in ("f32",) if quantised else EXPORTS:
            try:
                target = default_target(self._file, f"-{kind}.gguf")
                require_free(f"--to {target}", target, [], force=False)
            except UserError as error:
                reason = reason or _reason(error, self._file)
            else:
                return Use("export", f"toyexp export {shell(str(self._path))} --type {kind}")
        return Use("export", None, reason)

    def _unseen(self, model: Model) -> str | None:
        """Return why no image can be shown to the model; None if one can."""
        from toyexp.inference.predict import Seen  # deferred: it loads Hydra, which few models need here

        try:
            Seen.of(self._file, model, self._path)
        except UserError as error:
            return _reason(error, self._file)
        return None

    def _on_a_base(self) -> list[Use]:
        """An adapter's, which its base stands beside."""
        path = shell(str(self._path))
        commands = {
            "generate": f"toyexp generate BASE.gguf --adapter {path} --prompt '{PROMPT}'",
            "merge": f"toyexp merge BASE.gguf {path} --out merged.gguf",
        }
        for recipe in self._starting_from("base"):
            if "adapter" in recipe.__dataclass_fields__:
                settings = f"recipe.base=BASE.gguf recipe.adapter={pasted(self._path)} {recipe.hint}"
                commands["train on"] = f"toyexp recipe={recipe.name} {settings}".rstrip()
        try:
            check_adapter(self._file)
            base = by_architecture(self._registry.models()).get(self._file.architecture)
        except UserError as error:
            return [Use("generate", None, _reason(error, self._file))]
        unknown = None if base else f"there is no model here of its architecture, {printable(self._file.architecture)}"
        reason = unknown or self._no_numbers
        return [_use(what, command, reason) for what, command in commands.items() if not reason or what == "generate"]


def _use(what: str, command: str, reason: str | None) -> Use:
    return Use(what, None, reason) if reason else Use(what, command)


def _reason(error: UserError, file: GGUFFile) -> str:
    text = str(error)
    for start in (f"donor {origin(file.path)}: ", f"{origin(file.path)}: "):
        text = text.removeprefix(start)
    return text


# -- what is to be typed ----------------------------------------------------------------------------------------------


def shell(path: str) -> str:
    """A path to be pasted into a shell; one with control characters can only be shown."""
    path = f"./{path}" if path.startswith("-") else path  # or it would be an option
    return shlex.quote(path) if path.isprintable() else printable(path, 200)


def pasted(path: Path) -> str:
    """What stands behind `recipe.base=`: quoted for Hydra where it would read more than a word, and for the shell.

    One with control characters can only be shown.
    """
    text = str(path)
    if not text.isprintable():
        return printable(text, 200)
    if PLAIN_WORD.fullmatch(text):
        return shlex.quote(text)
    quoted = "'" + text.replace("${", "\\${").replace("'", "\\'") + "'"
    return shlex.quote(quoted) if re.search(r'["$`\\!]', quoted) else f'"{quoted}"'
