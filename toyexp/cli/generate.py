"""`toyexp generate`: generate text with a model file, or hold a conversation."""

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

CHAT_TOKENS = 512  # default tokens per answer
MAX_PROMPT_BYTES = 1 << 24
CHAT_STEP = 256  # positions by which the context buffer of a chat grows
QUIT = "/quit"
CHAT_HINT = f"{QUIT} or end of input ends the conversation; Ctrl-C stops an answer"

HELP = """\
usage: toyexp generate MODEL --prompt TEXT [options] [plugins=[my_module]]
       toyexp generate MODEL --chat [options] [plugins=[my_module]]

Generate text with a language model and print it token by token. MODEL is a GGUF file, a run directory with a
model.gguf, or a checkpoint (run/checkpoints/step-200).
  toyexp generate model.gguf --prompt 'def ' --tokens 100
  echo -n 'Once upon a time' | toyexp generate model.gguf --prompt - --temperature 0 > tale.txt
  toyexp generate model.gguf --chat --prompt 'Why is the sky blue?'
  toyexp generate base.gguf --adapter adapter.gguf --prompt 'def ' --engine ggml:threads=1

options
--chat formats the prompt as a user message with the chat template of the adapter or the model. In a conversation each
line is a message: /quit ends it, Ctrl-C stops an answer. llama.cpp needs the package xllamacpp or llama-cpp-python.
Generation stops at an end token or after --tokens. When the context is full, it continues from the later half of the
text; with --engine llama.cpp it stops. A seed gives the same random numbers on every engine except llama.cpp."""


def run(arguments: Arguments) -> int:
    """Generate text or hold a conversation, and print statistics such as the speed to standard error.

    Return the exit code: 1 if a message of a conversation was skipped, otherwise 0.
    """
    options = read(arguments)
    registry, write = load(arguments.modules), (lambda text: None) if options.json else print_text
    notes: list[str] = []  # collected here, to be printed after the text and not within it

    def show(generated: Generated) -> None:
        print(dump_json(generated.plain()) if options.json else "", flush=True)

    try:
        if options.chat and options.prompt is None:
            return 1 if chat(options, registry, write, show) else 0
        options = replace(options, prompt=_read_prompt(options.prompt))
        generated = generate(options, registry, write, print_note if options.json else notes.append)
    except KeyboardInterrupt:
        print(flush=True)
        raise
    show(generated)
    for note in notes if options.json else [*notes, generated.line()]:
        print_note(note)
    return 0


def read(arguments: Arguments) -> Options:
    """Return the options that the command line sets, with defaults for the others.

    One of --prompt, --ids and --chat is needed; only --prompt and --chat can be combined. Raise UserError if none is
    given, or for options that cannot be combined.
    """
    typed = {name: value for name, value in vars(arguments).items() if value is not None}
    typed["model"] = model = parse_model_path(
        "generate", arguments.rest, ": toyexp generate model.gguf --prompt 'def '"
    )
    typed["sampling"] = Sampling(**{f.name: typed[f.name] for f in fields(Sampling) if f.name in typed})
    options = Options(**{f.name: typed[f.name] for f in fields(Options) if f.name in typed})
    if options.system is not None and not options.chat:
        raise UserError(
            f"generate --system: only works with --chat: toyexp generate {model} --chat --system ... --prompt ..."
        )
    if options.chat and options.ids is not None:
        raise UserError("generate --chat: has no effect with --ids; use --prompt, or leave --chat out")
    if options.chat and options.prompt is None:
        return options if "tokens" in typed else replace(options, tokens=CHAT_TOKENS)
    if (options.prompt is None) == (options.ids is None):
        usage = "exactly one of --prompt TEXT (- reads standard input), --ids 1,2,3, or --chat"
        raise UserError(f"generate: needs {usage}")
    return options


def _read_prompt(prompt: str | None) -> str | None:
    if prompt is None:
        return None
    if prompt == "-" and sys.stdin is None:
        raise UserError("--prompt -: standard input is closed; use --prompt TEXT or a pipe")
    raw = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1) if prompt == "-" else os.fsencode(prompt)
    if len(raw) > MAX_PROMPT_BYTES:
        raise UserError(
            f"--prompt: the text has more than {MAX_PROMPT_BYTES >> 20} MiB, more than any context; give its last part"
        )
    return _decode(raw, "--prompt")


def _decode(raw: bytes, option: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{option}: not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x})") from None


# -- conversation, in a terminal or through a pipe ---------------------------------------------------


