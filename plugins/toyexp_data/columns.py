"""Recognise the columns of a record, and convert the record to text, to a prompt with completion, or to messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from string import ascii_uppercase
from typing import Any, NamedTuple

from toyexp import printable, suggest
from toyexp.formats import (
    BadExample,
    Record,
    decode,
    join_names,
    kind_of,
    parse_cell,
    read_question,
    require_unicode,
    text_of,
)
from toyexp_data.chat import Message, iter_strings
from toyexp_data.files import SPLITS

ROLES = ("system", "developer", "user", "assistant", "tool")
# The senders in ShareGPT's conversations, and their roles.
SENDERS = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
SYSTEM = ("system", "system_prompt")
ASKED = ("prompt", "question", "instruction", "query", "input")
_MESSAGE = "expected role and content"


class Value(NamedTuple):
    """A record as one of three: `messages`; or `prompt` and `completion`; or `completion` alone, which is a text."""

    completion: str = ""
    prompt: str | None = None
    messages: Sequence[Message] = ()
    tools: list[Any] | None = None
    first: int = 0  # messages before this one are not learned
    columns: tuple[str, ...] = ()  # columns that were used
    others: tuple[str, ...] = ()  # columns that were not used
    split: str | None = None  # the split that the column `split` names
    label: bool | None = None  # of a completion without a pair: True if it is good


class Form(NamedTuple):
    """A set of columns that is recognised, and the function that converts their values; it also gets the form."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Mapping[str, Any], Form], Value]


def convert(record: Record, columns: Mapping[str, str], system: str = "") -> Value:
    """Return a record as text, as prompt and completion, or as messages. Raise BadExample if that is not possible.

    `columns` maps toyexp's names to those of the record; `system` is the first message of conversations without one.
    """
    value = decode(record, columns)
    form = next((form for form in FORMS if value.keys() >= {*form.required}), None)
    if form is None:
        hints = {"chosen": "; for pairs: data=preference", "input_ids": "; for token ids: data=tokens"}
        hint = next((hint for name, hint in hints.items() if name in value), "")
        raise BadExample(f"has the keys {join_names(decode(record, columns, nulls=True))}; {EXPECTED}{hint}")
    result = form.convert(value, form)
    used = tuple(name for name in value if name in (*form.required, *form.optional))
    return _complete(result, value, used, columns, system)


def read_text_column(record: Record, columns: Mapping[str, str]) -> str:
    """Return the column `text` of a record. Raise BadExample if it has none."""
    value = decode(record, columns)
    if "text" not in value:
        found = f"{join_names(decode(record, columns, nulls=True))}; expected text (data.columns={{text: NAME}})"
        raise BadExample(f"has the keys {found}; for prompts and conversations: data=examples")
    return text_of(value["text"], "text")


def _split(value: Mapping[str, Any], columns: Mapping[str, str]) -> str | None:
    if "split" not in columns:
        return None
    if (word := str(value.get("split"))) not in SPLITS:
        raise BadExample(f"{columns['split']} is {printable(word, 20)}; expected train, validation or test")
    return SPLITS[word]


def _complete(
    result: Value, value: Mapping[str, Any], used: tuple[str, ...], columns: Mapping[str, str], system: str
) -> Value:
    """Return the result with its split, the names of its columns and, if a conversation has none, a system message."""
    system = next((value[name] for name in SYSTEM if value.get(name)), system)
    if system and result.messages and result.messages[0].role not in ("system", "developer"):
        message = Message("system", text_of(system, "system"))
        result = result._replace(messages=[message, *result.messages], first=result.first + 1)
    others = tuple(name for name in value if name not in used and name != "split")
    return result._replace(columns=used, others=others, split=_split(value, columns))


def _chat(value: Mapping[str, Any], form: Form) -> Value:
    messages = read_messages(value[form.required[0]], form.required[0])
    _require_answer(messages)
    return Value(messages=messages, tools=_tools(value.get("tools")))


def _require_answer(messages: Sequence[Message]) -> None:
    if all(message.role != "assistant" for message in messages):
        raise BadExample("has no assistant message, so there is nothing to learn")


def _completion(value: Mapping[str, Any], form: Form | None = None) -> Value:
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        texts = (prompt, "prompt", "user"), (completion, "completion", "assistant")
        before, after = (
            read_messages([{"role": role, "content": text}] if isinstance(text, str) else text, name)
            for text, name, role in texts
        )
        _require_answer(after)
        return Value(messages=[*before, *after], tools=_tools(value.get("tools")), first=len(before))
    return Value(text_of(completion, "completion"), text_of(prompt, "prompt"))


def _exchange(value: Mapping[str, Any], form: Form) -> Value:
    question, answer = form.required
    context = [name for name in form.optional if value.get(name) and name not in SYSTEM]
    asked = "\n\n".join(text_of(value[name], name) for name in (question, *context))
    return Value(messages=[Message("user", asked), Message("assistant", text_of(value[answer], answer))])


def _choice(value: Mapping[str, Any], form: Form) -> Value:
    question, choices, place = read_question(value)
    lines = [f"{ascii_uppercase[i]}. {choice}" for i, choice in enumerate(choices)]
    return Value(f" {ascii_uppercase[place]}", "\n".join([question, *lines, "Answer:"]))


