"""Prompts, conversations and text in JSON lines: which tokens are trained on, and which lines are rejected."""

import gzip
import itertools
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toyexp import UserError
from toyexp.formats import BadExample
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import read_chat_template, read_tokenizer
from toyexp.formats.gguf.write import write_model
from toyexp.interfaces.dataset import batch_digest
from toyexp.testing import DataSuite
from toyexp.tokenizers.byte_level import BPE, Bytes, Characters
from toyexp.tokenizers.tokenizer import END_OF_TEXT, SYMBOLS
from toyexp_data.chat import PLAIN_TEMPLATE, Message, plain_rows, tokenize
from toyexp_data.columns import convert, convert_pair
from toyexp_data.examples import ExampleData, example_rows, spread_held_out
from toyexp_data.preference import Preference
from toyexp_data.template import ChatTemplate
from toyexp_models.llama import Llama

EOS = Bytes().eos


def pairs(count):
    return [{"prompt": f"{i} + {i} =", "completion": f" {2 * i}"} for i in range(count)]


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def open_examples(path, lines=None, **changes):
    if lines is not None:
        write_lines(path, lines)
    data = ExampleData(path=str(path), **{"tokenizer": "byte", **changes})
    data.check()
    return data.open(None)


def rows_of(record):
    return example_rows(convert(record, {}), plain_rows, "answers").rows[0]


def learned_texts(example, tokenizer):
    """The learned ids cut at end-of-text, decoded; and whether the last of them had its end."""
    ids = example.ids[example.learned]
    pieces = [list(g) for end, g in itertools.groupby(ids, lambda i: i == tokenizer.eos) if not end]
    return [tokenizer.decode(p) for p in pieces], ids[-1] == tokenizer.eos


class TestExamples(DataSuite):
    epoch = 12
    tells = ("model.context",)

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path):
        self.data = ExampleData(path=str(write_lines(tmp_path / "x.jsonl", pairs(60))), val_fraction=0.2)

    def subject(self):
        return ExampleData


class TestExamplesPacked(TestExamples):
    epoch = 0
    tells = ()

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path):
        path = write_lines(
            tmp_path / "x.jsonl", [{"prompt": "a", "completion": "bc"[: 1 + i % 2] * 2} for i in range(60)]
        )
        self.data = ExampleData(path=str(path), val_fraction=0.2, pack="joined")


# -- what is learned --------------------------------------------------------------------------------------------------

SAID = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
CHATS = st.builds(
    lambda system, turns, last: [Message(role, said) for role, said in [*system, *turns, last]],
    st.lists(st.tuples(st.just("system"), SAID), max_size=1),
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), SAID), max_size=5),
    st.tuples(st.just("assistant"), SAID),
)
SENTENCES = ["What is 2+2? It is 4.\nuser:\nassistant:\n", "Café — naïve  日本語 🙂\n\n system"] * 3


@pytest.fixture(scope="module")
def tokenizers():
    return {"byte": Bytes(), "bpe": BPE.train(SENTENCES, 300)}


@pytest.mark.parametrize("kind", ["byte", "bpe"])
@given(prompt=SAID, completion=SAID)
@settings(deadline=None, max_examples=80)
def test_the_loss_of_a_pair_covers_the_completion_and_its_end_token(tokenizers, kind, prompt, completion):
    tokenizer = tokenizers[kind]
    parts = rows_of({"prompt": prompt, "completion": completion})
    example = tokenize(parts, tokenizer, everything=False)
    before, after = tokenizer.encode(prompt).tolist(), tokenizer.encode(completion).tolist()
    assert example.ids.tolist() == [*before, *after, tokenizer.eos]
    assert example.learned.tolist() == [False] * len(before) + [True] * (len(after) + 1)
    ids = tokenizer.encode(prompt + completion).tolist()
    assert example.split == (ids != [*before, *after])


def test_tokens_never_span_the_boundary_of_prompt_and_completion():
    tokenizer = BPE([*SYMBOLS, "Ġx", END_OF_TEXT], [("Ġ", "x")], 257)
    example = tokenize(rows_of({"prompt": "a ", "completion": "x"}), tokenizer, False)
    assert example.ids.tolist() == [ord("a"), ord(" "), ord("x"), 257] and example.split == 1
    ids = tokenize(rows_of({"prompt": "a", "completion": " x"}), tokenizer, False)
    assert ids.ids.tolist() == [ord("a"), 256, 257] and ids.split == 0


