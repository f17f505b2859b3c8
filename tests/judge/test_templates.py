"""Chat templates write the text of transformers, and rows to train on begin with the prompt used in inference."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toyexp.formats import BadExample
from toyexp.formats.gguf.tokenizer import special_tokens
from toyexp.tokenizers.byte_level import BPE
from toyexp.tokenizers.chat_template import BadChat, Template
from toyexp.tokenizers.tokenizer import CONTROL, NORMAL, SYMBOLS
from toyexp_data.chat import Message, tokenize
from toyexp_data.template import ChatTemplate

pytestmark = [pytest.mark.judge, pytest.mark.slow]

pytest.importorskip("transformers", reason="the judge of chat templates: pip install 'toyexp[test]'")
pytest.importorskip("jinja2", reason="chat templates: pip install 'toyexp[data]'")

NOW = datetime.datetime(2026, 7, 26, 17, 5)
BOS, EOS = "<s>", "</s>"
SPELLED = re.compile(r"<\|[^|>\s'{}]+\|>|<\uff5c[^\uff5c']+\uff5c>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>")
CALL = {"type": "function", "id": "call12345", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
NUMBERS = {name: {"type": "number", "description": "<one>, schön"} for name in "ab"}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": NUMBERS}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **further: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **further}


THOUGHT = "<think>\nI add them.\n</think>\n\nFour."
CHATS: dict[str, list[dict[str, Any]]] = {
    "single": [user("What is  2 + 2?\n"), assistant("Four.")],
    "turns": [user("2 + 2?"), assistant("Four."), user("<b>ß</b>"), assistant("Six, I'd say.")],
    "system": [{"role": "system", "content": "Be brief."}, user("a"), assistant("Four."), user("b"), assistant("Six.")],
    "thinking": [user("a"), assistant(THOUGHT), user("b"), assistant(THOUGHT.replace("Four", "Six"))],
    "reasoning": [user("a"), assistant("4", reasoning_content="I add."), user("b"), assistant("x", thinking="I do")],
    "tools": [user("a"), assistant(None, tool_calls=[CALL]), {"role": "tool", "content": "4", "name": "add",
              "tool_call_id": "call12345"}, assistant("Four.")],
}  # fmt: skip


def tools_for_chat(chat: str) -> list[dict[str, Any]] | None:
    return [{"type": "function", "function": TOOL}] if chat == "tools" else None


@cache
def tokenizer_for(template: str) -> BPE:
    """Return a byte tokenizer with the control tokens that occur in the template."""
    controls = sorted({"<|im_start|>", "<|im_end|>", *SPELLED.findall(template)} - {BOS, EOS})
    pieces = [*SYMBOLS, BOS, EOS, *controls]
    tokenizer = BPE(pieces, [], 257)
    tokenizer.bos, tokenizer.controls = 256, frozenset(range(256, len(pieces))) - {257}
    types = np.array([NORMAL] * 256 + [CONTROL] * (len(pieces) - 256))
    tokenizer.extra_end_ids = frozenset(
        special_tokens({p: i for i, p in enumerate(pieces)}, types, {"eos_token_id": 257})[1]
    ) - {257}
    return tokenizer


@cache
def judge(template: str) -> Any:
    """Return the same tokenizer in transformers."""
    from tokenizers import Tokenizer as Library
    from transformers import PreTrainedTokenizerFast

    text, _ = tokenizer_for(template).to_huggingface()
    return PreTrainedTokenizerFast(tokenizer_object=Library.from_str(text), bos_token=BOS, eos_token=EOS)


@pytest.fixture(autouse=True)
def fixed_day(monkeypatch):
    from transformers.utils import chat_template_utils

    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return NOW

    monkeypatch.setattr(chat_template_utils, "datetime", Stopped)


def render_with_transformers(
    template: str, messages: Sequence[dict[str, Any]], tools: Any, ask: bool
) -> tuple[str | None, str]:
    """Return transformers' text, or None and the reason why it writes none."""
    try:
        text = judge(template).apply_chat_template(
            list(messages), chat_template=template, tools=tools, add_generation_prompt=ask, tokenize=False
        )
        return text, ""
    except Exception as error:
        return None, str(error)


