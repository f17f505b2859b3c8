"""Text from a model in a file, as it comes: what `toyexp generate` writes."""

from __future__ import annotations

import codecs
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from toyexp.base.bounds import is_whole
from toyexp.base.errors import UserError, choose
from toyexp.base.memory import running_out
from toyexp.base.random import stream
from toyexp.base.terminal import write_text
from toyexp.base.threads import MOST_THREADS
from toyexp.base.writing import dump_json
from toyexp.commands.options import one_file, options, refuse_settings
from toyexp.config.adapters import adapter_of
from toyexp.config.restored import file_of
from toyexp.contract.command import Arguments
from toyexp.contract.plugins import load
from toyexp.contract.recipe import Setup
from toyexp.contract.registry import Registry
from toyexp.contract.sampling import Sampling, continuation
from toyexp.formats.file_plan import frozen_plan
from toyexp.formats.gguf.header import GGUFError, origin
from toyexp.formats.gguf.open_model import model_of
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.source import opened
from toyexp.formats.gguf.tokenizer import has_text, read_chat_template, read_tokenizer
from toyexp.reference.forward import check_forward
from toyexp.text.chat import Template
from toyexp.text.tokenizer import Tokenizer
from toyexp.training.memory import check_plan

if TYPE_CHECKING:
    from toyexp.config.request import Request

LLAMA_CPP = "llama.cpp"
LESS = "fewer --tokens take less"
# Why it ends.
END, LIMIT, FULL = "end of text", "token limit", "context full"

HELP = """\
usage: toyexp generate MODEL --prompt TEXT [options] [plugins=[my_module]]

Text from a language model, printed as it comes. MODEL is a GGUF file, the directory of a run that
left a model.gguf, or a checkpoint (run/checkpoints/step-200).
  toyexp generate model.gguf --prompt 'def ' --tokens 100
  echo -n 'Once upon a time' | toyexp generate model.gguf --prompt - --temperature 0 > tale.txt
  toyexp generate model.gguf --chat --prompt 'Why is the sky blue?'
  toyexp generate base.gguf --adapter adapter.gguf --prompt 'def ' --engine ggml:threads=1

options
  --prompt TEXT      what to continue; - reads it from standard input
  --ids 1,2,3        token ids in its place; a file without a tokenizer answers in ids too
  --chat             the prompt is a user's message, written by the file's chat template, or by the adapter's own
  --tokens N         tokens to write at most (64)
  --temperature X    logits are divided by it; 0: always the likeliest token (0.8)
  --top-k N          choose among the N likeliest tokens; 0: all (40)
  --top-p X          and among the fewest that together have this probability; 1: all (0.95)
  --min-p X          and among those with this share of the likeliest one's probability; 0: all (0)
  --seed N           another text for the same prompt (0)
  --adapter PATH     a LoRA adapter on the model: a run of recipe=lora, its adapter.gguf, or a directory of PEFT's
  --engine NAME      auto (the best engine here), any engine with its settings (cpu:dtype=float64:threads=1), or
                     llama.cpp, through the Python package xllamacpp or llama-cpp-python (llama.cpp:threads=1)
  --json             one JSON object at the end in place of the text

It ends at an end token, after --tokens, or when the model's context is full. The same seed draws by the same numbers on
every engine; llama.cpp has its own. seconds count from reading the prompt, with the model in memory."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    model: Path
    prompt: str | None = None
    ids: list[int] | None = None
    chat: bool = False
    tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    adapter: str | None = None
    engine: str = "auto"
    json: bool = False
    plugins: Sequence[str] = ()  # local modules


# The least and the most that a number can be.
LIMITS = {
    "--tokens": (1, 10**6), "--top-k": (0, 10**6), "--seed": (0, 2**63 - 1),
    "--temperature": (0.0, 100.0), "--top-p": (1e-9, 1.0), "--min-p": (0.0, 1.0),
}  # fmt: skip


def run(arguments: Arguments) -> int:
    """Has the model write; how fast that was goes to standard error."""
    asked = read(arguments)
    try:
        found = generate(asked, load(asked.plugins), (lambda text: None) if asked.json else write_text)
    except KeyboardInterrupt:
        print(flush=True)
        raise
    print(dump_json(found.plain()) if asked.json else "", flush=True)
    if not asked.json:
        print(found.line(), file=sys.stderr)
    return 0


def read(arguments: Arguments) -> Options:
    """The command line's options; UserError for what cannot be, and for a prompt that is missing."""
    files, ids = arguments.rest, arguments.values.get("--ids")
    refuse_settings("generate", files, "options, and plugins=[...]")
    model = one_file("generate", files, ": toyexp generate model.gguf --prompt 'def '")
    parts = None if ids is None else re.split(r"\s*,\s*|\s+", ids.strip())
    if parts is not None and not all(is_whole(part, 0, 2**31 - 1) for part in parts):
        raise UserError(f"--ids {ids}: takes token ids with commas between them, such as 1,2,3")
    numbers = None if parts is None else [int(part) for part in parts]
    more = {"model": model, "ids": numbers, "plugins": arguments.modules}
    asked = options(Options, arguments, LIMITS, **more, sampling=options(Sampling, arguments, LIMITS))
    if (asked.prompt is None) == (numbers is None):
        raise UserError("generate: give --prompt TEXT (- reads it from standard input), or --ids 1,2,3 in its place")
    if asked.chat and numbers is not None:
        raise UserError("generate --chat: takes its message from --prompt; ids go without it")
    return asked