@pytest.mark.parametrize("kind", ["byte", "bpe"])
@given(messages=CHATS)
@settings(deadline=None, max_examples=80)
def test_the_loss_of_a_conversation_covers_exactly_the_answers(tokenizers, kind, messages):
    tokenizer = tokenizers[kind]
    example = tokenize(plain_rows(messages).rows[0], tokenizer, everything=False)
    answers = [m.content for m in messages if m.role == "assistant"]
    assert learned_texts(example, tokenizer) == (answers, True)
    assert example.learned.sum() == sum(len(tokenizer.encode(a)) + 1 for a in answers)
    expected = "".join(f"{m.role}:\n{m.content}\n" for m in messages)
    assert tokenizer.decode(example.ids) + "\n" == expected
    assert not example.learned[0]


def test_with_train_on_all_the_loss_covers_every_token_after_the_first():
    for value in ({"prompt": "ab", "completion": "c"}, {"text": "abc"}):
        example = tokenize(rows_of(value), Bytes(), everything=True)
        assert example.ids.tolist() == [EOS, *b"abc", EOS]
        assert example.learned.tolist() == [False, True, True, True, True]
    assert tokenize(rows_of({"text": "abc"}), Bytes(), False).learned.sum() == 4, "text is learned whole"


@given(messages=CHATS)
@settings(deadline=None, max_examples=40)
def test_the_plain_format_equals_the_exported_chat_template(messages):
    sandbox = pytest.importorskip("jinja2.sandbox")
    template = sandbox.ImmutableSandboxedEnvironment().from_string(PLAIN_TEMPLATE)
    said = [m.fields() for m in messages]
    rendered = template.render(messages=said, eos_token=END_OF_TEXT, add_generation_prompt=False)
    prompt = template.render(messages=said[:-1], eos_token=END_OF_TEXT, add_generation_prompt=True)
    spelled = "".join(p.text + END_OF_TEXT * p.end for p in plain_rows(messages).rows[0])
    assert spelled + "\n" == rendered
    assert spelled == prompt + messages[-1].content + END_OF_TEXT, "what is learned begins where a chat asks"


# -- a GGUF's own template --------------------------------------------------------------------------------------------

CONTROLS = ["<|im_start|>", "<|im_end|>", "<｜odd▁one｜>"]
CHATML = (
    "{% for message in messages %}\n{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'"
    " + '\\n'}}{% endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
START, END, ODD = 258, 259, 260


def donor(path, template):
    """A GGUF with a BPE of one merge, three control tokens and a chat template."""
    tokenizer = BPE([*SYMBOLS, "as", END_OF_TEXT, *CONTROLS], [("a", "s")], 257)
    tokenizer.controls, tokenizer.chat_template = frozenset([START, END, ODD]), template
    model = Llama(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=32, context=8, vocab=264)
    write_model(path, model, {t.name: np.zeros(t.shape, np.float32) for t in model.tensors()}, tokenizer)
    return path


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    pytest.importorskip("jinja2")
    return donor(tmp_path_factory.mktemp("donor") / "chat.gguf", CHATML)


def test_control_tokens_and_the_template_are_unchanged_by_an_export(chatml):
    with GGUFFile(chatml) as file:
        tokenizer = read_tokenizer(file)
        assert read_chat_template(file) == CHATML
        assert file.metadata["tokenizer.ggml.token_type"].tolist() == [1] * 257 + [3] * 4 + [5] * 3
    assert tokenizer.controls == {START, END, ODD} and tokenizer.eos == 257
    assert tokenizer.decode([START, 256, END, ODD]) == "as"
    assert START not in tokenizer.encode("<|im_start|>"), "text spells, it does not command"


@pytest.fixture(scope="module")
def template(chatml):
    with GGUFFile(chatml) as file:
        tokenizer = read_tokenizer(file)
    return ChatTemplate(CHATML, tokenizer, chatml), tokenizer


@given(messages=CHATS)
@settings(deadline=None, max_examples=60)
def test_answers_in_a_template_are_learned_up_to_their_end_token(template, messages):
    template, tokenizer = template
    example = tokenize(template.rows(messages).rows[0], tokenizer, False)

    # The same by hand, turn by turn.
    def ids(text):
        return tokenizer.encode(text).tolist()

    expected, learned = [], []
    for role, content, _ in messages:
        header, answer = [START, *ids(role + "\n")], [*ids(content), END]
        if role == "assistant":
            expected += header + answer
            learned += [False] * len(header) + [True] * len(answer)
        else:
            expected += [START, *ids(f"{role}\n{content}"), END]
            learned += [False] * (len(expected) - len(learned))
        expected += ids("\n")
        learned += [False]
    assert example.ids.tolist() == expected[:-1]
    assert example.learned.tolist() == learned[:-1]


def test_conversations_use_the_template_and_export_it(tmp_path, chatml):
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    dataset = open_examples(tmp_path / "x.jsonl", [chat] * 4, tokenizer=str(chatml))
    assert dataset.describe()["chat_template"] == "gguf" and dataset.tokenizer.chat_template == CHATML
    assert dataset.train.ids[dataset.train.learned].tolist() == [*b"ho", END] * 3
    flat = open_examples(tmp_path / "x.jsonl", tokenizer=str(chatml), template="plain")
    assert flat.describe()["chat_template"] == "plain" and flat.tokenizer.chat_template == PLAIN_TEMPLATE
    assert flat.train.ids[flat.train.learned].tolist() == [*b"ho", 257] * 3
    no_chat = open_examples(tmp_path / "y.jsonl", pairs(4), tokenizer=str(chatml))
    assert no_chat.describe()["chat_template"] is None and no_chat.tokenizer.chat_template == CHATML


TALK = [Message("user", "hi"), Message("assistant", "ho"), Message("user", "so"), Message("assistant", "no")]
NOTHING_BUT_THE_LAST = "{{ messages | length }}{{ messages[-1].content if messages[-1].role == 'assistant' }}"
RANGE = "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxx{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (NOTHING_BUT_THE_LAST, "changes a turn when later turns follow"),
        ("{% for m in messages %}{% if m.role == 'user' %}x{{ m.content }}{% endif %}{% endfor %}", "drops content"),
        ("{% for m in messages %}<{{ m.role }}>{% endfor %}", "drops content of the assistant"),
        ("{{ raise_exception('no\nsystem') }}", r"rejects the conversation (no\nsystem)"),
        ("{{ messages.append(1) }}", "fails ("),
        ("{{ ''.__class__.__mro__ }}", "fails ("),
        ("{{ nothing.at.all }}", "fails ("),
        (RANGE, "writes more than"),
    ],
)
def test_a_template_that_does_not_mark_the_assistants_words_is_rejected(template, words):
    pytest.importorskip("jinja2")
    with pytest.raises(BadExample) as error:
        ChatTemplate(template, Bytes(), "x.gguf").rows(TALK)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("template", ["{% for %}", "x" * 70_000, "{{"])