def render(template: str, messages: Sequence[Message], tools: Any, ask: bool) -> tuple[str | None, str]:
    try:
        rendering = Template(template, tokenizer_for(template), "x", NOW).render(
            [m.fields() for m in messages], ask, tools
        )
        return rendering.text, ""
    except BadChat as error:
        return None, str(error)


def as_messages(chat: Sequence[dict[str, Any]]) -> list[Message]:
    further = [{k: v for k, v in m.items() if k not in ("role", "content")} for m in chat]
    return [Message(m["role"], m["content"], more) for m, more in zip(chat, further, strict=True)]


def find_difference(template: str, name: str) -> str:
    """Return what differs from transformers in text or ids, with and without a generation prompt; "" if nothing."""
    chat, tools = CHATS[name], tools_for_chat(name)
    for messages, ask in ((chat, False), (chat[:-1], True)):
        expected, why = render_with_transformers(template, messages, tools, ask)
        text, reason = render(template, as_messages(messages), tools, ask)
        if expected != text:
            return f"{text or reason!r} for {expected or why!r}"
        if expected is None and why[:60].replace("\n", " ") not in reason.replace(r"\n", " "):
            return f"refused with {reason!r} for {why!r}"
        if expected is not None:
            ids = judge(template)(expected, add_special_tokens=False).input_ids
            if ids != tokenizer_for(template).encode(expected, special=True).tolist():
                return "its ids"
    return ""


