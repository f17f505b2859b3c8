"""Generate text with a model file, on a toyexp engine or with llama.cpp."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from toyexp.base.errors import UserError, printable, suggest
from toyexp.base.memory import convert_memory_errors
from toyexp.base.random import stream
from toyexp.base.threads import MAX_THREADS
from toyexp.base.validators import is_integer
from toyexp.config.build import parse_label
from toyexp.formats.gguf.header import GGUFError
from toyexp.formats.gguf.open_model import open_gguf
from toyexp.formats.gguf.tokenizer import has_text, read_chat_template, read_tokenizer
from toyexp.inference import llamacpp
from toyexp.inference.llamacpp import LLAMA_CPP
from toyexp.inference.loaded_model import LoadedModel, pick_engine
from toyexp.inference.model_files import gguf_path
from toyexp.interfaces.sampling import Sampling, generate_endlessly
from toyexp.interfaces.session import Session
from toyexp.plugins.registry import Registry
from toyexp.tokenizers.chat_template import BadChat, Template
from toyexp.tokenizers.tokenizer import Tokenizer

REMEDY = "use fewer --tokens"
# Reasons why a generation ends.
END, LIMIT, FULL, STOPPED = "end of text", "token limit", "context full", "stopped"


@dataclass(frozen=True)
class Options:
    """Options of one generation."""

    model: Path
    prompt: str | None = None
    ids: list[int] | None = None
    chat: bool = False
    system: str | None = None  # the chat's system message
    tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    adapter: str | None = None
    engine: str = "auto"
    json: bool = False  # return everything at the end, with all token ids


@dataclass(frozen=True)
class Generated:
    """Result of one generation: the prompt, the generated text and tokens, and statistics."""

    file: str
    engine: str
    prompt: str | None
    prompt_ids: list[int]
    text: str | None  # None if the file has no tokenizer
    ids: list[int]  # generated ids without the end token; empty for streamed llama.cpp output
    tokens: int  # number of generated tokens
    reason: str  # why generation ended, such as END
    seconds: float
    seed: int
    template: str | None = None  # with --chat: the file whose chat template was used
    slides: int = 0  # how often the context was full and its second half was processed again

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, including the time for the prompt."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def plain(self) -> dict[str, Any]:
        """Return all fields as a dict of plain values."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}

    def line(self) -> str:
        """Return the summary line printed to the user."""
        speed = f"{self.tokens} tokens in {self.seconds:.2f} s, {self.tokens_per_second:.1f} tokens/s"
        template = f" · chat template of {self.template}" if self.template else ""
        return f"{speed} · {self.reason} · {self.engine}{template}"


class TextBuilder:
    """Decoder that collects generated tokens as ids and text, and passes each complete piece of text to `write`."""

    def __init__(self, tokenizer: Tokenizer | None, write: Callable[[str], None]):
        self._tokenizer, self._write = tokenizer, write
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.ids: list[int] = []
        self.text = ""

    def add(self, token: int) -> None:
        """Add the next token."""
        self.ids.append(token)
        if self._tokenizer is None:
            self.append(f"{',' if len(self.ids) > 1 else ''}{token}")
        else:
            self.append(self._decode(self._tokenizer.token_bytes(token)))

    def append(self, text: str) -> None:
        """Append text and pass it to `write`."""
        self.text += text
        if text:
            self._write(text)

    def finish(self) -> None:
        """Flush the decoder; an incomplete character becomes U+FFFD."""
        self.append(self._decode(b"", final=True))


# -- generating -------------------------------------------------------------------------------------------------------


def generate(
    options: Options, registry: Registry, write: Callable[[str], None], on_slide: Callable[[str], object]
) -> Generated:
    """Generate text and return it with statistics.

    Call `write` with each piece of text as soon as it is generated. Call `on_slide` with a note for the user when the
    context is full for the first time.
    """
    loaded = load_model(options, registry)
    if options.engine.partition(":")[0] == LLAMA_CPP:
        return _generate_with_llama_cpp(loaded, options, write)
    with Generator(loaded, options) as generator:
        template = chat_template(loaded, options)
        ids = prompt_ids(loaded, options, generator.tokenizer, template)
        builder, random = TextBuilder(generator.tokenizer, write), stream(options.seed, "generate")
        return generator.write(options.prompt, ids, builder, random, template, on_slide=on_slide)