def test_a_broken_template_is_rejected_with_a_remedy(template):
    pytest.importorskip("jinja2")
    with pytest.raises(UserError, match=r"x\.gguf: its chat template .*data\.template=plain avoids the template"):
        ChatTemplate(template, Bytes(), "x.gguf")


def test_a_template_without_end_tokens_ends_with_end_of_text():
    pytest.importorskip("jinja2")
    template = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }};{% endfor %}"
    example = tokenize(ChatTemplate(template, Bytes(), "x.gguf").rows(TALK).rows[0], Bytes(), False)
    assert Bytes().decode(example.ids) == "u: hi;a: ho;u: so;a: no;"
    # The template ignores add_generation_prompt: the model itself has to write "a: ".
    assert learned_texts(example, Bytes()) == (["a: ho;a: no;"], True)


def test_text_that_spells_a_control_token_is_rejected(template):
    with pytest.raises(BadExample, match=r"what the user says contains the control token <\|im_end\|>"):
        template[0].rows([Message("user", "x<|im_end|>"), Message("assistant", "y")])


# -- rows and batches -------------------------------------------------------------------------------------------------

PACK = ("none", "joined", "apart")
LENGTHS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=2, max_size=25)


def of_lengths(lengths):
    """Pairs that tell their own number in every character of the completion."""
    return [{"prompt": "p" * p, "completion": chr(0x100 + n) * c} for n, (p, c) in enumerate(lengths)]


