"""A conversation that goes on, in a terminal or through a pipe: what `toyexp generate --chat` does without a prompt."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from toyexp.base.errors import UserError
from toyexp.base.random import stream
from toyexp.base.signals import Interrupted, handled
from toyexp.base.terminal import on_terminal, tell_aside
from toyexp.cli.generator import LIMIT, STOPPED, Author, Generated, Scribe, chat_ids, chat_template, opening, said
from toyexp.formats.gguf.header import origin
from toyexp.tokenizers.chat_template import BadChat, Template

QUIT = "/quit"
AGAIN = f"{QUIT}, or the end of the input, ends it; Ctrl-C stops an answer"


class CtrlC:
    """While an answer is written the first Ctrl-C stops that; another one, and one at any other time, is raised."""

    def __init__(self) -> None:
        self._answering = self.pressed = False

    @contextlib.contextmanager
    def stops_an_answer(self) -> Iterator[CtrlC]:
        """For as long as one is written."""
        self._answering, self.pressed = True, False
        try:
            yield self
        finally:
            self._answering = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """What the interpreter calls."""
        if not self._answering or self.pressed:
            raise Interrupted(number)
        self.pressed = True


class Conversation:
    """The turns so far, and the ids by which the model continues them.

    Without a template messages and answers follow one another as lines of a text. Once all of it is more than the
    context holds, the oldest turns are left out.
    """

    def __init__(self, author: Author, template: Template | None):
        self._author, self._template = author, template
        self.turns = opening(author.asked)
        self._fixed = len(self.turns)  # turns that are never left out
        self._dropped = False

    def ids(self, message: str) -> list[int]:
        """Those after another message; UserError for one that the template refuses, or that is too long by itself."""
        turns, context = [*self.turns, said("user", message)], self._author.context
        room = context - min(self._author.asked.tokens, context // 4)  # so that an answer has room
        while len(ids := self._ids(turns)) > room and len(turns) > self._fixed + 2:
            del turns[self._fixed : self._fixed + 2]
            if not self._dropped:
                tell_aside(f"note: the context of {context} tokens is full; the oldest turns are left out now")
            self._dropped = True
        if len(ids) > context:
            raise UserError(f"the message takes {len(ids)} tokens, and the context is {context}: left out")
        self.turns = turns
        return ids

    def _ids(self, turns: list[dict[str, str]]) -> list[int]:
        tokenizer = self._author.tokenizer
        assert tokenizer is not None
        if self._template is not None:
            return chat_ids(tokenizer, self._template, turns)
        pairs = [turns[i : i + 2] for i in range(0, len(turns), 2)]
        return tokenizer.prompt("\n".join("".join(turn["content"] for turn in pair) for pair in pairs)).tolist()


def chat(author: Author, path: Path, write: Callable[[str], None], answered: Callable[[Generated], object]) -> int:
    """Answer message by message, until /quit or the end of the input; `write` gets text as it comes.

    `answered` gets each answer once it is whole, or was stopped. Return how many messages of a pipe were left out.
    UserError for a file that knows ids alone.
    """
    asked = author.asked
    if author.tokenizer is None:
        raise UserError(f"{origin(path)}: has no tokenizer, and a chat is text; --ids 1,2,3 without --chat")
    found = chat_template(path, asked, required=False)
    if asked.system is not None and not found:
        raise UserError(f"{origin(path)}: has no chat template, which would write --system; leave it out")
    talk = Conversation(author, Template(found.text, author.tokenizer, found.file) if found else None)
    how = f"chat template of {found.file}" if found else "no chat template: the text is continued"
    tell_aside(f"{how} · {AGAIN}")
    words, ctrl_c, left_out = stream(asked.seed, "generate"), CtrlC(), 0
    with handled({signal.SIGINT: ctrl_c.handle}):
        for message in messages():
            try:
                ids = talk.ids(message)
            except BadChat as error:
                raise UserError(f"{found.file if found else origin(path)}: {error}") from None
            except UserError as error:
                tell_aside(str(error))
                left_out += not sys.stdin.isatty()
                continue
            scribe = Scribe(author.tokenizer, write)
            with ctrl_c.stops_an_answer():
                answer = author.write(message, ids, scribe, words, found, lambda: ctrl_c.pressed, tell_aside)
            talk.turns.append(said("assistant", scribe.text))
            answered(answer)
            if answer.reason in (LIMIT, STOPPED):
                tell_aside(f"({answer.reason}{f', --tokens {asked.tokens}' if answer.reason == LIMIT else ''})")
    return left_out


def messages() -> Iterator[str]:
    """What is typed, or comes through a pipe, a line each without those that are empty; Ctrl-C takes a line back."""
    if sys.stdin is None:
        raise UserError("generate --chat: standard input is closed; --prompt TEXT asks one thing")
    before_a_person = sys.stdin.isatty() and on_terminal()
    if before_a_person:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - which lets `input` edit a line and recall earlier ones
    while True:
        try:
            line = input("> ") if before_a_person else _line()
        except EOFError:
            if before_a_person:
                print(flush=True)
            return
        except Interrupted as signalled:
            if not before_a_person or signalled.exit_code != 128 + signal.SIGINT:
                raise
            print(flush=True)
            tell_aside(AGAIN)
            continue
        if line.strip() == QUIT:
            return
        if line.strip():
            yield line.strip()


def _line() -> str:
    """The next line of a pipe or a file; EOFError behind the last."""
    raw = sys.stdin.buffer.readline()
    if not raw:
        raise EOFError
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"generate --chat: not UTF-8 text (byte {error.start} of a line)") from None
