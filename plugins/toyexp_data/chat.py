"""Prompts and conversations as text, cut into what is learned and what is only read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from toyexp import Tokenizer, UserError, printable
from toyexp.chat import BadChat, Template, control_pattern

# What `plain` does, for those who run the exported model.
PLAIN_TEMPLATE = (
    r"{% for message in messages %}{{ message['role'] + ':\n' + message['content'] }}"
    r"{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    r"{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)
_ADVICE = "data.template=plain does without it"


class BadExample(UserError):
    """A line that is no example to learn from, and why."""


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


class Part(NamedTuple):
    """A piece of an example's text that is learned, or only read."""

    text: str
    learned: bool
    end: bool = False  # an end-of-text token follows, learned as the text is
    special: bool = False  # control tokens are spelled out in the text


class Example(NamedTuple):
    """A tokenized example: int32 ids, which of them are learned (never the first), and its boundaries.

    `split` counts boundaries where the whole text would have had a token across.
    """

    ids: np.ndarray
    learned: np.ndarray
    split: int


def plain(messages: Sequence[Message]) -> list[Part]:
    """A conversation in the plain format: a line with the role, then what was said, end-of-text after an answer."""
    parts, given = [], ""
    for role, content in messages:
        given += f"{role}:\n"
        if role == "assistant":
            parts += [Part(given, False), Part(content, True, end=True)]
            given = "\n"
        else:
            given += f"{content}\n"
    return [*parts, Part(given, False)] if messages[-1].role != "assistant" else parts


class ChatTemplate:
    """A GGUF's own chat template, which says what the assistant's words are; UserError for one that cannot be used."""

    def __init__(self, template: str, tokenizer: Tokenizer, path: Path):
        try:
            self._template = Template(template, tokenizer, path)
        except UserError as error:
            raise type(error)(f"{error}; {_ADVICE}") from None
        self.text = template
        self._control = control_pattern(tokenizer)

    def parts(self, messages: Sequence[Message]) -> list[Part]:
        """A conversation as the template writes it; an answer reaches to its last control token, if it has one."""
        for role, content in messages:
            spelled = self._control.search(content)
            if spelled:
                raise BadExample(f"what the {role} says holds the control token {printable(spelled[0])}")
        whole = self._render(messages, False)
        parts, at = [], 0
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before, after = self._render(messages[:number], True), self._render(messages[: number + 1], False)
            if not (after.startswith(before) and whole.startswith(after) and at <= len(before) < len(after)):
                raise BadExample(f"the chat template does not write a turn the same once others follow; {_ADVICE}")
            answer = after[len(before) :]
            if message.content.strip() not in answer:
                raise BadExample(f"the chat template leaves out what the assistant says; {_ADVICE}")
            stop = max((m.end() for m in self._control.finditer(answer)), default=0)
            ends = not stop and message is messages[-1]  # the template marks no end, so end-of-text does
            parts += [
                Part(whole[at : len(before)], False, special=True),
                Part(answer[: stop or None], True, ends, special=True),
            ]
            at = len(before) + (stop or len(answer))
        return [*parts, Part(whole[at:], False, special=True)]

    def _render(self, messages: Sequence[Message], prompt: bool) -> str:
        """The text of the messages; with `prompt`, up to where the assistant's next answer begins."""
        try:
            return self._template.render([m._asdict() for m in messages], prompt)
        except BadChat as reason:
            raise BadExample(str(reason)) from None


def tokenize(parts: Sequence[Part], tokenizer: Tokenizer, everything: bool) -> Example:
    """The parts' ids one after another, so that no token is half learned and half read.

    So does a chat: the prompt is tokenized before the answer exists. With `everything` the parts that are only read
    are learned too. Raises UserError for text the tokenizer cannot take.
    """
    ids: list[int] = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    learned = [False] * len(ids)
    split = 0
    before: list[int] = []
    for i, part in enumerate(parts):
        found = _encode(part, tokenizer, ids)
        if i and before and found and not parts[i - 1].end:
            joined = part._replace(text=parts[i - 1].text + part.text)
            split += _encode(joined, tokenizer, ids[: len(ids) - len(before)]) != before + found
        ids += found
        ids += [tokenizer.eos] * part.end
        learned += [part.learned or everything] * (len(ids) - len(learned))
        before = found
    if learned[0]:  # something has to stand before the first token that is learned
        ids, learned = [tokenizer.eos, *ids], [False, *learned]
    last = len(learned) - learned[::-1].index(True)
    return Example(np.array(ids[:last], np.int32), np.array(learned[:last]), split)


def _encode(part: Part, tokenizer: Tokenizer, before: Sequence[int]) -> list[int]:
    return tokenizer.encode(part.text, part.special, before[-1] if before else None).tolist()