# -- what is found ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generated:
    """What a model wrote."""

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


class Scribe:
    """The tokens so far, and their text: `write` gets each part as soon as it is whole characters.

    Without a tokenizer the text is the ids with commas between them.
    """

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
            self.put(self._decode(self._tokenizer.bytes_of(token)))

    def put(self, text: str) -> None:
        """Text as it is."""
        self.text += text
        if text:
            self._write(text)

    def finish(self) -> None:
        """No token follows: what is left of a character is none."""
        self.put(self._decode(b"", final=True))


# -- writing ----------------------------------------------------------------------------------------------------------


def generate(asked: Options, registry: Registry, write: Callable[[str], None]) -> Generated:
    """Lets the model write; `write` gets the text as it comes. UserError for whatever does not fit together."""
    from toyexp.config.engines import read_label
    from toyexp.config.request import Request

    engines, name = {*registry.offers["engine"], "auto", LLAMA_CPP}, asked.engine.partition(":")[0]
    if name not in engines:
        raise UserError(f"--engine {asked.engine}: {choose(name, engines)}")
    _, own = read_label(asked.engine, f"--engine {asked.engine}")
    path, asked = file_of(asked.model, registry=registry), replace(asked, prompt=_read_prompt(asked.prompt))
    file = opened(str(path))
    if file.metadata.get("general.type") == "adapter":
        raise file.error("holds an adapter; name the model that it belongs to, and this behind --adapter")
    if asked.adapter:
        asked = replace(asked, adapter=str(adapter_of(Path(asked.adapter), lambda: model_of(path, registry))))
    if name == LLAMA_CPP:
        return _by_llama_cpp(path, asked, own, write)
    (request,) = Request([], registry, asked.plugins).on_engines([asked.engine]).values()
    return _by_engine(path, asked, request, write)


def _read_prompt(given: str | None) -> str | None:
    if given == "-" and sys.stdin is None:
        raise UserError("--prompt -: standard input is closed; --prompt TEXT, or a pipe")
    raw = sys.stdin.buffer.read() if given == "-" else os.fsencode(given or "")
    try:
        return None if given is None else raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt: not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x})") from None


def _by_engine(path: Path, asked: Options, request: Request, write: Callable[[str], None]) -> Generated:
    model: Any = model_of(path, request.registry)
    if not model.reads.sequence:
        raise UserError(f"{origin(path)}: a {model.name} reads {model.reads} and writes no text; try toyexp eval")
    tokenizer, template = _language(path, asked), chat_template(path, asked)
    ids = _prompt_ids(path, asked, tokenizer, template)
    vocab = min(tokenizer.vocab, model.vocab) if tokenizer else model.vocab
    beyond = [i for i in ids if i >= vocab]
    if beyond:
        raise UserError(f"{origin(path)}: the prompt's id {beyond[0]} is not one of its 0..{vocab - 1}")
    _require_room(path, len(ids), model.context)
    # The window holds what is asked for and no more: an engine of static graphs computes all of it for every token.
    inputs, name = model.reads.inputs(min(model.context, len(ids) + asked.tokens)), model.reads.sequence
    inputs[name] = replace(inputs[name], below=model.vocab)
    plan = frozen_plan(model, path, Setup(inputs, rows=1), Path(asked.adapter) if asked.adapter else None)
    built, scribe, reason = request.parts(), Scribe(tokenizer, write), FULL
    engine = built.engine.of_one_row()
    note = built.engine_note if engine is built.engine else f"{engine.name}: {engine.check()}, of its devices the first"
    check_plan(plan, engine, LESS)
    engine.check_plan(plan)
    check_forward(plan, str(origin(path)))
    with running_out(LESS), engine.realize(plan) as session:
        session.build()
        decoder, words, began = session.decoder(), stream(asked.seed, "generate"), time.perf_counter()
        for token in continuation(decoder, ids, asked.sampling, words, vocab):
            if tokenizer and token in tokenizer.ends:
                reason = END
                break
            scribe.add(token)
            if len(scribe.ids) == asked.tokens:
                reason = LIMIT
                break
        scribe.finish()
        seconds = time.perf_counter() - began
    return Generated(
        str(origin(path)), note, asked.prompt, ids, scribe.text if tokenizer else None, scribe.ids,
        len(scribe.ids), reason, seconds, asked.seed, template and template.file,
    )  # fmt: skip