FORMS = (
    *(Form((name,), ("tools", *SYSTEM), _chat) for name in ("messages", "conversations", "conversation")),
    Form(("prompt", "completion"), ("tools", *SYSTEM), _completion),
    Form(("instruction", "output"), ("input", *SYSTEM), _exchange),
    Form(("instruction", "response"), ("context", *SYSTEM), _exchange),
    Form(("question", "choices", "answer"), (), _choice),
    Form(("question", "choices", "answerKey"), (), _choice),
    Form(("question", "A", "B", "answer"), tuple(ascii_uppercase[2:]), _choice),
    *(Form(pair, SYSTEM, _exchange) for pair in product(ASKED, ("answer", "response", "output"))),
    Form(("text",), (), lambda value, form: Value(text_of(value["text"], "text"))),
)
NAMES = sorted(
    {"split", "chosen", "rejected", "label", *(n for form in FORMS for n in (*form.required, *form.optional))}
)
EXPECTED = "expected messages, prompt and completion, instruction and output, or text; name others with data.columns"


def convert_pair(record: Record, columns: Mapping[str, str], system: str = "") -> list[Value]:
    """Return a record as a chosen and a rejected completion of a prompt. Raise BadExample if that is not possible.

    Without the column `prompt`, the prompt is what both have in common at the beginning. With the column `label`, which
    is true or false, there is one completion only.
    """
    value, used = decode(record, columns), tuple[str, ...]()
    if value.keys() >= {"prompt", "completion", "label"}:
        if not isinstance(value["label"], bool | int) or value["label"] not in (0, 1):
            raise BadExample(f"label is {printable(str(value['label']), 20)}; expected true or false")
        used, texts = ("completion", "label"), [value["completion"]]
    elif value.keys() >= {"chosen", "rejected"}:
        used, texts = ("chosen", "rejected"), [value["chosen"], value["rejected"]]
        if type(texts[0]) is not type(texts[1]) or not isinstance(texts[0], str | list):
            kinds = f"chosen is {kind_of(texts[0])} and rejected is {kind_of(texts[1])}"
            raise BadExample(f"{kinds}; expected two texts or two lists of messages")
        for name, text in zip(used, texts, strict=True):
            if not text:
                raise BadExample(f"{name} is empty")
    else:
        keys = join_names(decode(record, columns, nulls=True))
        raise BadExample(f"has the keys {keys}; expected chosen and rejected, and a prompt")
    asked = next((name for name in ASKED if name in value), None)
    prompt, *texts = [value[asked], *texts] if asked else _common_start(*texts)
    used = (asked, *used) if asked else used
    if isinstance(prompt, list) or isinstance(texts[0], list):  # `chosen` may repeat the prompt's messages
        prompt = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        texts = [text[len(prompt) :] if text[: len(prompt)] == prompt != text else text for text in texts]
    values = [_completion({"prompt": prompt, "completion": text, "tools": value.get("tools")}) for text in texts]
    used = (*used, *(name for name in (*SYSTEM, "tools") if name in value and values[0].messages))
    label = bool(value["label"]) if len(values) == 1 else None
    return [_complete(each, value, used, columns, system)._replace(label=label) for each in values]


def _common_start(chosen: Any, rejected: Any) -> list[Any]:
    """Return the common beginning of two texts, or of two lists of messages, and what follows in each."""
    limit = min(len(chosen), len(rejected)) - 1  # each keeps an end that is learned
    same = next((i for i in range(limit) if chosen[i] != rejected[i]), limit)
    if isinstance(chosen, str) and same and chosen[same - 1] == " ":  # a tokenizer joins a space to what follows
        same -= 1
    if same < 1:
        raise BadExample("has no prompt: chosen and rejected have no common beginning")
    return [chosen[:same], chosen[same:], rejected[same:]]


def read_messages(value: Any, subject: str) -> list[Message]:
    """Return the messages of a conversation. Raise BadExample if it is not a list of role and content."""
    value = parse_cell(value)
    if not isinstance(value, list) or not value:
        raise BadExample(f"{subject} is {kind_of(value)}; expected a list of role and content")
    return [_message(entry, number) for number, entry in enumerate(value, 1)]


def _message(entry: Any, number: int) -> Message:
    if isinstance(entry, dict) and "from" in entry and "role" not in entry:
        sender = str(entry["from"])
        others = {key: item for key, item in entry.items() if key in ("tool_calls", "name")}
        entry = {"role": SENDERS.get(sender, sender), "content": entry.get("value"), **others}
    if not isinstance(entry, dict) or "role" not in entry:
        contents = join_names(entry) if isinstance(entry, dict) else kind_of(entry)
        raise BadExample(f"message {number} holds {contents}; {_MESSAGE}")
    role, content = entry["role"], entry.get("content")
    if role not in ROLES:
        raise BadExample(f"message {number} has the role {printable(str(role))}; {suggest(str(role), ROLES)}")
    if role == "system" and number > 1:
        raise BadExample(f"message {number} has the role system; only the first message may have it")
    if isinstance(content, list):
        content = _join_texts(content, number)
    further = {key: item for key, item in entry.items() if key not in ("role", "content") and item is not None}
    if content not in (None, "") or (role != "tool" and not (role == "assistant" and further)):
        if "content" not in entry:
            raise BadExample(f"message {number} holds {join_names(entry)}; {_MESSAGE}")
        text_of(content, f"message {number}'s content")
    for text in iter_strings(further):
        require_unicode(text, f"message {number}")
    return Message(role, content, further)


def _join_texts(parts: list[Any], number: int) -> str:
    """Return the text of a message whose content is a list of parts. Raise BadExample for another kind of part."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else kind_of(part)
        if kind != "text":
            raise BadExample(f"message {number} has content of the type {printable(str(kind), 20)}; expected text")
    return "".join(text_of(part.get("text"), f"message {number}'s content") for part in parts)


def _tools(value: Any) -> list[Any] | None:
    value = parse_cell(value)
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadExample(f"tools is {kind_of(value)}; expected a list of JSON schemas")
    for text in iter_strings(value):
        require_unicode(text, "tools")
    return value