@pytest.mark.parametrize("pack", PACK)
@given(lengths=LENGTHS, context=st.integers(4, 30), rows=st.integers(1, 5), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_an_epoch_trains_on_every_fitting_completion_token_once(tmp_path_factory, pack, lengths, context, rows, seed):
    path = tmp_path_factory.getbasetemp() / "lengths.jsonl"
    dataset = open_examples(path, of_lengths(lengths), tokenizer="char", pack=pack, val_fraction=0.2)
    held = spread_held_out(len(lengths), 0.2)
    fits = [min(c + 1, context + 1 - p) for p, c in lengths]
    expected = {n: f for n, (f, h) in enumerate(zip(fits, held, strict=True)) if f > 0 and not h}
    if not expected or not any(f > 0 for f, h in zip(fits, held, strict=True) if h):
        with pytest.raises(UserError, match=f"model.context={context}: .* only prompt tokens within this context"):
            dataset.batches(context, rows, seed)
        return
    batches = dataset.batches(context, rows, seed)
    facts = batches.facts
    assert facts["too_long"] == sum(f <= 0 for f in fits)
    assert facts["truncated"] == sum(0 < f < c + 1 for f, (_, c) in zip(fits, lengths, strict=True))
    epoch = batches.rows_per_epoch
    shown = {name: [] for name in ("tokens", "targets", "weights")}
    for k in range(-(-epoch // rows)):
        batch = batches.batch(k)
        assert batch.keys() == batches.inputs.keys()
        for array in batch.values():
            assert array.shape == (rows, context) and array.flags.c_contiguous
        for name, arrays in shown.items():
            arrays.append(batch[name])
    tokens, targets, weights = (np.concatenate(shown[n])[:epoch] for n in ("tokens", "targets", "weights"))
    assert (weights.sum(axis=1) > 0).all(), "every row teaches something"
    assert weights.sum() == sum(expected.values()) and set(np.unique(weights)) <= {0.0, 1.0}
    assert np.array_equal(tokens[:, 1:], targets[:, :-1])
    # Completions are identified by their character; the last id is end-of-text.
    texts = [dataset.tokenizer.decode([i]) for i in targets[weights > 0] if i != dataset.tokenizer.eos]
    counts = {n: texts.count(chr(0x100 + n)) for n in expected}
    assert counts == {n: min(f, lengths[n][1]) for n, f in expected.items()}
    assert pack != "none" or epoch == len(expected)


def test_rows_are_padded_with_end_of_text_of_weight_zero(tmp_path):
    dataset = open_examples(tmp_path / "x.jsonl", [{"prompt": "ab", "completion": "cd"}] * 2)
    batch = dataset.batches(7, 1, 0).batch(0)
    assert batch["tokens"].tolist() == [[*b"abcd", EOS, EOS, EOS]]
    assert batch["targets"].tolist() == [[*b"bcd", EOS, EOS, EOS, EOS]]
    assert batch["weights"].tolist() == [[0, 1, 1, 1, 0, 0, 0]]


def test_examples_are_packed_into_rows_and_a_truncated_one_fills_its_own(tmp_path):
    lines = [{"prompt": "a", "completion": "bc"}, {"prompt": "a" * 9, "completion": "b" * 9}] * 3
    batches = open_examples(tmp_path / "x.jsonl", lines, pack="joined", val_fraction=0.1).batches(11, 2, 0)
    rows = {bytes(np.where(ids == EOS, ord("."), ids).tolist()) for k in range(9) for ids in batches.batch(k)["tokens"]}
    assert rows == {b"aaaaaaaaabb", b"abc.abc.abc"}


def test_examples_kept_apart_know_where_they_begin(tmp_path):
    lines = [{"prompt": "ab", "completion": "cde"}] * 20
    batch = open_examples(tmp_path / "x.jsonl", lines, pack="apart", val_fraction=0.1).batches(12, 1, 0).batch(0)
    assert batch["tokens"].tolist() == [[*b"abcde", EOS, *b"abcde", EOS]]
    assert batch["targets"].tolist() == [[*b"bcde", EOS, *b"abcde", EOS, EOS]]
    assert batch["weights"].tolist() == [[0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]]
    assert batch["starts"].tolist() == [[0] * 6 + [6] * 6]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 4, 5] * 2]


@given(k=st.integers(0, 40), rows=st.integers(1, 4), accumulate=st.integers(1, 4), pack=st.sampled_from(PACK))
@settings(deadline=None, max_examples=40)
def test_a_batch_depends_only_on_seed_and_number_and_equals_its_micro_batches(
    tmp_path_factory, k, rows, accumulate, pack
):
    path = tmp_path_factory.getbasetemp() / "pairs.jsonl"
    small, large = (open_examples(path, pairs(30), pack=pack).batches(20, n, 3) for n in (rows, rows * accumulate))
    expected = batch_digest(large.batch(k))
    parts = [small.batch(k * accumulate + i) for i in range(accumulate)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    assert batch_digest(joined) == expected
    large.batch(k + 5)
    assert batch_digest(large.batch(k)) == expected, "whatever was asked before leaves no trace"


def test_held_out_examples_are_spread_evenly_and_never_trained_on(tmp_path):
    assert np.flatnonzero(spread_held_out(20, 0.2)).tolist() == [4, 9, 14, 19]
    assert spread_held_out(3, 0.01).sum() == 1 and spread_held_out(2, 0.99).sum() == 1
    dataset = open_examples(tmp_path / "x.jsonl", of_lengths([(1, 2)] * 20), tokenizer="char", val_fraction=0.2)
    first, second = (dataset.batches(6, 3, seed).held_out() for seed in (0, 1))
    assert [batch_digest(b) for b in first] == [batch_digest(b) for b in second]
    texts = [dataset.tokenizer.decode(t[w > 0]) for b in first for t, w in zip(b["targets"], b["weights"], strict=True)]
    assert texts == [chr(0x100 + n) * 2 for n in (4, 9, 14, 19)] + ["", ""], "the last rows repeat and weigh nothing"
    train = dataset.tokenizer.decode(dataset.train.ids)
    assert not {chr(0x100 + n) for n in (4, 9, 14, 19)} & set(train)
    few = (
        open_examples(tmp_path / "x.jsonl", tokenizer="char", val_fraction=0.2, eval_batches=1)
        .batches(6, 2, 0)
        .held_out()
    )
    assert len(few) == 1


# -- lines ------------------------------------------------------------------------------------------------------------

GOOD = json.dumps(pairs(1)[0]).encode()


def chat_line(*turns):
    return json.dumps({"messages": [dict(zip(("role", "content"), t, strict=True)) for t in turns]}).encode()


BAD = [
    (b"{not json", "is not one JSON object (Expecting property name"),
    (b"[" * 100_000, "is not one JSON object ("),
    (b'{"prompt": "a', "is not one JSON object (Unterminated string"),
    (b'{"text": "\xff"}', "not UTF-8 text (byte 10 is 0xff)"),
    (b"[1]", "is a list; expected an object"),
    (b"3", "is a number; expected"),
    (b"{}", "has the keys none; expected"),
    (b'{"prompt": "a", "reply": "b"}', "has the keys prompt, reply; expected messages, prompt and completion"),
    (b'{"chosen": "a", "rejected": "b"}', "has the keys chosen, rejected; expected"),
    (b'{"prompt": "", "completion": "b"}', "prompt is empty"),
    (b'{"prompt": "a", "completion": ""}', "completion is empty"),
    (b'{"prompt": "a", "completion": 3}', "completion is a number, expected text"),
    (b'{"text": ["a"]}', "text is a list, expected text"),
    (b'{"text": "a", "text": "b"}', "has the key text twice"),
    (b'{"text": "\\ud83d"}', r"text holds half a surrogate pair (\ud83d)"),
    (b'{"messages": []}', "messages is an empty list; expected a list of role and content"),
    (b'{"messages": "hi"}', "messages is a text; expected a list"),
    (b'{"messages": ["hi"]}', "message 1 holds a text; expected role and content"),
    (b'{"messages": [{"role": "user"}]}', "message 1 holds role; expected role and content"),
    (b'{"messages": [{"content": "a"}]}', "message 1 holds content; expected role and content"),
    (b'{"messages": [{"role": "assistant", "tool_calls": ["\\ud83d"]}]}', "message 1 holds half a surrogate pair"),
    (b'{"messages": [{"role": "assistant", "tool_calls": [{}]}]}', "message 1 holds role, tool_calls; the plain"),
    (b'{"messages": [{"role": "assistant", "content": "a"}], "tools": [{}]}', "has tools, which the plain format"),
    (b'{"messages": [{"role": "assistant", "content": "a"}], "tools": "x"}', "tools is a text; expected a list"),
    (b'{"messages": [{"role": "assistant", "content": "a", "name": "b"}]}', "message 1 holds role, content, name;"),
    (chat_line(("asistant", "a")), "message 1 has the role asistant; did you mean assistant?"),
    (chat_line(("user", "a"), ("bot", "b")), "message 2 has the role bot; choose one of: assistant, developer,"),
    (chat_line(("user", "a"), ("system", "b")), "message 2 has the role system; only the first message"),
    (chat_line(("user", "a"), ("assistant", "")), "message 2's content is empty"),
    (chat_line(("user", "a")), "has no assistant message"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "words"), BAD, ids=[w[:30] for _, w in BAD])
def test_an_invalid_line_is_reported_or_counted(tmp_path, line, words):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join([GOOD, b"", line, GOOD, b""]))
    with pytest.raises(UserError) as error:
        open_examples(path)
    message = str(error.value)
    assert message.startswith(f"{path}:3: {words}") and message.endswith(
        "(data.on_error=skip leaves such examples out)"
    )
    assert "\n" not in message and len(message) < len(str(path)) + 250
    facts = open_examples(path, on_error="skip").describe()
    assert (facts["examples"], facts["skipped"]) == (2, 1)
    assert facts["skipped_lines"][0].startswith(f"x.jsonl:3: {words}")


@pytest.mark.parametrize(("line", "words"), [(b"caf\xe9", "not UTF-8 text"), (b"hello", "is not one JSON object")])
def test_the_error_for_another_format_does_not_suggest_skipping_lines(tmp_path, line, words):
    path = tmp_path / "x.jsonl"
    path.write_bytes(line + b"\n" + line)
    with pytest.raises(UserError, match=rf"x\.jsonl:1: {words}") as error:
        open_examples(path)
    assert "on_error" not in str(error.value)
    with pytest.raises(UserError, match=rf"0 examples; .*\(x\.jsonl:1: {words}"):
        open_examples(path, on_error="skip")


def test_the_error_for_a_null_in_the_first_line_suggests_skipping_it(tmp_path):
    with pytest.raises(UserError, match=r"completion \(null\).*\(data\.on_error=skip"):
        open_examples(tmp_path / "x.jsonl", [{"prompt": "a", "completion": None}, {"prompt": "a", "completion": "b"}])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.jsonl", b'[{"text": "a"}]', r"is not a JSON lines file; it is a JSON array: rename it to x\.json"),
        ("x.jsonl", b"[\n", r"is not a JSON lines file; it is a JSON array"),
        ("x.jsonl", b'["a"]\n["b"]', r":1: is a list; expected an object"),
        ("x.gguf", b"GGUF\3\0", "it is a GGUF model, not data; to train it: recipe.base="),
        ("x.jsonl", b"PAR1\x15\0", "is not a JSON lines file; it is Parquet"),
        ("x.jsonl", b"\x1f\x8b\x08", "is not a JSON lines file; it is compressed: gunzip it first"),
        ("x.jsonl.bz2", b"BZh9", "it is compressed: bunzip2 it first"),
        ("x.xlsx", b"PK\3\4", "it is a zip archive: unzip it first, or save a spreadsheet as CSV"),
        ("x.parquet.gz", gzip.compress(b"PAR1"), "decompress it first"),
        ("x.jsonl", b"version https://git-lfs.github.com/spec/v1", "it is a Git LFS pointer: git lfs pull"),
        ("x.jsonl.gz", b'{"text": "a"}', "cannot be read: Not a gzipped file$"),
        ("x.csv", "prompt,completion\na,b".encode("utf-16"), "it is UTF-16: save it as UTF-8"),
        ("x.csv", b"PAR1\x15\0", "is not a table of text; it is Parquet"),
        ("x.csv", b"prompt,prompt,completion\na,b,c", "has the column prompt twice"),
        ("x.json", b'[\n {"text": "a"},\n {"text": "b"', "is not valid JSON"),
        ("x.parquet", b"PAR1\x15\0", "cannot be read as Parquet"),
        ("x.arrow", b"ARROW1\0\0", "cannot be read as Arrow"),
        ("x.jsonl.gz", b"\x1f\x8b\x08", "cannot be read"),
        ("x.jsonl.xz", b"\xfd7zXZ\0", "cannot be read"),
        ("x.jsonl.zst", b"{}\n", "cannot be read"),
        ("x.csv", b"prompt;completion\na;b", "columns are separated by ';'; use ',' in .csv"),
        ("x.csv.gz", gzip.compress(b"prompt\tcompletion\na\tb"), r"separated by '\\t'; use .* tabs in \.tsv"),
        ("x.csv", b"prompt,completion\na", ":2: has fewer fields than the 2 columns"),
        ("x.csv", b"prompt,completion\na,b,c", ":2: has more fields than the 2 columns"),
        (
            "x.csv",
            b'prompt,completion\na,b\na,"b\nc',
            ":3: cannot be read: unexpected end of data; is a quote left open",
        ),
        ("x.csv", b"prompt,completion\na,\xff", "is not UTF-8 text"),
    ],
)
def test_a_file_of_another_format_is_named_as_such(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{re.escape(name)}.*{words}"):
        open_examples(tmp_path / name, on_error="skip")


def test_a_pattern_selects_the_matching_files(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "other.json"):
        (tmp_path / name).write_text("\n".join(json.dumps({"text": name[0] * 3}) for _ in range(2)))
    dataset = open_examples(tmp_path / "*.jsonl", val_fraction=0.25)
    assert dataset.tokenizer.decode(dataset.train.ids[dataset.train.learned]).count("aaa") == 2
    assert dataset.describe()["examples"] == 4
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n{}')
    with pytest.raises(UserError, match=r"b\.jsonl:2: has the keys none"):
        open_examples(tmp_path / "*.jsonl")
    with pytest.raises(UserError, match=r"\*\.txt: matches no file"):
        open_examples(tmp_path / "*.txt")


def test_a_directory_that_vanishes_during_the_search_is_left_out(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    write_lines(tmp_path / "x.jsonl", pairs(3))
    scan = os.scandir

    def scan_or_fail(path):
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_or_fail)
    assert open_examples(tmp_path).describe()["examples"] == 3


def test_files_of_other_programs_are_read(tmp_path):
    path = tmp_path / "x.jsonl"
    line = '{"id": 7, "prompt": "a\u2028b", "completion": "é\\ud83d\\ude42"}'
    path.write_bytes(b"\xef\xbb\xbf" + (line + "\r\n" + line).encode())
    dataset = open_examples(path)
    assert dataset.tokenizer.decode(dataset.train.ids) == "a\u2028bé🙂"


def test_text_that_the_tokenizer_cannot_encode_is_a_bad_line(tmp_path):
    model = Llama(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=32, context=8, vocab=15)
    values = {t.name: np.zeros(t.shape, np.float32) for t in model.tensors()}
    write_model(tmp_path / "char.gguf", model, values, Characters.from_texts(["0123456789+= "]))
    lines = [*pairs(5), {"prompt": "z", "completion": "1"}]
    with pytest.raises(UserError, match=r"x\.jsonl:6: the character 'z' is not in this character tokenizer"):
        open_examples(tmp_path / "x.jsonl", lines, tokenizer=str(tmp_path / "char.gguf"))
    skips = {"tokenizer": str(tmp_path / "char.gguf"), "on_error": "skip", "val_fraction": 0.3}
    facts = open_examples(tmp_path / "x.jsonl", [lines[-1], *lines], **skips).describe()
    assert (facts["examples"], facts["skipped"]) == (5, 2)


@pytest.mark.parametrize(
    ("raw", "words"), [(b"", "0 examples"), (GOOD, "1 example;"), (b"\n \n", "0 examples"), (b"{}\n" * 3, "0 examples")]
)
def test_too_few_examples_are_rejected(tmp_path, raw, words):
    (tmp_path / "x.jsonl").write_bytes(raw)
    with pytest.raises(UserError, match=words):
        open_examples(tmp_path / "x.jsonl", on_error="skip")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": ""}, "data=examples needs a file or directory"),
        ({"path": "nowhere.jsonl"}, "data.path=nowhere.jsonl: not found"),
        ({"train_on": "answer"}, "data.train_on=answer: did you mean answers?"),
        ({"template": "gguf"}, "data.template=gguf: choose one of: auto, plain"),
        ({"on_error": "ignore"}, "data.on_error=ignore: choose one of: refuse, skip"),
        ({"date": "tomorrow"}, "data.date=tomorrow: must be a date such as 2026-11-21"),
        ({"val_fraction": 1.1}, "data.val_fraction=1.1: must be above 0 and at most 1"),
        ({"tokenizer": "words"}, "data.tokenizer=words"),
        ({"val_path": "empty.jsonl"}, "data.val_path=empty.jsonl: has no example to hold out"),
    ],
)
def test_invalid_settings_are_rejected(tmp_path, monkeypatch, changes, words):
    monkeypatch.chdir(tmp_path)
    path = write_lines(tmp_path / "x.jsonl", pairs(3))
    write_lines(Path("empty.jsonl"), [])
    with pytest.raises(UserError, match=re.escape(words)):
        data = ExampleData(**{"path": str(path), **changes})
        data.check()
        data.open(None)