class Conversation:
    """Conversation with a model. It keeps the messages, builds the prompt of each answer, and generates the answer.

    If there is no chat template, the prompt is plain text. It has a line for each message of the user, and the model's
    answer follows the message on the same line. When the context is full, the oldest messages and answers are dropped.
    """

    def __init__(self, author: Generator, template: ChatTemplate | None):
        assert author.tokenizer is not None
        self._author, self._chat_template, self._tokenizer = author, template, author.tokenizer
        self._template = Template(template.text, author.tokenizer, template.file) if template else None
        self._turns = system_turns(author.options)
        self._fixed = len(self._turns)  # messages that are never dropped: the system message
        self._dropped = self._answering = self._stopped = False
        self._random = stream(author.options.seed, "generate")

    def ids(self, message: str) -> list[int]:
        """Add a user message to the conversation and return the token ids of the whole prompt for the answer.

        Drop the oldest messages if the prompt leaves too little room for the answer. Raise UserError if the message
        alone exceeds the context.
        """
        turns, context = [*self._turns, {"role": "user", "content": message}], self._author.context
        room = context - min(self._author.options.tokens, context // 4)  # leave room for the answer
        while len(ids := self._ids(turns)) > room and len(turns) > self._fixed + 2:
            del turns[self._fixed : self._fixed + 2]
            if not self._dropped:
                print_note(f"note: the context of {context} tokens is full; the model forgets the oldest messages")
            self._dropped = True
        if len(ids) > context:
            raise UserError(f"the message was skipped: it has {len(ids)} tokens; the model's context is {context}")
        self._turns = turns
        return ids

    def _ids(self, turns: list[dict[str, str]]) -> list[int]:
        if self._template is not None:
            return chat_ids(self._tokenizer, self._template, turns)
        pairs = [turns[i : i + 2] for i in range(0, len(turns), 2)]
        return self._tokenizer.prompt("\n".join("".join(t["content"] for t in pair) for pair in pairs)).tolist()

    def answer(self, message: str, ids: list[int], write: Callable[[str], None]) -> Generated:
        """Generate the answer to `message` from `ids`, the token ids of the prompt, and add the answer to the messages.

        Call `write` with pieces of text as they are generated. Ctrl-C ends the answer early.
        """
        builder, self._answering, self._stopped = TextBuilder(self._tokenizer, write), True, False
        generated = self._author.write(
            message, ids, builder, self._random, self._chat_template, lambda: self._stopped, print_note
        )
        self._answering = False
        self._turns.append({"role": "assistant", "content": builder.text})
        return generated

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-C: the first one during an answer stops the answer, any other one raises Interrupted."""
        if not self._answering or self._stopped:
            raise Interrupted(number)
        self._stopped = True


def chat(
    options: Options, registry: Registry, write: Callable[[str], None], on_answer: Callable[[Generated], object]
) -> int:
    """Read messages from standard input and answer them, until /quit or the end of the input.

    Call `write` with pieces of text as they are generated, and `on_answer` with each answer at its end. Return how many
    messages from a pipe were skipped because they exceed the context. Raise UserError for a model without a tokenizer.
    """
    loaded, skipped = load_model(options, registry), 0
    if options.engine.partition(":")[0] == LLAMA_CPP:
        raise UserError(f"--engine {options.engine}: cannot chat; add --prompt TEXT, or use another engine")
    with Generator(loaded, options, CHAT_STEP) as author:
        if author.tokenizer is None:
            raise UserError(f"{loaded.name}: has no tokenizer, which --chat needs; use --ids 1,2,3")
        template = chat_template(loaded, options, required=False)
        if options.system is not None and not template:
            raise UserError(f"{loaded.name}: has no chat template, which --system needs; leave it out")
        how = (
            f"chat template of {template.file}"
            if template
            else "no chat template: messages are continued as plain text"
        )
        print_note(f"{how} · {CHAT_HINT}")
        conversation = Conversation(author, template)
        with handle_signals({signal.SIGINT: conversation.interrupt}):
            for message in messages():
                try:
                    ids = conversation.ids(message)
                except BadChat as error:
                    raise UserError(f"{template.file if template else loaded.name}: {error}") from None
                except UserError as error:
                    print_note(str(error))
                    skipped += not sys.stdin.isatty()
                    continue
                answer = conversation.answer(message, ids, write)
                on_answer(answer)
                if answer.reason in (LIMIT, STOPPED):
                    print_note(f"({answer.reason}{f': --tokens {options.tokens}' if answer.reason == LIMIT else ''})")
    return skipped


def messages() -> Iterator[str]:
    """Yield each non-empty line of standard input as a message of the user, until /quit or the end of the input.

    In a terminal Ctrl-C discards the current line.
    """
    if sys.stdin is None:
        raise UserError("generate --chat: standard input is closed; use --prompt TEXT")
    is_interactive = sys.stdin.isatty() and is_terminal()
    if is_interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - line editing and history for input()
    while True:
        try:
            line = input("> ") if is_interactive else _read_line()
        except EOFError:
            if is_interactive:
                print(flush=True)
            return
        except Interrupted as signalled:
            if not is_interactive or signalled.exit_code != 128 + signal.SIGINT:
                raise
            print(flush=True)
            print_note(CHAT_HINT)
            continue
        if line.strip() == QUIT:
            return
        if line.strip():
            yield line.strip()


def _read_line() -> str:
    """Return the next line of standard input, which must be a pipe or file. Raise EOFError at the end of the input."""
    if raw := sys.stdin.buffer.readline():
        return _decode(raw, "generate --chat")
    raise EOFError
