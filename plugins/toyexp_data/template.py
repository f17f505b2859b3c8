"""Conversations as a GGUF's own chat template writes them, cut into what is learned and what is only read.

An answer is learned behind the very text that asks for it. A template that changes earlier turns once others follow,
as by dropping thoughts, makes several rows of a conversation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from toyexp import Tokenizer, UserError, printable
from toyexp.tokenizers import REASONING, BadChat, Rendered, Template, control_pattern
from toyexp_data.chat import BadExample, Message, Part, Rows, iter_strings

_ADVICE = "data.template=plain does without it"
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")
_OPEN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
# How templates ask for an answer without thinking: they write a thought that is empty.
_NO_THOUGHT = re.compile(
    r"<think>\s*</think>|\[THINK\]\s*\[/THINK\]|<\|channel>thought\s*<channel\|>|"
    r"<\|START_THINKING\|>\s*<\|END_THINKING\|>"
)


class Turn(NamedTuple):
    """An answer: what is read before it, what is written, and which ranges of that are learned."""

    read: str
    answer: str
    learned: list[tuple[int, int]]
    as_asked: bool  # whether the template begins the answer as it does when it asks for one
    ended: bool  # by a control token, or by the marks of {% generation %}

    @property
    def text(self) -> str:
        """All of it up to the last range."""
        return self.read + self.answer[: self.learned[-1][1]]

    def parts(self, have: int, end: bool) -> list[Part]:
        """What comes after the first `have` characters of `read`; with `end`, an end-of-text token closes it."""
        pieces, at = [(self.read[have:], False)], 0
        for begin, stop in self.learned:
            pieces += [(self.answer[at:begin], False), (self.answer[begin:stop], True)]
            at = stop
        parts = [Part(text, learned, special=True) for text, learned in pieces if text]
        return [*parts[:-1], parts[-1]._replace(end=end)]


class ChatTemplate:
    """A GGUF's own chat template; it is told the day `now`, and `is_dated` if it asked. UserError if unusable."""

    def __init__(self, template: str, tokenizer: Tokenizer, path: Path | str, now: datetime | None = None):
        try:
            self._template = Template(template, tokenizer, path, now)
        except UserError as error:
            raise type(error)(f"{error}; {_ADVICE}") from None
        self.text = template
        self._control = control_pattern(tokenizer)
        self._ends = frozenset(tokenizer.pieces[i] for i in tokenizer.ends)
        self._marks = _GENERATION_TAG.search(template) is not None

    @property
    def is_dated(self) -> bool:
        """Whether the template has asked what day it is."""
        return self._template.is_dated

    def rows(self, messages: Sequence[Message], tools: Any = None, everything: bool = False) -> Rows:
        """Return a conversation as rows, as one with `everything` learned; BadExample if the template refuses it."""
        self._check(messages, tools)
        talk = _Conversation(self._template, messages, tools)
        whole = talk.beginning(len(messages), False).text
        answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
        numbered = [(number, turn) for number in answers if (turn := self._turn(talk, number))]
        turns = [turn for _, turn in numbered]
        if not turns:
            raise BadExample("the chat template marks none of it as the assistant's words ({% generation %})")
        open_end = not turns[-1].ended and answers[-1] == len(messages) - 1
        rows = _join_turns(turns, open_end)
        if everything and len(rows) > 1:
            rows = [[Part(whole, True, end=open_end, special=True)]]
        elif whole.startswith(turns[-1].text) and len(whole) > len(turns[-1].text):
            rows[-1].append(Part(whole[len(turns[-1].text) :], False, special=True))
        dropped = sum(_thinking(messages[number]) not in turn.answer for number, turn in numbered)
        return Rows(rows, sum(not turn.as_asked for turn in turns), dropped)

    def _check(self, messages: Sequence[Message], tools: Any) -> None:
        said = [(f"what the {m.role} says", m.fields()) for m in messages]
        for what, value in [*said, ("tools", tools)]:
            for text in iter_strings(value):
                if spelled := self._control.search(text):
                    raise BadExample(f"{what} holds the control token {printable(spelled[0])}")

    def _turn(self, talk: _Conversation, number: int) -> Turn | None:
        """Message `number`, which is an answer; None where the template marks nothing of it."""
        asked, after = talk.beginning(number, True).text, talk.beginning(number + 1, False)
        read, answer, as_asked = asked, after.text[len(asked) :], True
        if not after.text.startswith(asked):
            read, answer, as_asked = self._align(talk, number)
        talk.require_complete(number, answer)
        if not self._marks or not after.text.endswith(answer):
            stop = self._stop(answer, talk.messages[number].said.strip())
            return Turn(read, answer, [(0, stop or len(answer))], as_asked, ended=bool(stop))
        start = len(after.text) - len(answer)
        marked = [(begin, end) for begin, end in after.marked if end > max(begin, start)]
        if marked and (early := start - marked[0][0]) > 0 and read.endswith(after.text[marked[0][0] : start]):
            read, answer, start = read[:-early], after.text[start - early :], start - early
        learned = [(max(begin - start, 0), end - start) for begin, end in marked]
        return Turn(read, answer, learned, as_asked, ended=True) if learned else None

    def _stop(self, answer: str, said: str) -> int:
        at = answer.find(said)
        controls = list(self._control.finditer(answer, at + len(said) if at >= 0 else 0))
        ends = [found.end() for found in controls if found[0] in self._ends]
        return ends[0] if ends else controls[-1].end() if controls else 0

    def _align(self, talk: _Conversation, number: int) -> tuple[str, str, bool]:
        """Return what is read and written where the text that asks does not begin the text with the answer."""
        message, asked, after = (
            talk.messages[number],
            talk.beginning(number, True).text,
            talk.beginning(number + 1, False).text,
        )
        begin, end = talk.find_content(number, number + 1, False) or (len(after), len(after))
        turn_asked, turn_after = talk.turn_end(number, True), talk.turn_end(number, False)
        cut = turn_after + _common_prefix(asked[turn_asked:], after[turn_after:begin])
        cut = next((m.start() for m in self._control.finditer(after) if m.start() < cut < m.end()), cut)
        header = _OPEN_TAG.sub("", after[turn_after:cut])  # what both write before the answer, in whole tokens
        read, answer = asked[: turn_asked + len(header)], after[turn_after + len(header) :]
        opening, content = asked[len(read) :].strip(), message.said.lstrip()
        if not opening or (_NO_THOUGHT.fullmatch(opening) and not _thinking(message)):
            # What came before differs, or the template begins the answer itself, perhaps with the same words.
            lead = answer[: max(begin - turn_after - len(header), 0)]
            begun = next(n for n in range(len(lead), -1, -1) if asked[len(read) :].endswith(lead[:n]))
            return asked, answer[begun:], True
        if content.startswith(opening):
            rest = content.removeprefix(opening).lstrip()
            tail = rest[len(rest.rstrip()) :]
            return asked, (rest if after[:end].endswith(tail) else rest.rstrip()) + after[end:], True
        return read, answer, False