def _language(path: Path, asked: Options) -> Tokenizer | None:
    """The file's tokenizer, if it has one and it is needed."""
    file = opened(str(path))
    if not has_text(file):
        return None
    try:
        return read_tokenizer(file)
    except GGUFError:
        if asked.ids is None:
            raise
        return None


class ChatTemplate(NamedTuple):
    """A chat template, and which file has it."""

    text: str
    file: str


def chat_template(path: Path, asked: Options) -> ChatTemplate | None:
    """What writes a chat's prompt: the template that the adapter was trained with, or the model's.

    None without --chat; UserError where there is none.
    """
    if not asked.chat:
        return None
    for name in filter(None, (asked.adapter, str(path))):
        with GGUFFile(name) as file:
            if text := read_chat_template(file):
                return ChatTemplate(text, name)
    raise UserError(f"{origin(path)}: has no chat template; leave --chat out")


def _prompt_ids(path: Path, asked: Options, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> list[int]:
    if asked.ids is not None:
        return asked.ids
    if tokenizer is None:
        raise UserError(f"{origin(path)}: has no tokenizer, so it knows ids alone: --ids 1,2,3 in place of --prompt")
    assert asked.prompt is not None
    if template is None:
        return tokenizer.prompt(asked.prompt).tolist()
    question = [{"role": "user", "content": asked.prompt}]
    text = Template(template.text, tokenizer, template.file).render(question, answer=True).text
    begin = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    return begin + tokenizer.encode(text, special=True, after=begin[0] if begin else None).tolist()


def _require_room(path: Path, count: int, context: int) -> None:
    if count > context:
        raise UserError(f"{origin(path)}: the prompt has {count} tokens, the model's context is {context}")


def _by_llama_cpp(path: Path, asked: Options, own: Mapping[str, str], write: Callable[[str], None]) -> Generated:
    from toyexp.commands import llamacpp

    threads = own.get("threads", "0")  # 0 is llama.cpp's own choice
    if own.keys() - {"threads"} or not is_whole(threads, 0, MOST_THREADS) or (":" in asked.engine and not own):
        usage = f"threads alone, at most {MOST_THREADS}: {LLAMA_CPP}:threads=1"
        raise UserError(f"--engine {asked.engine}: {LLAMA_CPP} takes {usage}")
    with GGUFFile(path) as file:
        context = file.metadata.get(f"{file.architecture}.context_length")
        if not isinstance(context, int):
            raise file.error("holds no language model")
        if not has_text(file):
            raise file.error("has no tokenizer, and llama.cpp does not write without one")
    if asked.adapter:
        GGUFFile(asked.adapter).close()  # which says what is wrong with a file that is none
    template, ids, prompt = chat_template(path, asked), asked.ids, asked.prompt or ""
    if template and template.file != str(path):  # which llama.cpp does not know of
        ids = _prompt_ids(path, asked, _language(path, asked), template)
    most = len(ids) if ids is not None else len(prompt.encode()) + llamacpp.MARGIN
    task = llamacpp.Task(
        llamacpp.installed(), str(path), asked.adapter, int(threads), ids, prompt, asked.chat, context,
        n_ctx=min(context, most + asked.tokens), tokens=asked.tokens,
        sampling={**asdict(asked.sampling), "seed": asked.seed % (2**32 - 1)}, stream=not asked.json,
    )  # fmt: skip
    text, prompt_ids, began = "", list[int](), time.perf_counter()
    for answer in llamacpp.stream(task):
        if answer.prompt_ids is not None:
            prompt_ids, began = answer.prompt_ids, time.perf_counter()
            _require_room(path, len(prompt_ids), context)
        elif answer.text:
            text += answer.text
            write(answer.text)
    count = answer.count or 0
    reason = END if answer.stopped == "eos" else LIMIT if count >= asked.tokens else FULL
    return Generated(
        str(path), f"{LLAMA_CPP} ({task.package})", asked.prompt, prompt_ids, text, answer.ids, count, reason,
        time.perf_counter() - began, asked.seed, template and template.file,
    )  # fmt: skip
