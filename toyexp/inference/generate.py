"""Write text with a model in a file, on one of our engines or by llama.cpp."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from toyexp.base.errors import UserError, suggest
from toyexp.base.memory import convert_memory_errors
from toyexp.base.random import stream
from toyexp.base.threads import MAX_THREADS
from toyexp.base.validators import is_integer
from toyexp.config.build import parse_label
from toyexp.formats.gguf.header import GGUFError
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import has_text, read_chat_template, read_tokenizer
from toyexp.inference import llamacpp
from toyexp.inference.llamacpp import LLAMA_CPP
from toyexp.inference.loaded_model import LoadedModel, pick_engine
from toyexp.interfaces.sampling import Sampling, generate_endlessly
from toyexp.interfaces.session import Session
from toyexp.plugins.registry import Registry
from toyexp.tokenizers.chat_template import BadChat, Template
from toyexp.tokenizers.tokenizer import Tokenizer

LESS = "fewer --tokens take less"
# Why it ends.
END, LIMIT, FULL, STOPPED = "end of text", "token limit", "context full", "stopped"


@dataclass(frozen=True)
class Options:
    """What a text is written from, and how."""

    model: Path
    prompt: str | None = None
    ids: list[int] | None = None
    chat: bool = False
    system: str | None = None  # what a chat begins with
    tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    adapter: str | None = None
    engine: str = "auto"
    json: bool = False  # all of it at the end, with all ids


@dataclass(frozen=True)
class Generated:
    """Text that a model wrote."""

    file: str
    engine: str
    prompt: str | None
    prompt_ids: list[int]
    text: str | None  # of a file with a tokenizer
    ids: list[int]  # without an end token
    tokens: int  # how many they are; of llama.cpp's ids only --json knows all
    reason: str
    seconds: float
    seed: int
    template: str | None = None  # with --chat: the file whose chat template wrote the prompt
    slides: int = 0  # how often the context was full, and its later half read anew

    @property
    def tokens_per_second(self) -> float:
        """Tokens written a second, the reading of the prompt included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}

    def line(self) -> str:
        """For a person."""
        speed = f"{self.tokens} tokens in {self.seconds:.2f} s, {self.tokens_per_second:.1f} tokens/s"
        template = f" · chat template of {self.template}" if self.template else ""
        return f"{speed} · {self.reason} · {self.engine}{template}"


class TextBuilder:
    """The tokens so far, and their text (without a tokenizer, the ids); `write` gets whole characters as they come."""

    def __init__(self, tokenizer: Tokenizer | None, write: Callable[[str], None]):
        self._tokenizer, self._write = tokenizer, write
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.ids: list[int] = []
        self.text = ""

    def add(self, token: int) -> None:
        """The next token."""
        self.ids.append(token)
        if self._tokenizer is None:
            self.put(f"{',' if len(self.ids) > 1 else ''}{token}")
        else:
            self.put(self._decode(self._tokenizer.token_bytes(token)))

    def put(self, text: str) -> None:
        """Text as it is."""
        self.text += text
        if text:
            self._write(text)

    def finish(self) -> None:
        """No token follows: what is left of a character is none."""
        self.put(self._decode(b"", final=True))


# -- writing ----------------------------------------------------------------------------------------------------------


def generate(
    asked: Options, registry: Registry, write: Callable[[str], None], slid: Callable[[str], object]
) -> Generated:
    """Let the model write; `write` gets the text as it comes, `slid` a line when it goes beyond the context."""
    loaded = load_model(asked, registry)
    if asked.engine.partition(":")[0] == LLAMA_CPP:
        return _generate_with_llama_cpp(loaded, asked, write)
    with Generator(loaded, asked) as author:
        template = chat_template(loaded, asked)
        ids, scribe = prompt_ids(loaded, asked, author.tokenizer, template), TextBuilder(author.tokenizer, write)
        return author.write(asked.prompt, ids, scribe, stream(asked.seed, "generate"), template, slid=slid)


