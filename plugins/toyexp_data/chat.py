"""Split prompts and conversations into parts that are learned (count in the loss) and parts that are only read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import toyexp
from toyexp import printable
from toyexp.base import numpy as np
from toyexp.formats import BadExample

# Chat template for the text that `plain_rows` builds. It is exported with the model.
PLAIN_TEMPLATE = (
    r"{% for message in messages %}{{ message['role'] + ':\n' + message['content'] }}"
    r"{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    r"{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)


class Message(NamedTuple):
    """Message of a conversation; `further` has the message's other keys, such as tool calls."""

    role: str
    content: str | None  # None: the message has only the keys in `further`
    further: Mapping[str, Any] = MappingProxyType({})

    @property
    def text(self) -> str:
        """Content of the message; "" if it has none."""
        return self.content or ""

    def fields(self) -> dict[str, Any]:
        """Return the message as the dict that a chat template receives."""
        content = {} if self.content is None else {"content": self.content}
        return {"role": self.role, **content, **self.further}


class Part(NamedTuple):
    """A piece of an example's text that is either learned (counts in the loss) or only read as context."""

    text: str
    learned: bool
    end: bool = False  # an end-of-text token follows; it is learned if the text is
    special: bool = False  # control tokens spelled out in the text, such as <|im_end|>, become one token


class Rows(NamedTuple):
    """Training rows made from one example, and how many of its answers the chat template changed.

    A row is a list of text parts, which are tokenized separately.
    """

    rows: list[list[Part]]
    off_prompt: int = 0  # answers that do not begin with the template's generation prompt
    thoughts_dropped: int = 0  # answers whose reasoning the template drops
    label: bool | None = None  # of a completion without a pair: True if it is good


class Example(NamedTuple):
    """Tokenized example."""

    ids: np.ndarray  # int32 [N]
    learned: np.ndarray  # bool [N]: the token counts in the loss; False for the first
    split: int  # number of boundaries between parts that would lie within a token if the text were tokenized at once


def plain_rows(messages: Sequence[Message], tools: Any = None, everything: bool = False, first: int = 0) -> Rows:
    """Return a conversation as one row in the plain format, which needs no chat template.

    Answers before the message `first` are not learned. `everything` is for chat templates and has no effect here.

    Each message becomes a line with its role, followed by its content; end-of-text follows each answer. Raise
    BadExample if there are tools, or if a message lacks a content or has keys other than role and content.
    """
    if tools:
        raise BadExample("has tools, which the plain format does not support")
    parts, prompt = [], ""
    for number, message in enumerate(messages, 1):
        role, content = message.role, message.content
        if message.further or content is None:
            keys = ", ".join(printable(key, 20) for key in message.fields())
            raise BadExample(f"message {number} holds {keys}; the plain format only supports role and content")
        prompt += f"{role}:\n"
        if role == "assistant":
            parts += [Part(prompt, False), Part(content, number > first, end=True)]
            prompt = "\n"
        else:
            prompt += f"{content}\n"
    return Rows([[*parts, Part(prompt, False)] if messages[-1].role != "assistant" else parts])


def iter_strings(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (key, *iter_strings(item))
    elif isinstance(value, list):
        for item in value:
            yield from iter_strings(item)


def tokenize(parts: Sequence[Part], tokenizer: toyexp.Tokenizer, everything: bool) -> Example:
    """Tokenize the parts of a row separately, as prompt and answer are at inference, and join their token ids.

    If `everything` is True, all tokens count in the loss, otherwise only those of learned parts. Raise BadExample if no
    token counts.
    """
    ids: list[int] = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    learned = [False] * len(ids)
    split = 0
    before: list[int] = []
    for i, part in enumerate(parts):
        encoded = _encode(part, tokenizer, ids)
        if i and before and encoded and not parts[i - 1].end:
            joined = part._replace(text=parts[i - 1].text + part.text)
            split += _encode(joined, tokenizer, ids[: len(ids) - len(before)]) != before + encoded
        ids += encoded
        ids += [tokenizer.eos] * part.end
        learned += [part.learned or everything] * (len(ids) - len(learned))
        before = encoded
    if not any(learned):
        raise BadExample("has no token to learn")
    if learned[0]:  # the first learned token needs a token before it
        ids, learned = [tokenizer.eos, *ids], [False, *learned]
    last = len(learned) - learned[::-1].index(True)
    return Example(np.array(ids[:last], np.int32), np.array(learned[:last]), split)


def _encode(part: Part, tokenizer: toyexp.Tokenizer, before: Sequence[int]) -> list[int]:
    return tokenizer.encode(part.text, part.special, before[-1] if before else None).tolist()
