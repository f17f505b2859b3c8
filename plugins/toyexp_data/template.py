"""Render conversations with a GGUF file's own chat template, and split the text into prompts and answers.

Only answers count in the loss. The text before each answer is exactly the prompt that the template renders at
inference. Some templates render a message differently when later messages follow it, for example without its reasoning.
A conversation then becomes several rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from toyexp import Tokenizer, UserError, printable
from toyexp.formats import BadExample
from toyexp.tokenizers import REASONING, BadChat, Rendered, Template, control_pattern
from toyexp_data.chat import Message, Part, Rows, iter_strings

_ADVICE = "data.template=plain avoids the template"
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")
_OPEN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
# How templates ask for an answer without reasoning: with empty reasoning.
_NO_THOUGHT = re.compile(
    r"<think>\s*</think>|\[THINK\]\s*\[/THINK\]|<\|channel>thought\s*<channel\|>|"
    r"<\|START_THINKING\|>\s*<\|END_THINKING\|>"
)


class Turn(NamedTuple):
    """One answer of the assistant, and the text of the rendered chat before the answer."""

    read: str  # the text before the answer
    answer: str
    learned: list[tuple[int, int]]  # character ranges of `answer` that count in the loss
    follows_prompt: bool  # the answer begins with the template's generation prompt
    ended: bool  # a control token, or the end of {% generation %}, ends the answer
    counts: bool = True  # False: no part of the answer is learned

    @property
    def text(self) -> str:
        """Text before the answer, followed by the answer up to its last character that counts in the loss."""
        return self.read + self.answer[: self.learned[-1][1]]

    def parts(self, skip: int, end: bool) -> list[Part]:
        """Return the text before the answer, without its first `skip` characters, and the answer, as parts of a row.

        If `end` is True, an end-of-text token follows the last part.
        """
        pieces, position = [(self.read[skip:], False)], 0
        for begin, stop in self.learned:
            pieces += [(self.answer[position:begin], False), (self.answer[begin:stop], self.counts)]
            position = stop
        parts = [Part(text, learned, special=True) for text, learned in pieces if text]
        return [*parts[:-1], parts[-1]._replace(end=end)]


class ChatTemplate:
    """A GGUF file's own chat template. The constructor raises UserError if the template is unusable.

    `now` is the date and time that the template may print.
    """

    def __init__(self, template: str, tokenizer: Tokenizer, path: Path | str, now: datetime | None = None):
        try:
            self._template = Template(template, tokenizer, path, now)
        except UserError as error:
            raise type(error)(f"{error}; {_ADVICE}") from None
        self.text = template
        self._control = control_pattern(tokenizer)
        self._ends = frozenset(tokenizer.pieces[i] for i in tokenizer.end_ids)
        self._marks = _GENERATION_TAG.search(template) is not None

    @property
    def is_dated(self) -> bool:
        """True if the template has used the date in a rendering."""
        return self._template.is_dated

    def rows(self, messages: Sequence[Message], tools: Any = None, everything: bool = False, first: int = 0) -> Rows:
        """Render a conversation and return it as training rows, in which answers before message `first` do not count.

        With `everything`, return a single row, because all text is learned. Raise BadExample if the template cannot
        render the conversation, or its text cannot be split.
        """
        self._check(messages, tools)
        conversation = _Conversation(self._template, messages, tools)
        rendered = conversation.beginning(len(messages), False).text
        answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
        numbered = [
            (number, turn._replace(counts=number >= first))
            for number in answers
            if (turn := self._turn(conversation, number))
        ]
        turns = [turn for _, turn in numbered]
        if not turns:
            raise BadExample("the chat template encloses no text of the assistant in {% generation %}")
        open_end = not turns[-1].ended and answers[-1] == len(messages) - 1
        rows = _join_turns(turns, open_end)
        if everything and len(rows) > 1:
            rows = [[Part(rendered, True, end=open_end, special=True)]]
        elif rendered.startswith(turns[-1].text) and len(rendered) > len(turns[-1].text):
            rows[-1].append(Part(rendered[len(turns[-1].text) :], False, special=True))
        rows = [row for row in rows if any(part.learned for part in row)]
        dropped = sum(_thinking(messages[number]) not in turn.answer for number, turn in numbered)
        return Rows(rows, sum(not turn.follows_prompt for turn in turns), dropped)

    def _check(self, messages: Sequence[Message], tools: Any) -> None:
        fields = [(f"what the {m.role} says", m.fields()) for m in messages]
        for subject, value in [*fields, ("tools", tools)]:
            for text in iter_strings(value):
                if control := self._control.search(text):
                    raise BadExample(f"{subject} contains the control token {printable(control[0])}")

    def _turn(self, talk: _Conversation, number: int) -> Turn | None:
        """Return the answer in message `number` as a Turn; None if the template marks no part of it as generated."""
        prompted, after = talk.beginning(number, True).text, talk.beginning(number + 1, False)
        read, answer, follows_prompt = prompted, after.text[len(prompted) :], True
        if not after.text.startswith(prompted):
            read, answer, follows_prompt = self._align(talk, number)
        talk.require_complete(number, answer)
        if not self._marks or not after.text.endswith(answer):
            stop = self._stop(answer, talk.messages[number].text.strip())
            return Turn(read, answer, [(0, stop or len(answer))], follows_prompt, ended=bool(stop))
        start = len(after.text) - len(answer)
        marked = [(begin, end) for begin, end in after.marked if end > max(begin, start)]
        if marked and (early := start - marked[0][0]) > 0 and read.endswith(after.text[marked[0][0] : start]):
            read, answer, start = read[:-early], after.text[start - early :], start - early
        learned = [(max(begin - start, 0), end - start) for begin, end in marked]
        return Turn(read, answer, learned, follows_prompt, ended=True) if learned else None

    def _stop(self, answer: str, content: str) -> int:
        begin = answer.find(content)
        controls = list(self._control.finditer(answer, begin + len(content) if begin >= 0 else 0))
        ends = [control.end() for control in controls if control[0] in self._ends]
        return ends[0] if ends else controls[-1].end() if controls else 0

    def _align(self, talk: _Conversation, number: int) -> tuple[str, str, bool]:
        """Find where the answer in message `number` begins if it does not directly follow the generation prompt.

        Return the text before the answer, the answer, and True if the text before the answer ends with the generation
        prompt.
        """
        message = talk.messages[number]
        prompted, after = talk.beginning(number, True).text, talk.beginning(number + 1, False).text
        begin, end = talk.find_content(number, number + 1, False) or (len(after), len(after))
        turn_asked, turn_after = talk.turn_end(number, True), talk.turn_end(number, False)
        cut = turn_after + _common_prefix(prompted[turn_asked:], after[turn_after:begin])
        cut = next((m.start() for m in self._control.finditer(after) if m.start() < cut < m.end()), cut)
        header = _OPEN_TAG.sub("", after[turn_after:cut])  # common text before the answer, cut at a tag
        read, answer = prompted[: turn_asked + len(header)], after[turn_after + len(header) :]
        opening, content = prompted[len(read) :].strip(), message.text.lstrip()
        if not opening or (_NO_THOUGHT.fullmatch(opening) and not _thinking(message)):
            # Earlier turns differ, or the template itself begins the answer, perhaps with the same text.
            lead = answer[: max(begin - turn_after - len(header), 0)]
            repeated = next(n for n in range(len(lead), -1, -1) if prompted[len(read) :].endswith(lead[:n]))
            return prompted, answer[repeated:], True
        if content.startswith(opening):
            rest = content.removeprefix(opening).lstrip()
            tail = rest[len(rest.rstrip()) :]
            return prompted, (rest if after[:end].endswith(tail) else rest.rstrip()) + after[end:], True
        return read, answer, False


class _Conversation:
    """Conversation rendered by a chat template: all messages, and the messages up to each answer.

    A single call of the template engine renders all these texts.
    """

    def __init__(self, template: Template, messages: Sequence[Message], tools: Any):
        self.messages = messages
        self._template, self._tools = template, tools
        answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
        turns = {key: None for number in answers for key in ((number, True), (number + 1, False))}
        beginnings = list({(len(messages), False): None, **turns})
        rendered = template.render_beginnings([m.fields() for m in messages], beginnings, tools)
        self._rendered = dict(zip(beginnings, rendered, strict=True))

    def beginning(self, count: int, prompted: bool) -> Rendered:
        """Return the rendering of the first `count` messages, followed by the generation prompt if `prompted`."""
        return _require_rendered(self._rendered[count, prompted])

    def find_content(self, number: int, count: int, prompted: bool) -> tuple[int, int] | None:
        """Return the character range of the content of message `number` in `beginning(count, prompted)`.

        To find it, render the message with other content and compare the texts. Return None if they are equal.
        """
        message, text = self.messages[number], self.beginning(count, prompted).text
        other = next(c for c in map(chr, range(0x2603, 0x110000)) if c not in message.text)
        variant = [*self.messages[:number], message._replace(content=other), *self.messages[number + 1 : count]]
        fields = [m.fields() for m in variant]
        altered = _require_rendered(*self._template.render_beginnings(fields, [(count, prompted)], self._tools)).text
        begin = _common_prefix(text, altered)
        if begin == len(text) == len(altered):
            return None
        after = min(_common_prefix(text[::-1], altered[::-1]), len(text) - begin, len(altered) - begin)
        return begin, len(text) - after

    def turn_end(self, number: int, prompted: bool) -> int:
        """Return the character offset at which the content of message `number` - 1 ends, in the rendered chat.

        Message `number` is an answer of the assistant. If `prompted` is False, the chat is rendered up to and including
        this answer. If it is True, the chat ends in a generation prompt instead of the answer. Raise BadExample if the
        end is not found.
        """
        content_range = self.find_content(number - 1, number + (not prompted), prompted) if number else (0, 0)
        if content_range is None:
            raise BadExample(f"the chat template changes a turn when later turns follow; {_ADVICE}")
        return content_range[1]

    def require_complete(self, number: int, answer: str) -> None:
        """Raise BadExample unless the rendered `answer` contains the content and the tool calls of message `number`."""
        content = self.messages[number].text
        calls = self.messages[number].further.get("tool_calls") or ()
        required = [
            content.strip() if content.strip() in answer else content.rpartition("</think>")[2].strip(),
            *_call_names(calls),
        ]
        if not answer or not all(text in answer for text in required):
            raise BadExample(f"the chat template drops content of the assistant; {_ADVICE}")


def _require_rendered(rendered: Rendered | BadChat) -> Rendered:
    if isinstance(rendered, BadChat):
        raise BadExample(str(rendered))
    return rendered


def _thinking(message: Message) -> str:
    """Return the reasoning of a message, from one of the keys in REASONING or its <think> tag; "" if there is none."""
    reasoning = next((str(message.further[key]) for key in REASONING if message.further.get(key)), "")
    return (reasoning or message.text.rpartition("</think>")[0].rpartition("<think>")[2]).strip()


def _call_names(calls: Any) -> list[str]:
    items = [call.get("function", call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [str(function.get("name", "")) for function in items if isinstance(function, dict)]


def _common_prefix(first: str, second: str) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        same = first[low:middle] == second[low:middle]
        low, high = (middle, high) if same else (low, middle - 1)
    return low


def _join_turns(turns: Sequence[Turn], open_end: bool) -> list[list[Part]]:
    """Join the turns of a conversation into as few training rows as possible, and return the rows.

    A turn is an answer and the text before it. It continues a row if the text before the answer begins with all the
    text of that row. If the last answer of a row has no end token, an end-of-text token is added. For the last row,
    this is done only if `open_end` is True.
    """
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