def find_row_error(template: str, name: str) -> str:
    """Return the error in the rows to train on; "" if none is available.

    Each row begins the text that transformers writes up to an answer, or begins with its prompt for the answer.
    """
    chat, tools, tokenizer = CHATS[name], tools_for_chat(name), tokenizer_for(template)
    if render_with_transformers(template, chat, tools, False)[0] is None:
        return ""
    try:
        rows = ChatTemplate(template, tokenizer, "x", NOW).rows(as_messages(chat), tools).rows
    except BadExample as error:
        return str(error)
    answers = iter([n for n, message in enumerate(chat) if message["role"] == "assistant"])
    for row in rows:
        last = [next(answers) for part in row if part.learned][-1]
        end = max(n for n, part in enumerate(row) if part.learned) + 1
        text = "".join(part.text for part in row[:end])
        full_text, prompt_text = (
            render_with_transformers(template, chat[: last + 1], tools, False)[0],
            render_with_transformers(template, chat[:last], tools, True)[0],
        )
        if not (full_text or "").startswith(text) and not (prompt_text and text.startswith(prompt_text)):
            return f"reads {text!r}"
        ids = judge(template)(text, add_special_tokens=False).input_ids
        if tokenize(row, tokenizer, False).ids.tolist() not in (ids, [*ids, 257]):
            return "its ids"
    return ""


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SMALL = {
    "chatml": "{% for m in messages %}" + TURN + "{% endfor %}" + ASK,
    "blocks": "{{ bos_token }}\n  {% for m in messages %}\n    {%- if m.role == 'user' %}\n  <{{ m.content }}>\n"
    "    {% else %}\n({{ m.content | trim }}{{ eos_token }})\n  {% endif %}\n  {# said #}\n{% endfor %}",
    "json": "{% if tools %}{{ tools | tojson(indent=2) }}{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}"
    "{% endif %}{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(ensure_ascii=true) }}<|im_end|>"
    "{% endfor %}",
    "day": "{{ strftime_now('%A, %d %B %Y %H:%M') }}\n{% for m in messages %}" + TURN + "{% endfor %}" + ASK,
    "loops": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}" + TURN
    + "{% if loop.index > 5 %}{% break %}{% endif %}{% endfor %}" + ASK,
    "refusal": "{% if messages[0].role == 'system' %}{{ raise_exception('No <system> here\\nplease') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate: ' ~ m.role) }}{% endif %}" + TURN + "{% endfor %}" + ASK,
    "reasoning": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}|{{ m.thinking }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + ASK,
    "last": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else "
    "m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}" + ASK,
    "begun": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}" + ASK.replace("{% endif", "<think>\n{% endif"),
    "moved": "{{ bos_token }}{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST]"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "ended": "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% else %}{{ eos_token }}{% endif %}",
    "names": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    "{{ dict(a=m.role).a }}{{ m.content }}{{ documents is none }}{{ tools is none }}"
    "{{ m.tool_calls is defined }}<|im_end|>{% endfor %}",
    "marked": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + ASK,
}  # fmt: skip
WRITE_CALLS = ("json",)


@pytest.mark.parametrize("template", SMALL)
def test_text_and_ids_agree_with_transformers(template):
    assert {chat: problem for chat in CHATS if (problem := find_difference(SMALL[template], chat))} == {}


@pytest.mark.parametrize("template", SMALL)
def test_rows_agree_with_the_prompts_and_answers_of_transformers(template):
    problems = {chat: problem for chat in CHATS if (problem := find_row_error(SMALL[template], chat))}
    if template not in WRITE_CALLS:
        assert "drops content of the assistant" in problems.pop("tools", "drops content of the assistant")
    assert problems == {}


def test_learned_positions_equal_the_assistant_mask_of_transformers():
    template = SMALL["marked"]
    for chat in ("single", "turns", "system"):
        expected = judge(template).apply_chat_template(
            CHATS[chat], chat_template=template, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        (row,) = ChatTemplate(template, tokenizer_for(template), "x").rows(as_messages(CHATS[chat])).rows
        example = tokenize(row, tokenizer_for(template), False)
        learned = np.flatnonzero(example.learned).tolist()
        assert learned == np.flatnonzero(expected["assistant_masks"]).tolist(), chat
        assert example.ids.tolist() == expected["input_ids"][: len(example.ids)]


# -- templates of llama.cpp ------------------------------------------------------------------------------------------


def collect_templates(root: Path) -> dict[str, str]:
    """Return the templates in a checkout of llama.cpp: those in files, and those in its tests."""
    templates = {
        path.stem: path.read_text(encoding="utf-8") for path in sorted((root / "models/templates").glob("*.jinja"))
    }
    quoted = r'"(?:[^"\\]|\\.)*"'
    entry = re.compile(
        rf"/\* \.name= \*/ ({quoted}),(?:\s*//[^\n]*\n)*\s*/\* \.template_str= \*/\s*(?:U8C\()?((?:{quoted}\s*)+)"
    )
    for name, text in entry.findall((root / "tests/test-chat-template.cpp").read_text(encoding="utf-8")):
        pieces = [json.loads(piece.replace(r"\'", "'")) for piece in re.findall(quoted, text)]
        templates[json.loads(name)] = "".join(pieces)
    return templates


@pytest.mark.full
def test_the_templates_of_llama_cpps_checkout():
    root = os.environ.get("TOYEXP_LLAMA_CPP")
    if not root:
        pytest.skip("no checkout of llama.cpp is named: TOYEXP_LLAMA_CPP=...")
    templates = collect_templates(Path(root))
    assert len(templates) >= 70
    pairs = [(name, chat) for name in templates for chat in CHATS]
    wrong = {pair: problem for pair in pairs if (problem := find_difference(templates[pair[0]], pair[1]))}
    odd = {pair: problem for pair in pairs if (problem := find_row_error(templates[pair[0]], pair[1]))}
    unwritten = [pair for pair, problem in odd.items() if "drops content of the assistant" in problem]
    for (name, chat), problem in {**wrong, **odd}.items():
        print(f"{name} | {chat} | {problem}")
    print(f"{len(pairs)} pairs, {len(wrong)} differ, {len(odd)} make no rows")
    assert len(wrong) <= 0.05 * len(pairs) and set(odd) == set(unwritten)
    assert len([chat for _, chat in unwritten if chat != "tools"]) <= 0.05 * len(pairs)