def load_model(asked: Options, registry: Registry) -> LoadedModel:
    """Find the files of the model and the adapter; UserError for an unknown engine, and for an adapter alone."""
    engines, name = {*registry.offers["engine"], "auto", LLAMA_CPP}, asked.engine.partition(":")[0]
    if name not in engines:
        raise UserError(f"--engine {asked.engine}: {suggest(name, engines)}")
    parse_label(asked.engine, f"--engine {asked.engine}")
    loaded = LoadedModel.open(asked.model, registry, Path(asked.adapter) if asked.adapter else None)
    if loaded.file.metadata.get("general.type") == "adapter":
        raise loaded.file.error("holds an adapter; name the model that it belongs to, and this behind --adapter")
    return loaded


class Generator:
    """A model that writes, in a session that `with` closes; its window grows by `step` positions at a time."""

    def __init__(self, loaded: LoadedModel, asked: Options, step: int = 1):
        self.loaded, self.asked, self._step = loaded, asked, step
        model: Any = loaded.model
        if not model.reads.sequence:
            raise UserError(f"{loaded.name}: a {model.name} reads {model.reads} and writes no text; try toyexp eval")
        self._model = model
        self.context: int = model.context
        self.tokenizer, self.slides = load_tokenizer(loaded, asked), 0
        self.vocab = min(self.tokenizer.vocab, model.vocab) if self.tokenizer else model.vocab
        self.note = ""
        self._window, self._held = 0, ExitStack()
        self._session: Session | None = None

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def write(
        self, prompt: str | None, ids: Sequence[int], scribe: TextBuilder, words: np.random.Philox,
        template: ChatTemplate | None, stopped: Callable[[], bool] = lambda: False,
        slid: Callable[[str], object] = lambda note: None,
    ) -> Generated:  # fmt: skip
        """Continue `ids`; beyond the context read its later half anew, and tell `slid` once. `stopped` ends it."""
        beyond = [i for i in ids if i >= self.vocab]
        if beyond:
            raise UserError(f"{self.loaded.name}: the prompt's id {beyond[0]} is not one of its 0..{self.vocab - 1}")
        require_room(self.loaded, len(ids), self.context)
        ends: frozenset[int] | set[int] = set(self.tokenizer.ends) if self.tokenizer else set()

        def slides() -> None:
            self.slides += 1
            if self.slides == 1:
                left = max(1, self.context // 2)
                slid(f"note: the context of {self.context} tokens is full; it goes on from the last {left} of them")

        with convert_memory_errors(LESS):
            session, began, reason = self._opened(len(ids) + self.asked.tokens), time.perf_counter(), LIMIT
            for token in generate_endlessly(session, ids, self.asked.sampling, words, self.vocab, slides):
                if stopped():
                    reason = STOPPED
                elif token in ends:
                    reason = END
                else:
                    scribe.add(token)
                    if len(scribe.ids) < self.asked.tokens:
                        continue
                break
        scribe.finish()
        return Generated(
            self.loaded.name, self.note, prompt, list(ids), scribe.text if self.tokenizer else None, scribe.ids,
            len(scribe.ids), reason, time.perf_counter() - began, self.asked.seed, template and template.file,
            self.slides,
        )  # fmt: skip

    def _opened(self, count: int) -> Session:
        window = min(self.context, -(-count // self._step) * self._step)
        if self._session is not None and self._window >= window:
            return self._session
        self._held.close()
        self._session = None
        inputs, name = self._model.reads.inputs(window), self._model.reads.sequence
        inputs[name] = replace(inputs[name], below=self._model.vocab)
        engine, self.note = pick_engine(self.asked.engine, self.loaded.registry, 1)
        self._session = self._held.enter_context(self.loaded.session(engine, inputs, 1, LESS))
        self._window = window
        return self._session


def load_tokenizer(loaded: LoadedModel, asked: Options) -> Tokenizer | None:
    """Return the file's tokenizer, if it has one and it is needed."""
    if not has_text(loaded.file):
        return None
    try:
        return read_tokenizer(loaded.file)
    except GGUFError:
        if asked.ids is None:
            raise
        return None


class ChatTemplate(NamedTuple):
    """A chat template, and which file has it."""

    text: str
    file: str


def chat_template(loaded: LoadedModel, asked: Options, required: bool = True) -> ChatTemplate | None:
    """Return the chat template of the adapter or model; None without --chat, or if none is there nor `required`."""
    if not asked.chat:
        return None
    for path in filter(None, (loaded.adapter, loaded.path)):
        with GGUFFile(path) as file:
            if text := read_chat_template(file):
                return ChatTemplate(text, str(path))
    if required:
        raise UserError(f"{loaded.name}: has no chat template; leave --chat out")
    return None


def prompt_ids(
    loaded: LoadedModel, asked: Options, tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> list[int]:
    """Return the ids that are continued: those given, or the prompt's; UserError where it cannot be told in ids."""
    if asked.ids is not None:
        return asked.ids
    if tokenizer is None:
        raise UserError(f"{loaded.name}: has no tokenizer, so it knows ids alone: --ids 1,2,3 in place of --prompt")
    assert asked.prompt is not None
    if template is None:
        return tokenizer.prompt(asked.prompt).tolist()
    turns = [*system_turns(asked), {"role": "user", "content": asked.prompt}]
    return chat_ids(tokenizer, Template(template.text, tokenizer, template.file), turns)


def system_turns(asked: Options) -> list[dict[str, str]]:
    """Return the turns that a chat begins with: the system's, if one was given."""
    return [] if asked.system is None else [{"role": "system", "content": asked.system}]


def chat_ids(tokenizer: Tokenizer, template: Template, turns: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the ids of a conversation, up to where the assistant's next turn begins. Raises BadChat."""
    text = template.render(turns, answer=True).text
    if turns[0]["role"] == "system" and turns[0]["content"].strip() not in text:
        raise BadChat("the chat template leaves --system out; say it in the first message")
    if not text:
        raise BadChat("the chat template writes nothing, so there is nothing to answer; --prompt without --chat")
    begin = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    return begin + tokenizer.encode(text, special=True, after=begin[0] if begin else None).tolist()


def require_room(loaded: LoadedModel, count: int, context: int) -> None:
    """Raise UserError for a prompt that is longer than the context."""
    if count > context:
        raise UserError(f"{loaded.name}: the prompt has {count} tokens, the model's context is {context}")


def _generate_with_llama_cpp(loaded: LoadedModel, asked: Options, write: Callable[[str], None]) -> Generated:
    path, adapter, own = str(loaded.path), loaded.adapter, parse_label(asked.engine, f"--engine {asked.engine}")[1]
    threads = own.get("threads", "0")  # 0 is llama.cpp's own choice
    if own.keys() - {"threads"} or not is_integer(threads, 0, MAX_THREADS) or (":" in asked.engine and not own):
        usage = f"threads alone, at most {MAX_THREADS}: {LLAMA_CPP}:threads=1"
        raise UserError(f"--engine {asked.engine}: {LLAMA_CPP} takes {usage}")
    with GGUFFile(path) as file:
        context = file.metadata.get(f"{file.architecture}.context_length")
        if not isinstance(context, int):
            raise file.error("holds no language model")
        if not has_text(file):
            raise file.error("has no tokenizer, and llama.cpp does not write without one")
    template, ids, prompt = chat_template(loaded, asked), asked.ids, asked.prompt or ""
    if template and (asked.system is not None or template.file != str(path)):  # of which llama.cpp does not know
        ids = prompt_ids(loaded, asked, load_tokenizer(loaded, asked), template)
    most = len(ids) if ids is not None else len(prompt.encode()) + llamacpp.MARGIN
    task = llamacpp.Task(
        llamacpp.find_package(), path, str(adapter) if adapter else None, int(threads), ids, prompt, asked.chat,
        context, n_ctx=min(context, most + asked.tokens), tokens=asked.tokens,
        sampling={**asdict(asked.sampling), "seed": asked.seed % (2**32 - 1)}, stream=not asked.json,
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
    reason = END if answer.stopped == "eos" else LIMIT if count >= asked.tokens else FULL
    return Generated(
        str(path), f"{LLAMA_CPP} ({task.package})", asked.prompt, ids_read, text, answer.ids, count, reason,
        time.perf_counter() - began, asked.seed, template and template.file,
    )  # fmt: skip
