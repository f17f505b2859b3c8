"""Write text with a model in a file, as it comes, or hold a conversation: `toyexp generate`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import FrameType

from toyexp.base.errors import UserError
from toyexp.base.random import stream
from toyexp.base.signals import Interrupted, handle_signals
from toyexp.base.terminal import is_terminal, print_note, print_text
from toyexp.base.writing import dump_json
from toyexp.cli.files import parse_model_path
from toyexp.inference.generate import (
    LIMIT,
    STOPPED,
    ChatTemplate,
    Generated,
    Generator,
    Options,
    TextBuilder,
    chat_ids,
    chat_template,
    generate,
    load_model,
    system_turns,
)
from toyexp.inference.llamacpp import LLAMA_CPP
from toyexp.interfaces.command import Arguments
from toyexp.interfaces.sampling import Sampling
from toyexp.plugins.discovery import load
from toyexp.plugins.registry import Registry
from toyexp.tokenizers.chat_template import BadChat, Template

CHAT_TOKENS = 512  # tokens of an answer, unless told
MAX_PROMPT_BYTES = 1 << 24  # bytes of a prompt
CHAT_STEP = 256  # positions by which a chat's window grows
QUIT = "/quit"
CHAT_HINT = f"{QUIT}, or the end of the input, ends it; Ctrl-C stops an answer"

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
--chat writes the prompt as a user's message by the adapter's or the file's chat template. In a conversation each line
is a message: /quit ends it, Ctrl-C stops an answer. llama.cpp needs the package xllamacpp or llama-cpp-python.
Text ends at an end token or after --tokens. If the context is full, it goes on from the later half of the text;
llama.cpp ends there. A seed draws the same numbers on every engine but llama.cpp."""


def run(arguments: Arguments) -> int:
    """Write text by the model; its speed goes to standard error."""
    asked = read(arguments)
    registry, write = load(arguments.modules), (lambda text: None) if asked.json else print_text
    notes: list[str] = []  # shown behind the text, in the middle of which they would stand

    def show(found: Generated) -> None:
        print(dump_json(found.plain()) if asked.json else "", flush=True)

    try:
        if asked.chat and asked.prompt is None:
            return 1 if chat(asked, registry, write, show) else 0
        asked = replace(asked, prompt=_read_prompt(asked.prompt))
        found = generate(asked, registry, write, print_note if asked.json else notes.append)
    except KeyboardInterrupt:
        print(flush=True)
        raise
    show(found)
    for note in notes if asked.json else [*notes, found.line()]:
        print_note(note)
    return 0


def read(arguments: Arguments) -> Options:
    """Return the command line's options; raise UserError for bad values, and for a prompt that is missing."""
    typed = {name: value for name, value in vars(arguments).items() if value is not None}
    typed["model"] = model = parse_model_path(
        "generate", arguments.rest, ": toyexp generate model.gguf --prompt 'def '"
    )
    typed["sampling"] = Sampling(**{f.name: typed[f.name] for f in fields(Sampling) if f.name in typed})
    asked = Options(**{f.name: typed[f.name] for f in fields(Options) if f.name in typed})
    if asked.system is not None and not asked.chat:
        raise UserError(f"generate --system: needs --chat: toyexp generate {model} --chat --system ... --prompt ...")
    if asked.chat and asked.ids is not None:
        raise UserError("generate --chat: takes its message from --prompt; ids go without it")
    if asked.chat and asked.prompt is None:
        return asked if "tokens" in typed else replace(asked, tokens=CHAT_TOKENS)
    if (asked.prompt is None) == (asked.ids is None):
        usage = "--prompt TEXT (- reads it from standard input), --ids 1,2,3 in its place, or --chat for a conversation"
        raise UserError(f"generate: give {usage}")
    return asked


def _read_prompt(given: str | None) -> str | None:
    if given is None:
        return None
    if given == "-" and sys.stdin is None:
        raise UserError("--prompt -: standard input is closed; --prompt TEXT, or a pipe")
    raw = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1) if given == "-" else os.fsencode(given)
    if len(raw) > MAX_PROMPT_BYTES:
        raise UserError(
            f"--prompt -: more than {MAX_PROMPT_BYTES >> 20} MiB, which fits no context; give its last part"
        )
    return _decode(raw, "--prompt")


def _decode(raw: bytes, option: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{option}: not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x})") from None


# -- a conversation that goes on, in a terminal or through a pipe -----------------------------------------------------