class _Conversation:
    """A conversation under a template; each of its beginnings is rendered once, and all in one request."""

    def __init__(self, template: Template, messages: Sequence[Message], tools: Any):
        self.messages = messages
        self._template, self._tools = template, tools
        answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
        turns = {key: None for number in answers for key in ((number, True), (number + 1, False))}
        wanted = list({(len(messages), False): None, **turns})
        found = template.render_beginnings([m.fields() for m in messages], wanted, tools)
        self._done = dict(zip(wanted, found, strict=True))

    def beginning(self, count: int, ask: bool) -> Rendered:
        """Return the first messages; with `ask`, up to where the assistant's next answer begins."""
        return _require_rendered(self._done[count, ask])

    def find_content(self, number: int, count: int, ask: bool) -> tuple[int, int] | None:
        """Find in the text of the first messages what message `number` says, by putting another text in its place."""
        message, text = self.messages[number], self.beginning(count, ask).text
        other = next(c for c in map(chr, range(0x2603, 0x110000)) if c not in message.said)
        is_changed = [*self.messages[:number], message._replace(content=other), *self.messages[number + 1 : count]]
        fields = [m.fields() for m in is_changed]
        altered = _require_rendered(*self._template.render_beginnings(fields, [(count, ask)], self._tools)).text
        begin = _common_prefix(text, altered)
        if begin == len(text) == len(altered):
            return None
        after = min(_common_prefix(text[::-1], altered[::-1]), len(text) - begin, len(altered) - begin)
        return begin, len(text) - after

    def turn_end(self, number: int, ask: bool) -> int:
        """Return where the message before answer `number` ends in a text; BadExample if it is nowhere."""
        found = self.find_content(number - 1, number + (not ask), ask) if number else (0, 0)
        if found is None:
            raise BadExample(f"the chat template does not write a turn the same once others follow; {_ADVICE}")
        return found[1]

    def require_complete(self, number: int, answer: str) -> None:
        """Raises BadExample unless the answer holds what the message says, but for what was thought before it."""
        said = self.messages[number].said
        calls = self.messages[number].further.get("tool_calls") or ()
        wanted = [
            said.strip() if said.strip() in answer else said.rpartition("</think>")[2].strip(),
            *_call_names(calls),
        ]
        if not answer or not all(text in answer for text in wanted):
            raise BadExample(f"the chat template leaves out what the assistant says; {_ADVICE}")


def _require_rendered(found: Rendered | BadChat) -> Rendered:
    if isinstance(found, BadChat):
        raise BadExample(str(found))
    return found


def _thinking(message: Message) -> str:
    """What the message says was thought before the answer, wherever it says so."""
    thought = next((str(message.further[key]) for key in REASONING if message.further.get(key)), "")
    return (thought or message.said.rpartition("</think>")[0].rpartition("<think>")[2]).strip()


def _call_names(calls: Any) -> list[str]:
    found = [call.get("function", call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [str(function.get("name", "")) for function in found if isinstance(function, dict)]


def _common_prefix(one: str, other: str) -> int:
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        same = one[least:middle] == other[least:middle]
        least, most = (middle, most) if same else (least, middle - 1)
    return least


def _join_turns(turns: Sequence[Turn], open_end: bool) -> list[list[Part]]:
    """Join answers into few rows; end-of-text closes a row without an end of its own, the last only if `open_end`."""
    rows: list[list[Part]] = []
    before = ""
    for number, turn in enumerate(turns):
        follows = bool(rows) and turn.read.startswith(before)
        if not follows:
            rows.append([])
        last = number == len(turns) - 1
        closed = open_end if last else not turns[number + 1].read.startswith(turn.text)
        rows[-1] += turn.parts(len(before) if follows else 0, end=closed and not turn.ended)
        before = turn.text
    return rows