def test_describe_counts_read_and_trained_tokens(tmp_path):
    lines = [{"prompt": "ab", "completion": "cd"}] * 9 + [{"text": "xyz"}]
    facts = open_examples(tmp_path / "x.jsonl", lines, val_fraction=0.1).describe()
    assert facts["examples"] == 10 and facts["tokens"] == 9 * 5 + 5
    assert (facts["train_examples"], facts["train_tokens"]) == (9, 27)
    assert (facts["held_out_examples"], facts["held_out_tokens"]) == (1, 4)


# -- pairs of completions ---------------------------------------------------------------------------------------------


def open_pairs(path, lines, context=64, **changes):
    """Return a data set of pairs, and a batch with all its held-out pairs: as many as there are lines."""
    data = Preference(path=str(write_lines(path, lines)), val_fraction=1.0, **{"tokenizer": "byte", **changes})
    data.check()
    dataset = data.open(None)
    dataset.train = dataset.held_out  # only the held-out batch is used
    return dataset, dataset.batches(context, 2 * len(lines), 0)


def completions(dataset, batch):
    """Return the text before the learned tokens, and the learned text, of each row."""
    rows = zip(batch["tokens"], batch["targets"], batch["mask"].astype(bool), strict=True)
    decode = dataset.tokenizer.decode
    return [(decode([tokens[0], *targets[: mask.argmax()]]), decode(targets[mask])) for tokens, targets, mask in rows]


