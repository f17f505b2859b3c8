"""Text from a model in a file, as it comes: what `toyexp generate` writes."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from toyexp.base.errors import UserError, choose
from toyexp.base.random import stream
from toyexp.base.terminal import complain, tell_aside, write_text
from toyexp.base.threads import MOST_THREADS
from toyexp.base.validators import is_whole
from toyexp.base.writing import dump_json
from toyexp.cli.args import one_file, options, refuse_settings
from toyexp.cli.chat import chat
from toyexp.cli.generator import (
    END,
    FULL,
    LIMIT,
    Author,
    Generated,
    Options,
    Scribe,
    chat_template,
    language,
    prompt_ids,
    require_room,
)
from toyexp.config.restored import adapter_of, check_base, file_of
from toyexp.formats.gguf.open_model import model_of, opened
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import has_text
from toyexp.interfaces.command import Arguments
from toyexp.interfaces.sampling import Sampling
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Registry

LLAMA_CPP = "llama.cpp"
IN_A_CHAT = 512  # tokens of an answer, unless told
MOST_TEXT = 1 << 24  # bytes of a prompt
CHAT_STEP = 256  # positions by which a chat's window grows

HELP = """\
usage: toyexp generate MODEL --prompt TEXT [options] [plugins=[my_module]]
       toyexp generate MODEL --chat [options] [plugins=[my_module]]

Text from a language model, printed as it comes. MODEL is a GGUF file, the directory of a run that
left a model.gguf, or a checkpoint (run/checkpoints/step-200).
  toyexp generate model.gguf --prompt 'def ' --tokens 100
  echo -n 'Once upon a time' | toyexp generate model.gguf --prompt - --temperature 0 > tale.txt
  toyexp generate model.gguf --chat --prompt 'Why is the sky blue?'
  toyexp generate base.gguf --adapter adapter.gguf --prompt 'def ' --engine ggml:threads=1

options
  --prompt TEXT      what to continue; - reads it from standard input
  --ids 1,2,3        token ids in its place; a file without a tokenizer answers in ids too
  --chat             the prompt is a user's message, written by the file's chat template, or by the adapter's own;
                     without a prompt a conversation, a line a message: /quit ends it, Ctrl-C stops an answer
  --system TEXT      with --chat: what the model is told before the first message
  --tokens N         tokens to write at most (64; of an answer in a conversation 512)
  --temperature X    logits are divided by it; 0: always the likeliest token (0.8)
  --top-k N          choose among the N likeliest tokens; 0: all (40)
  --top-p X          and among the fewest that together have this probability; 1: all (0.95)
  --min-p X          and among those with this share of the likeliest one's probability; 0: all (0)
  --seed N           another text for the same prompt (0)
  --adapter PATH     a LoRA adapter on the model: a run of recipe=lora, its adapter.gguf, or a directory of PEFT's
  --engine NAME      auto (the best engine here), any engine with its settings (cpu:dtype=float64:threads=1), or
                     llama.cpp, through the Python package xllamacpp or llama-cpp-python (llama.cpp:threads=1)
  --json             one JSON object at the end in place of the text; in a conversation one for each answer