class Conversation:
    """The turns so far, and the ids by which the model continues them.

    Without a template messages and answers follow each other as lines of a text. Once all of it is more than the
    context holds, the oldest turns are left out.
    """

    def __init__(self, author: Generator, template: ChatTemplate | None):
        assert author.tokenizer is not None
        self._author, self._found, self._tokenizer = author, template, author.tokenizer
        self._template = Template(template.text, author.tokenizer, template.file) if template else None
        self._turns = system_turns(author.options)
        self._fixed = len(self._turns)  # turns that are never left out
        self._dropped = self._answering = self._stopped = False
        self._words = stream(author.options.seed, "generate")

    def ids(self, message: str) -> list[int]:
        """Return those after another message; UserError if the template refuses it, or if it alone is too long."""
        turns, context = [*self._turns, {"role": "user", "content": message}], self._author.context
        room = context - min(self._author.options.tokens, context // 4)  # so that an answer has room
        while len(ids := self._ids(turns)) > room and len(turns) > self._fixed + 2:
            del turns[self._fixed : self._fixed + 2]
            if not self._dropped:
                print_note(f"note: the context of {context} tokens is full; the oldest turns are left out now")
            self._dropped = True
        if len(ids) > context:
            raise UserError(f"the message takes {len(ids)} tokens, and the context is {context}: left out")
        self._turns = turns
        return ids

    def _ids(self, turns: list[dict[str, str]]) -> list[int]:
        if self._template is not None:
            return chat_ids(self._tokenizer, self._template, turns)
        pairs = [turns[i : i + 2] for i in range(0, len(turns), 2)]
        return self._tokenizer.prompt("\n".join("".join(t["content"] for t in pair) for pair in pairs)).tolist()

    def answer(self, message: str, ids: list[int], write: Callable[[str], None]) -> Generated:
        """Write what follows the ids of a message, until its end or the first Ctrl-C."""
        scribe, self._answering, self._stopped = TextBuilder(self._tokenizer, write), True, False
        found = self._author.write(message, ids, scribe, self._words, self._found, lambda: self._stopped, print_note)
        self._answering = False
        self._turns.append({"role": "assistant", "content": scribe.text})
        return found

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Stop an answer at the first Ctrl-C; raise at another one, and at one outside of an answer."""
        if not self._answering or self._stopped:
            raise Interrupted(number)
        self._stopped = True


def chat(
    asked: Options, registry: Registry, write: Callable[[str], None], answered: Callable[[Generated], object]
) -> int:
    """Answer message by message, until /quit or the end of the input; `write` gets text as it comes.

    `answered` gets each answer once it is whole, or was stopped. Return how many messages of a pipe were left out.
    UserError for a file that knows ids alone.
    """
    loaded, left_out = load_model(asked, registry), 0
    if asked.engine.partition(":")[0] == LLAMA_CPP:
        raise UserError(f"--engine {asked.engine}: answers one --prompt at a time; a conversation takes another engine")
    with Generator(loaded, asked, CHAT_STEP) as author:
        if author.tokenizer is None:
            raise UserError(f"{loaded.name}: has no tokenizer, and a chat is text; --ids 1,2,3 without --chat")
        template = chat_template(loaded, asked, required=False)
        if asked.system is not None and not template:
            raise UserError(f"{loaded.name}: has no chat template, which would write --system; leave it out")
        how = f"chat template of {template.file}" if template else "no chat template: the text is continued"
        print_note(f"{how} · {CHAT_HINT}")
        talk = Conversation(author, template)
        with handle_signals({signal.SIGINT: talk.interrupt}):
            for message in messages():
                try:
                    ids = talk.ids(message)
                except BadChat as error:
                    raise UserError(f"{template.file if template else loaded.name}: {error}") from None
                except UserError as error:
                    print_note(str(error))
                    left_out += not sys.stdin.isatty()
                    continue
                answer = talk.answer(message, ids, write)
                answered(answer)
                if answer.reason in (LIMIT, STOPPED):
                    print_note(f"({answer.reason}{f', --tokens {asked.tokens}' if answer.reason == LIMIT else ''})")
    return left_out


def messages() -> Iterator[str]:
    """What is typed, or comes through a pipe, a line each without those that are empty; Ctrl-C takes a line back."""
    if sys.stdin is None:
        raise UserError("generate --chat: standard input is closed; --prompt TEXT asks one thing")
    before_a_person = sys.stdin.isatty() and is_terminal()
    if before_a_person:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - which lets `input` edit a line and recall earlier ones
    while True:
        try:
            line = input("> ") if before_a_person else _read_line()
        except EOFError:
            if before_a_person:
                print(flush=True)
            return
        except Interrupted as signalled:
            if not before_a_person or signalled.exit_code != 128 + signal.SIGINT:
                raise
            print(flush=True)
            print_note(CHAT_HINT)
            continue
        if line.strip() == QUIT:
            return
        if line.strip():
            yield line.strip()


def _read_line() -> str:
    """Return the next line of a pipe or a file; EOFError behind the last."""
    if raw := sys.stdin.buffer.readline():
        return _decode(raw, "generate --chat")
    raise EOFError