def load_model(options: Options, registry: Registry) -> LoadedModel:
    """Open the model and adapter files. Raise UserError for an unknown engine or if the model is an adapter."""
    engines, name = {*registry.offers["engine"], "auto", LLAMA_CPP}, options.engine.partition(":")[0]
    if name not in engines:
        raise UserError(f"--engine {options.engine}: {suggest(name, engines)}")
    parse_label(options.engine, f"--engine {options.engine}")
    loaded = LoadedModel.open(options.model, registry, Path(options.adapter) if options.adapter else None)
    if loaded.file.metadata.get("general.type") == "adapter":
        raise loaded.file.error("is an adapter; name its base model, and pass this file with --adapter")
    return loaded


class Generator:
    """Text generator that keeps one session open for several calls of `write`; a context manager.

    The session is opened for the number of tokens that a call needs, rounded up to a multiple of `step`. If a later
    call needs more tokens, the session is opened again.
    """

    def __init__(self, loaded: LoadedModel, options: Options, step: int = 1):
        self.loaded, self.options, self._step = loaded, options, step
        model: Any = loaded.model
        if not model.reads.sequence:
            problem = f"a {model.name} reads {model.reads} and cannot generate text"
            raise UserError(f"{loaded.name}: {problem}; to measure its loss, use toyexp eval")
        self._model = model
        self.context: int = model.context
        self.tokenizer, self.slides = load_tokenizer(loaded, options), 0
        self.vocab = min(self.tokenizer.vocab, model.vocab) if self.tokenizer else model.vocab
        self.note = ""
        self._window, self._stack = 0, ExitStack()
        self._session: Session | None = None

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write(
        self, prompt: str | None, ids: Sequence[int], builder: TextBuilder, random: np.random.Philox,
        template: ChatTemplate | None, should_stop: Callable[[], bool] = lambda: False,
        on_slide: Callable[[str], object] = lambda note: None,
    ) -> Generated:  # fmt: skip
        """Generate a continuation of `ids` up to an end token or the token limit, or until `should_stop()` is True.

        `builder` collects the text. `prompt` and the path of `template` are only copied to the result. When the context
        is full, call `on_slide` with a note and continue from the second half of the tokens in it. Raise UserError if
        `ids` are longer than the context or not in the vocabulary.
        """
        unknown = [i for i in ids if i >= self.vocab]
        if unknown:
            raise UserError(f"{self.loaded.name}: prompt id {unknown[0]} must be between 0 and {self.vocab - 1}")
        require_room(self.loaded, len(ids), self.context)
        ends: frozenset[int] | set[int] = set(self.tokenizer.end_ids) if self.tokenizer else set()

        def note_slide() -> None:
            self.slides += 1
            if self.slides == 1:
                count = max(1, self.context // 2)
                on_slide(f"note: the context of {self.context} tokens is full; continuing from the last {count}")

        with convert_memory_errors(REMEDY):
            session, began, reason = self._open_session(len(ids) + self.options.tokens), time.perf_counter(), LIMIT
            for token in generate_endlessly(session, ids, self.options.sampling, random, self.vocab, note_slide):
                if should_stop():
                    reason = STOPPED
                elif token in ends:
                    reason = END
                else:
                    builder.add(token)
                    if len(builder.ids) < self.options.tokens:
                        continue
                break
        builder.finish()
        return Generated(
            self.loaded.name, self.note, prompt, list(ids), builder.text if self.tokenizer else None, builder.ids,
            len(builder.ids), reason, time.perf_counter() - began, self.options.seed, template and template.file,
            self.slides,
        )  # fmt: skip

    def _open_session(self, count: int) -> Session:
        window = min(self.context, -(-count // self._step) * self._step)
        if self._session is not None and self._window >= window:
            return self._session
        self._stack.close()
        self._session = None
        inputs, name = self._model.reads.inputs(window), self._model.reads.sequence
        inputs[name] = replace(inputs[name], below=self._model.vocab)
        engine, self.note = pick_engine(self.options.engine, self.loaded.registry, 1)
        self._session = self._stack.enter_context(self.loaded.session(engine, inputs, 1, REMEDY))
        self._window = window
        return self._session


def load_tokenizer(loaded: LoadedModel, options: Options) -> Tokenizer | None:
    """Return the tokenizer of the model's file; None if the file has none.

    If the tokenizer cannot be read, raise GGUFError, or return None if the prompt is given as token ids.
    """
    if not has_text(loaded.file):
        return None
    try:
        return read_tokenizer(loaded.file)
    except GGUFError:
        if options.ids is None:
            raise
        return None


class ChatTemplate(NamedTuple):
    """A chat template and the file it comes from."""

    text: str
    file: str


def chat_template(loaded: LoadedModel, options: Options, required: bool = True) -> ChatTemplate | None:
    """Return the chat template in the adapter's file, or if there is none, in the model's file; None without --chat.

    If neither file has a template, raise UserError if `required` is True, and return None if it is False.
    """
    if not options.chat:
        return None
    for path in filter(None, (loaded.adapter, loaded.path)):
        if text := read_chat_template(open_gguf(str(path))):
            return ChatTemplate(text, str(path))
    if required:
        raise UserError(f"{loaded.name}: has no chat template; leave --chat out")
    return None


def prompt_ids(
    loaded: LoadedModel, options: Options, tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> list[int]:
    """Return the prompt as token ids. Raise UserError if the file has no tokenizer for a text prompt."""
    if options.ids is not None:
        return options.ids
    if tokenizer is None:
        raise UserError(f"{loaded.name}: has no tokenizer; use --ids 1,2,3 in place of --prompt")
    assert options.prompt is not None
    if template is None:
        return tokenizer.prompt(options.prompt).tolist()
    turns = [*system_turns(options), {"role": "user", "content": options.prompt}]
    return chat_ids(tokenizer, Template(template.text, tokenizer, template.file), turns)


def system_turns(options: Options) -> list[dict[str, str]]:
    """Return a list with the system message in the form of a chat message; an empty list if there is none."""
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def chat_ids(tokenizer: Tokenizer, template: Template, turns: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the token ids of the messages `turns`, followed by the prompt for the assistant's next answer.

    Raise BadChat if the template ignores the system message or renders an empty text.
    """
    text = template.render(turns, answer=True).text
    if turns[0]["role"] == "system" and turns[0]["content"].strip() not in text:
        raise BadChat("the chat template ignores --system; put it into the first message")
    if not text:
        raise BadChat("the chat template renders an empty prompt; use --prompt without --chat")
    begin = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    return begin + tokenizer.encode(text, special=True, after=begin[0] if begin else None).tolist()


def require_room(loaded: LoadedModel, count: int, context: int) -> None:
    """Raise UserError if a prompt of `count` tokens is longer than the context."""
    if count > context:
        raise UserError(f"{loaded.name}: the prompt has {count} tokens; use at most {context}, the model's context")


def _generate_with_llama_cpp(loaded: LoadedModel, options: Options, write: Callable[[str], None]) -> Generated:
    file, adapter, flag = loaded.file, loaded.adapter, f"--engine {options.engine}"
    settings = parse_label(options.engine, flag)[1]
    threads = settings.get("threads", "0")  # 0: llama.cpp chooses
    is_valid = not settings.keys() - {"threads"} and is_integer(threads, 0, MAX_THREADS)
    if not is_valid or (":" in options.engine and not settings):
        usage = f"only the setting threads, at most {MAX_THREADS}: {LLAMA_CPP}:threads=1"
        raise UserError(f"{flag}: {LLAMA_CPP} takes {usage}")
    context = file.metadata.get(f"{file.architecture}.context_length")
    if not isinstance(context, int):
        raise file.error(f"has the architecture {printable(file.architecture)}, which llama.cpp cannot run")
    if not has_text(file):
        raise file.error("has no tokenizer; llama.cpp needs one to generate")
    template, ids, prompt = chat_template(loaded, options), options.ids, options.prompt or ""
    if template and (options.system is not None or template.file != str(loaded.path)):  # llama.cpp supports neither
        ids = prompt_ids(loaded, options, load_tokenizer(loaded, options), template)
    prompt_size = len(ids) if ids is not None else len(prompt.encode()) + llamacpp.MARGIN
    task = llamacpp.Task(
        llamacpp.find_package(), str(gguf_path(file)), str(adapter) if adapter else None, int(threads), ids, prompt,
        options.chat, context, n_ctx=min(context, prompt_size + options.tokens), tokens=options.tokens,
        sampling={**asdict(options.sampling), "seed": options.seed % (2**32 - 1)}, stream=not options.json,
    )  # fmt: skip
    text, ids_read, began = "", list[int](), time.perf_counter()
    for answer in llamacpp.stream(task):
        if answer.prompt_ids is not None:
            ids_read, began = answer.prompt_ids, time.perf_counter()
            require_room(loaded, len(ids_read), context)
        elif answer.text:
            text += answer.text
            write(answer.text)
    count = answer.count or 0
    reason = END if answer.stop_reason == "eos" else LIMIT if count >= options.tokens else FULL
    return Generated(
        str(loaded.path), f"{LLAMA_CPP} ({task.package})", options.prompt, ids_read, text, answer.ids, count, reason,
        time.perf_counter() - began, options.seed, template and template.file,
    )  # fmt: skip
