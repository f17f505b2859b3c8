"""Chat templates that change or reorder turns: the resulting rows and the trained tokens.

That their text is what transformers writes is tests/judge/test_templates.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toyexp import UserError
from toyexp.formats import BadExample
from toyexp.formats.gguf.write import write_model
from toyexp.tokenizers.byte_level import BPE, Bytes
from toyexp.tokenizers.chat_template import BadChat, Template
from toyexp.tokenizers.tokenizer import END_OF_TEXT, SYMBOLS
from toyexp_data.chat import Message, Part, tokenize
from toyexp_data.examples import ExampleData
from toyexp_data.template import ChatTemplate
from toyexp_models.llama import Llama

pytest.importorskip("jinja2", reason="chat templates: pip install 'toyexp[data]'")

TURN = "<|im_start|>{{ m.role }}\n{{ %s }}<|im_end|>\n"
ASK = "{%% if add_generation_prompt %%}<|im_start|>assistant\n%s{%% endif %%}"
CHATML = "{% for m in messages %}" + TURN % "m.content" + "{% endfor %}" + ASK % ""
# A template that drops thoughts before all answers but the last, like Qwen's.
THINKING = (
    "{% for m in messages %}{% set said = m.content if loop.last else m.content.split('</think>')[-1].lstrip() %}"
    + TURN % "said" + "{% endfor %}" + ASK % ""
)  # fmt: skip
# Drops it from every answer and begins the thought itself when it asks, as R1's distilled ones do.
DROPPED = "{% for m in messages %}" + TURN % "m.content.split('</think>')[-1].lstrip()" + "{% endfor %}"
BEGUN = DROPPED + ASK % "<think>\n"
NOT_TO_THINK = "{% for m in messages %}" + TURN % "m.content" + "{% endfor %}" + ASK % "<think>\n\n</think>\n\n"
# Puts the system's words before the last question, if nothing follows it, as Mistral Nemo's does.
MOVED = (
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}[INST]{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n"
    "{% endif %}{{ m.content }}[/INST]{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
# A template that ends with end-of-text, like Phi 3.5's.
ENDED = "{% for m in messages %}" + TURN % "m.content" + "{% endfor %}" + ASK % "" + (
    "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
)  # fmt: skip
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}" + ASK % ""
)


@pytest.fixture(scope="module", autouse=True)
def _renderer():
    """Keep the renderer process alive, which otherwise ends with the last template."""
    yield Template("", vocabulary(), "x")


def vocabulary() -> BPE:
    tokenizer = BPE([*SYMBOLS, END_OF_TEXT, "<|im_start|>", "<|im_end|>"], [], 256)
    tokenizer.controls, tokenizer.extra_end_ids = frozenset([257, 258]), frozenset([258])
    return tokenizer


def talk(*said: str, system: str = "") -> list[Message]:
    """Return messages of user and assistant in turn."""
    turns = [Message(("user", "assistant")[n % 2], text) for n, text in enumerate(said)]
    return [*([Message("system", system)] if system else []), *turns]


def rows_and_learned(template: str, messages: Sequence[Message], **changes: Any) -> tuple[list[str], list[list[str]]]:
    """Return the text of each row up to its last trained part, and the trained parts."""
    rows = ChatTemplate(template, vocabulary(), "x.gguf").rows(messages, **changes).rows
    ends = [max(n for n, part in enumerate(row) if part.learned) + 1 for row in rows]
    texts = ["".join(part.text for part in row[:end]) for row, end in zip(rows, ends, strict=True)]
    return texts, [[part.text for part in row if part.learned] for row in rows]


def rendered(template: str, messages: Sequence[Message], ask: bool = False) -> str:
    return Template(template, vocabulary(), "x.gguf").render([m.fields() for m in messages], ask).text


THOUGHTS = talk("q1", "<think>\nt1\n</think>\n\na1", "q2", "<think>\nt2\n</think>\n\na2")


# -- rows -------------------------------------------------------------------------------------------------------------


def test_an_ordinary_template_makes_one_row_of_a_conversation():
    messages = talk("q1", "a1", "q2", "a2", "q3")
    texts, learned = rows_and_learned(CHATML, messages)
    assert learned == [["a1<|im_end|>", "a2<|im_end|>"]]
    assert rendered(CHATML, messages).startswith(texts[0])


def test_if_earlier_thoughts_are_dropped_each_answer_follows_its_inference_prompt():
    texts, learned = rows_and_learned(THINKING, THOUGHTS)
    assert learned == [[THOUGHTS[1].content + "<|im_end|>"], [THOUGHTS[3].content + "<|im_end|>"]]
    for n, (text, (answer,)) in enumerate(zip(texts, learned, strict=True)):
        assert text == rendered(THINKING, THOUGHTS[: 2 * n + 1], ask=True) + answer
    assert "t1" not in texts[1] and "a1" in texts[1]
    all_texts, all_learned = rows_and_learned(THINKING, THOUGHTS, everything=True)
    assert all_texts == all_learned[0] == [rendered(THINKING, THOUGHTS)], "all of one text is learned once"


def test_the_loss_starts_after_the_part_of_an_answer_that_the_template_writes():
    texts, learned = rows_and_learned(BEGUN, THOUGHTS)
    assert learned == [["t1\n</think>\n\na1<|im_end|>"], ["t2\n</think>\n\na2<|im_end|>"]]
    assert texts[1] == rendered(BEGUN, THOUGHTS[:3], ask=True) + learned[1][0]
    rows = ChatTemplate(BEGUN, vocabulary(), "x").rows(THOUGHTS)
    assert (rows.off_prompt, rows.thoughts_dropped) == (0, 0)


def test_an_answer_without_the_expected_thought_is_used_unchanged_and_counted():
    texts, learned = rows_and_learned(BEGUN, talk("q1", "a1", "q2", "a2"))
    assert learned == [["a1<|im_end|>", "a2<|im_end|>"]] and "think" not in texts[0]
    assert ChatTemplate(BEGUN, vocabulary(), "x").rows(talk("q1", "a1", "q2", "a2")).off_prompt == 2
    split, begun = rows_and_learned(CHATML + "{% if add_generation_prompt %}<th{% endif %}", talk("q", "<b>x"))
    assert begun == [["<b>x<|im_end|>"]] and split[0].endswith("assistant\n<b>x<|im_end|>"), "no tag is cut in two"


def test_an_empty_thought_of_the_generation_prompt_precedes_the_answer():
    messages = talk("q1", "a1", "q2", "a2")
    texts, learned = rows_and_learned(NOT_TO_THINK, messages)
    assert learned == [["a1<|im_end|>"], ["a2<|im_end|>"]]
    assert texts[1] == rendered(NOT_TO_THINK, messages[:3], ask=True) + "a2<|im_end|>"
    assert ChatTemplate(NOT_TO_THINK, vocabulary(), "x").rows(messages).off_prompt == 0


@pytest.mark.parametrize(
    ("asks", "writes", "remainder"),
    [
        ("<think></think>", "</think>", ""),  # as DeepSeek V3.2's: a thought that is empty, and the end of one
        ("<think>\n\n</think>\n\n", "</think>\n\n", ""),
        ("<think></think>", "</think>\n", "\n"),
        ("<think></think>", "", ""),
    ],
)
def test_the_generation_prompt_is_not_repeated_before_the_answer(asks, writes, remainder):
    header = "<|im_start|>assistant\n"
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|im_end|>{% else %}" + header + writes
        + "{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}" + header + asks + "{% endif %}"
    )  # fmt: skip
    messages = talk("q1", "a1", "q2", "a2")
    texts, learned = rows_and_learned(template, messages)
    assert learned == [[f"{remainder}a1<|im_end|>"], [f"{remainder}a2<|im_end|>"]]
    for n, text in enumerate(texts):
        assert text == rendered(template, messages[: 2 * n + 1], ask=True) + learned[n][0]
        assert text.count("</think>") == 1 + n * writes.count("</think>"), "one for each answer"
    assert ChatTemplate(template, vocabulary(), "x").rows(messages).off_prompt == 0


def test_text_that_the_template_moves_is_read_as_at_inference():
    messages = talk("q1", "a1", "q2", "a2", system="s")
    texts, learned = rows_and_learned(MOVED, messages)
    assert texts == ["[INST]s\nq1[/INST]a1<|im_end|>", "[INST]q1[/INST]a1<|im_end|>[INST]s\nq2[/INST]a2<|im_end|>"]
    assert learned == [["a1<|im_end|>"], ["a2<|im_end|>"]]


def test_an_answer_ends_at_the_token_that_ends_generation():
    _, learned = rows_and_learned(ENDED, talk("q1", "a1", "q2", "a2"))
    assert learned == [["a1<|im_end|>", "a2<|im_end|>"]]
    unknown = vocabulary()
    unknown.extra_end_ids = frozenset()
    rows = ChatTemplate(ENDED, unknown, "x").rows(talk("q1", "a1", "q2", "a2")).rows
    assert [[p.text for p in row if p.learned] for row in rows] == [
        ["a1<|im_end|>\n<|endoftext|>"], ["a2<|im_end|>\n<|endoftext|>"],
    ]  # fmt: skip


def test_rows_without_an_end_token_get_end_of_text():
    template = THINKING.replace("<|im_end|>", ";")
    rows = ChatTemplate(template, vocabulary(), "x").rows(THOUGHTS).rows
    assert [[part.end for part in row] for row in rows] == [[False, True], [False, True]]
    assert tokenize(rows[0], vocabulary(), False).ids[-1] == 256
    extended = ChatTemplate(template, vocabulary(), "x").rows([*THOUGHTS, Message("user", "q3")]).rows
    assert not extended[1][-1].end, "a conversation that goes on has not ended"


# -- {% generation %} -------------------------------------------------------------------------------------------------


def test_generation_marks_select_the_trained_tokens():
    messages = talk("q1", "a1", "q2", "a2")
    assert rows_and_learned(MARKED, messages)[1] == [["a1<|im_end|>", "a2<|im_end|>"]]
    only_last = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and m.content == 'a2'")
    assert rows_and_learned(only_last, messages)[1] == [["a2<|im_end|>"]]
    middle = MARKED.replace("{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}",
                            "({% generation %}{{ m.content }}{% endgeneration %})<|im_end|>")  # fmt: skip
    assert rows_and_learned(middle, messages)[1] == [["a1", "a2"]]
    header = MARKED.replace(
        "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}",
        "{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n",
    )
    header = header.replace("{% else %}", "{% else %}<|im_start|>{{ m.role }}\n")  # fmt: skip
    texts, learned = rows_and_learned(header, messages)
    assert learned == [[f"<|im_start|>assistant\n{answer}<|im_end|>" for answer in ("a1", "a2")]]
    assert rendered(header, messages).startswith(texts[0])


def test_a_conversation_without_marked_tokens_is_rejected():
    with pytest.raises(BadExample, match="encloses no text of the assistant"):
        rows_and_learned(MARKED.replace("'assistant' %}", "'nobody' %}"), talk("q", "a"))


def test_an_empty_answer_is_rejected():
    silent = [Message("user", "q"), Message("assistant", None, {"name": "x"})]
    with pytest.raises(BadExample, match="drops content of the assistant"):
        rows_and_learned("{% for m in messages %}{{ m.content }}{% endfor %}", silent)
    with pytest.raises(BadExample, match="encloses no text of the assistant"):
        rows_and_learned(
            MARKED.replace("{% generation %}", "").replace("{% endgen", "{% generation %}{% endgen"), talk("q", "a")
        )
    tokenizer = vocabulary()
    tokenizer.swallow_after = frozenset([257])
    with pytest.raises(BadExample, match="no token to learn"):
        tokenize([Part("<|im_start|>", False, special=True), Part(" \n", True)], tokenizer, False)


def test_marks_are_counted_after_the_bos_token():
    tokenizer = vocabulary()
    tokenizer.bos, tokenizer.add_bos = 257, True
    template = Template("{{ bos_token }}x{% generation %}yz{% endgeneration %}", tokenizer, "x").render([], False)
    assert template.text == "xyz" and template.marked == [(1, 3)]


# -- what templates know ----------------------------------------------------------------------------------------------


def test_messages_and_tools_are_passed_to_the_template_unchanged():
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson(indent=1) }}"
    call = {"function": {"name": "add", "arguments": {"ü": "<"}}}
    messages = [Message("user", "q"), Message("assistant", None, {"tool_calls": [call]}), Message("tool", "")]
    text = Template(template, vocabulary(), "x").render([m.fields() for m in messages], False, [{"name": "add"}]).text
    assert text == (
        '{"role": "user", "content": "q"}'
        '{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"ü": "<"}}}]}'
        '{"role": "tool", "content": ""}[\n {\n  "name": "add"\n }\n]'
    )
    with pytest.raises(BadExample, match="drops content of the assistant"):
        rows_and_learned("{% for m in messages %}{{ m.role }}{% endfor %}", messages)


@pytest.mark.parametrize(
    ("further", "seen"),
    [
        ({"reasoning_content": "I add."}, "I add.|I add."),
        ({"thinking": "I add."}, "I add.|I add."),
        ({"reasoning": "I add."}, "I add.|I add."),
        ({"thinking": "I do.", "reasoning_content": "I add."}, "I add.|I do."),
    ],
)
def test_a_thought_is_available_under_each_common_key(further, seen):
    template = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
    assert rendered(template, [Message("assistant", "4", further)]) == seen


def test_control_tokens_are_found_in_any_field_of_a_message():
    call = Message("assistant", None, {"tool_calls": [{"function": {"name": "f", "arguments": {"a": "<|im_end|>"}}}]})
    with pytest.raises(BadExample, match=r"what the assistant says contains the control token <\|im_end\|>"):
        rows_and_learned(CHATML, [Message("user", "q"), call])
    with pytest.raises(BadExample, match=r"tools contains the control token <\|im_start\|>"):
        rows_and_learned(CHATML, talk("q", "a"), tools=[{"<|im_start|>": 1}])


def test_a_template_gets_the_date():
    template = "{{ strftime_now('%d %b %Y') }}{% if strftime_now is defined %}!{% endif %}"
    dated = Template(template, vocabulary(), "x", datetime(2024, 7, 26))
    assert not dated.is_dated and dated.render([], False).text == "26 Jul 2024!" and dated.is_dated
    assert Template(template, vocabulary(), "x").render([], False).text.endswith(f" {date.today().year}!")


@pytest.mark.parametrize("template", ["{{ strftime_now.__globals__.x }}", "{{ raise_exception.__globals__['x'] }}",
                                      "{{ strftime_now.__self__._now }}", "{% generation %}{{ ''.__class__ }}"
                                      "{% endgeneration %}{{ messages.append(1) }}"])  # fmt: skip
def test_template_functions_give_no_access_to_python(template):
    with pytest.raises(BadChat, match=r"fails \("):
        Template(template, vocabulary(), "x").render([], False)


def test_an_unclosed_mark_is_a_template_error():
    with pytest.raises(UserError, match=r"x\.gguf: its chat template is not valid \("):
        ChatTemplate("{% generation %}x", Bytes(), "x.gguf")


# -- in a data set ----------------------------------------------------------------------------------------------------


def open_chats(
    folder: Path, template: str, chats: Sequence[Sequence[Message]], **changes: Any
) -> tuple[ExampleData, Any]:
    """Open conversations with data=examples and a tokenizer whose file has the template."""
    tokenizer = vocabulary()
    tokenizer.chat_template = template
    model = Llama(d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=8, context=8, vocab=tokenizer.vocab)
    values = {t.name: np.zeros(t.shape, np.float32) for t in model.tensors()}
    write_model(folder / "donor.gguf", model, values, tokenizer)
    lines = [json.dumps({"messages": [m.fields() for m in chat]}) for chat in chats]
    (folder / "x.jsonl").write_text("\n".join(lines))
    data = ExampleData(path=str(folder / "x.jsonl"), tokenizer=str(folder / "donor.gguf"), **changes)
    data.check()
    return data, data.open(None)


def test_conversations_that_make_several_rows_are_counted_and_held_out_whole(tmp_path):
    _, dataset = open_chats(tmp_path, THINKING, [THOUGHTS, talk("q", "a")] * 3, val_fraction=0.3)
    facts = dataset.describe()
    assert (facts["chats"], facts["chats_in_rows"], facts["rows_of_these"], facts["examples"]) == (6, 3, 6, 9)
    held = dataset.tokenizer.decode(dataset.held_out.ids)
    assert held.count("t1") == held.count("t2"), "an answer is not trained on whose question is held out"
    assert "3 conversations become 6 rows" in dataset.remarks()[0]
    _, everything = open_chats(tmp_path, THINKING, [THOUGHTS] * 2, train_on="all")
    assert everything.describe()["examples"] == 2 and everything.describe()["chats_in_rows"] == 0


def test_changes_and_omissions_by_a_template_are_noted(tmp_path):
    _, dataset = open_chats(tmp_path, BEGUN, [talk("q", "a"), THOUGHTS, talk("q", "b")])
    assert dataset.describe()["answers_not_as_asked"] == 2 and "2 answers do not begin" in dataset.remarks()[1]
    _, dataset = open_chats(tmp_path, DROPPED + ASK % "", [THOUGHTS] * 2)
    assert dataset.describe()["thoughts_dropped"] == 4
    assert [words for words in dataset.remarks() if "4 answers are learned without their reasoning" in words]


def test_a_template_error_names_the_line_and_the_templates_message(tmp_path):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('No system\nrole') }}{% endif %}" + CHATML
    chats = [talk("q", "a"), talk("q", "a"), talk("q", "a", system="s")]
    with pytest.raises(
        UserError, match=re.escape(r"x.jsonl:3: the chat template rejects the conversation (No system\nrole)")
    ):
        open_chats(tmp_path, template, chats)
    facts = open_chats(tmp_path, template, chats, on_error="skip")[1].describe()
    assert (facts["examples"], facts["skipped"]) == (2, 1)


def test_the_date_used_by_a_template_is_recorded_as_a_setting(tmp_path):
    dated = "{{ strftime_now('%Y-%m-%d %H:%M') }}" + CHATML
    data, dataset = open_chats(tmp_path, dated, [talk("q", "a")] * 2)
    assert data.date == dataset.describe()["chat_date"] == date.today().isoformat()
    assert f"{data.date} 00:00" in dataset.tokenizer.decode(dataset.train.ids)
    data, dataset = open_chats(tmp_path, dated, [talk("q", "a")] * 2, date="2024-07-26T17:30")
    assert "2024-07-26 17:30" in dataset.tokenizer.decode(dataset.train.ids)
    assert "the chat template uses the date 2024-07-26T17:30 (data.date)" in dataset.remarks()
    data, dataset = open_chats(tmp_path, CHATML, [talk("q", "a")] * 2)
    assert data.date == "" and dataset.describe()["chat_date"] is None and dataset.remarks() == []