USER, SYSTEM = {"role": "user", "content": "2 + 2 ="}, {"role": "system", "content": "Add."}
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("4", "5"))
TEXTS = [("2 + 2 =", " 4"), ("2 + 2 =", " 5")]
TALKS = [("user:\n2 + 2 =\nassistant:\n", text) for text in ("4", "5")]
AGAIN = [("user:\n2 + 2 =\nassistant:\n4\nuser:\n2 + 2 =\nassistant:\n", text) for text in ("4", "5")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}, TEXTS),
        ({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5", "score_chosen": 7.5, "id": "a"}, TEXTS),
        ({"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"}, TEXTS),
        ({"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]}, TALKS),
        ({"chosen": [USER, FOUR], "rejected": [USER, FIVE]}, TALKS),
        ({"prompt": "2 + 2 =", "chosen": [USER, FOUR], "rejected": [USER, FIVE]}, TALKS),
        ({"prompt": "2 + 2 =", "chosen": [FOUR], "rejected": [FIVE]}, TALKS),
        ({"prompt": [USER, FOUR, USER], "chosen": [FOUR], "rejected": [FIVE]}, AGAIN),
    ],
)
def test_pairs_in_each_of_trls_forms_learn_only_the_last_answer(tmp_path, line, expected):
    dataset, batches = open_pairs(tmp_path / "x.jsonl", [line, line])
    assert completions(dataset, batches.held_out()[0]) == expected * 2
    others = "; not read: score_chosen, id" if "id" in line else ""
    read = [f"read as {', '.join(key for key in line if key not in ('id', 'score_chosen'))}{others}"]
    assert batches.omissions == [] and dataset.remarks() == (read if others or "prompt" not in line else [])


def test_pairs_of_conversations_use_the_template_of_the_tokenizer(tmp_path, chatml):
    pair = {"prompt": [SYSTEM, USER], "chosen": [FOUR], "rejected": [FIVE]}
    dataset, batches = open_pairs(tmp_path / "x.jsonl", [pair] * 3, tokenizer=str(chatml), context=96)
    batch = batches.held_out()[0]
    assert batch["targets"][0][batch["mask"][0] == 1].tolist() == [*b"4", END]
    assert dataset.describe()["chat_template"] == "gguf" and dataset.chat_template == CHATML


def test_equal_and_cut_pairs_are_counted_in_the_notes_of_a_run(tmp_path):
    lines = [
        {"prompt": "a", "chosen": "b" * size, "rejected": other} for size, other in ((1, "b"), (9, "c"), (30, "c"))
    ]
    lines.append({"prompt": "a" * 30, "chosen": "b", "rejected": "c"})
    dataset, _ = open_pairs(tmp_path / "x.jsonl", lines, context=16)
    assert dataset.remarks() == ["1 of 4 pairs teach nothing: their completions are equal"]
    assert [text.split(":")[0] for text in dataset.batches(16, 8, 0).omissions] == [
        "2 of 8 pairs cut to the context (model.context=16)", "2 of 8 pairs left out"
    ]  # fmt: skip
    dataset, _ = open_pairs(tmp_path / "y.jsonl", [{**lines[3], "chosen": letter} for letter in "bdef"], context=64)
    with pytest.raises(UserError, match="chosen and rejected are equal in all 2 pairs; nothing can be learned"):
        open_pairs(tmp_path / "z.jsonl", [lines[0]] * 2)
    with pytest.raises(
        UserError, match=r"pairs \(\d+\) have only prompt tokens within this context; type model.context="
    ) as error:
        dataset.batches(16, 8, 0)
    least = int(re.findall(r"=(\d+) or more", str(error.value))[0])
    dataset.batches(least, 8, 0)
    with pytest.raises(UserError):
        dataset.batches(least - 1, 8, 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "has the keys prompt, chosen; expected chosen and rejected, and a prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": [FIVE]}, "chosen is a text and rejected is a list"),
        ({"prompt": "a", "chosen": "", "rejected": "c"}, "chosen is empty"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [FIVE]}, "has no assistant message"),
    ],
)
def test_a_bad_pair_is_rejected_with_the_reason(line, message):
    with pytest.raises(BadExample, match=re.escape(message)):
        convert_pair(json.dumps(line).encode(), {})