It ends at an end token or after --tokens. Where the model's context is full, it goes on from the later half of the
text, and says so once; llama.cpp ends there. The same seed draws by the same numbers on every engine; llama.cpp has its
own. seconds count from reading the prompt, with the model in memory."""


# The least and the most that a number can be.
LIMITS = {
    "--tokens": (1, 10**6), "--top-k": (0, 10**6), "--seed": (0, 2**63 - 1),
    "--temperature": (0.0, 100.0), "--top-p": (1e-9, 1.0), "--min-p": (0.0, 1.0),
}  # fmt: skip


def run(arguments: Arguments) -> int:
    """Has the model write; how fast that was goes to standard error."""
    asked = read(arguments)
    registry, write = load(asked.plugins), (lambda text: None) if asked.json else write_text

    notes: list[str] = []  # told behind the text, in the middle of which they would stand

    def show(found: Generated) -> None:
        print(dump_json(found.plain()) if asked.json else "", flush=True)

    try:
        if asked.chat and asked.prompt is None:
            return 1 if converse(asked, registry, write, show) else 0
        found = generate(asked, registry, write, tell_aside if asked.json else notes.append)
    except KeyboardInterrupt:
        print(flush=True)
        raise
    show(found)
    for note in notes if asked.json else [*notes, found.line()]:
        tell_aside(note)
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
    if asked.system is not None and not asked.chat:
        raise UserError(f"generate --system: needs --chat: toyexp generate {model} --chat --system ... --prompt ...")
    if asked.chat and numbers is not None:
        raise UserError("generate --chat: takes its message from --prompt; ids go without it")
    if asked.chat and asked.prompt is None:
        return asked if "--tokens" in arguments.values else replace(asked, tokens=IN_A_CHAT)
    if (asked.prompt is None) == (numbers is None):
        usage = "--prompt TEXT (- reads it from standard input), --ids 1,2,3 in its place, or --chat for a conversation"
        raise UserError(f"generate: give {usage}")
    return asked


# -- writing ----------------------------------------------------------------------------------------------------------


def generate(
    asked: Options, registry: Registry, write: Callable[[str], None], slid: Callable[[str], object] = tell_aside
) -> Generated:
    """Lets the model write; `write` gets the text as it comes, `slid` a line when it goes beyond the context.

    Raises UserError for whatever does not fit together.
    """
    path, own, asked = _chosen(replace(asked, prompt=_read_prompt(asked.prompt)), registry)
    if asked.engine.partition(":")[0] == LLAMA_CPP:
        return _by_llama_cpp(path, asked, own, write)
    with _author(path, asked, registry) as author:
        template = chat_template(path, asked)
        ids, scribe = prompt_ids(path, asked, author.tokenizer, template), Scribe(author.tokenizer, write)
        return author.write(asked.prompt, ids, scribe, stream(asked.seed, "generate"), template, slid=slid)


def converse(
    asked: Options, registry: Registry, write: Callable[[str], None], show: Callable[[Generated], None]
) -> int:
    """Hold a conversation, and return how many messages of a pipe were left out; see `chat`."""
    path, _, asked = _chosen(asked, registry)
    if asked.engine.partition(":")[0] == LLAMA_CPP:
        raise UserError(
            f"--engine {asked.engine}: answers one --prompt at a time; a chat that goes on is of the others"
        )
    with _author(path, asked, registry, CHAT_STEP) as author:
        return chat(author, path, write, show)


def _author(path: Path, asked: Options, registry: Registry, step: int = 1) -> Author:
    from toyexp.config.request import Request

    (request,) = Request([], registry, asked.plugins).on_engines([asked.engine]).values()
    return Author(path, asked, request, step)


def _chosen(asked: Options, registry: Registry) -> tuple[Path, Mapping[str, str], Options]:
    """The model's file, the engine's own settings, and the options with the adapter's file."""
    from toyexp.config.engines import read_label

    engines, name = {*registry.offers["engine"], "auto", LLAMA_CPP}, asked.engine.partition(":")[0]
    if name not in engines:
        raise UserError(f"--engine {asked.engine}: {choose(name, engines)}")
    _, own = read_label(asked.engine, f"--engine {asked.engine}")
    path = file_of(asked.model, registry=registry)
    file = opened(str(path))
    if file.metadata.get("general.type") == "adapter":
        raise file.error("holds an adapter; name the model that it belongs to, and this behind --adapter")
    if asked.adapter:
        adapter = adapter_of(Path(asked.adapter), lambda: model_of(path, registry), registry)
        for warning in check_base(adapter, path):
            complain(f"warning: {warning}")
        asked = replace(asked, adapter=str(adapter))
    return path, own, asked


def _read_prompt(given: str | None) -> str | None:
    if given == "-" and sys.stdin is None:
        raise UserError("--prompt -: standard input is closed; --prompt TEXT, or a pipe")
    raw = sys.stdin.buffer.read(MOST_TEXT + 1) if given == "-" else os.fsencode(given or "")
    if len(raw) > MOST_TEXT:
        raise UserError(f"--prompt -: more than {MOST_TEXT >> 20} MiB, which fits no context; give its last part")
    try:
        return None if given is None else raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt: not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x})") from None


def _by_llama_cpp(path: Path, asked: Options, own: Mapping[str, str], write: Callable[[str], None]) -> Generated:
    from toyexp.cli import llamacpp

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
    if template and (asked.system is not None or template.file != str(path)):  # of which llama.cpp does not know
        ids = prompt_ids(path, asked, language(path, asked), template)
    most = len(ids) if ids is not None else len(prompt.encode()) + llamacpp.MARGIN
    task = llamacpp.Task(
        llamacpp.installed(), str(path), asked.adapter, int(threads), ids, prompt, asked.chat, context,
        n_ctx=min(context, most + asked.tokens), tokens=asked.tokens,
        sampling={**asdict(asked.sampling), "seed": asked.seed % (2**32 - 1)}, stream=not asked.json,
    )  # fmt: skip
    text, ids_read, began = "", list[int](), time.perf_counter()
    for answer in llamacpp.stream(task):
        if answer.prompt_ids is not None:
            ids_read, began = answer.prompt_ids, time.perf_counter()
            require_room(path, len(ids_read), context)
        elif answer.text:
            text += answer.text
            write(answer.text)
    count = answer.count or 0
    reason = END if answer.stopped == "eos" else LIMIT if count >= asked.tokens else FULL
    return Generated(
        str(path), f"{LLAMA_CPP} ({task.package})", asked.prompt, ids_read, text, answer.ids, count, reason,
        time.perf_counter() - began, asked.seed, template and template.file,
    )  # fmt: skip
