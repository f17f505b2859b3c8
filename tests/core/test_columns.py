"""Data sets as their publishers give them: which conversation or text each record becomes, in every file format."""

import csv
import gzip
import json
import lzma
import re

import numpy as np
import pytest

from toyexp import RunPreview, UserError
from toyexp.formats import iter_records
from toyexp.formats.records import decode, record_suffix
from toyexp_data.columns import convert, convert_pair
from toyexp_data.examples import ExampleData
from toyexp_data.files import find_records, split_name
from toyexp_data.preference import Preference
from toyexp_data.text import Text
from toyexp_data.tokens import Tokens

pyarrow = pytest.importorskip("pyarrow", reason="Parquet and Arrow: pip install 'toyexp[data]'")

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
ASKS, SAYS = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
MESSAGES = [ASKS, SAYS]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
EXCHANGE = [("user", "q"), ("assistant", "a")]
TOLD = [("system", "s"), *EXCHANGE]

# name: (record, the messages or the prompt and the completion, the columns that are not read)
SETS = {
    "text": ({"text": "t"}, (None, "t"), ()),
    "the pile": ({"text": "t", "meta": {"pile_set_name": "x"}}, (None, "t"), ("meta",)),
    "sentiment": ({"text": "t", "label": 1}, (None, "t"), ("label",)),
    "prompt-completion": ({"prompt": "p", "completion": "c"}, ("p", "c"), ()),
    "conversational prompt-completion": ({"prompt": [ASKS], "completion": [SAYS]}, EXCHANGE, ()),
    "messages": ({"messages": [SYSTEM, *MESSAGES]}, TOLD, ()),
    "tools": ({"messages": [ASKS, CALL], "tools": [TOOL]}, [("user", "q"), ("assistant", None)], ()),
    "tools as text": ({"messages": json.dumps(MESSAGES), "tools": json.dumps([TOOL])}, EXCHANGE, ()),
    "ultrachat": ({"prompt": "q", "prompt_id": "1", "messages": MESSAGES}, EXCHANGE, ("prompt", "prompt_id")),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, SAYS]}, EXCHANGE, ()),
    "alpaca": ({"instruction": "q", "input": "", "output": "a", "text": "x"}, EXCHANGE, ("text",)),
    "alpaca with input": (
        {"instruction": "q", "input": "i", "output": "a", "system": "s"},
        [("system", "s"), ("user", "q\n\ni"), ("assistant", "a")],
        (),
    ),
    "dolly": (
        {"instruction": "q", "context": "i", "response": "a", "category": "x"},
        [("user", "q\n\ni"), ("assistant", "a")],
        ("category",),
    ),
    "sharegpt": ({"id": "1", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
                 EXCHANGE, ("id",)),
    "openhermes": (
        {"conversations": [{"from": "system", "value": "s", "weight": None}, {"from": "human", "value": "q"},
                           {"from": "gpt", "value": "a", "weight": None}], "system_prompt": None, "source": "x"},
        TOLD, ("source",),
    ),
    "conversation": ({"conversation": MESSAGES}, EXCHANGE, ()),
    "gsm8k": ({"question": "q", "answer": "a"}, EXCHANGE, ()),
    "openorca": ({"id": "1", "system_prompt": "s", "question": "q", "response": "a"}, TOLD, ("id",)),
    "metamath": ({"query": "q", "response": "a", "type": "x", "original_question": "o"}, EXCHANGE,
                 ("type", "original_question")),
    "mmlu": ({"question": "q", "subject": "x", "choices": ["u", "v"], "answer": 1}, ("q\nA. u\nB. v\nAnswer:", " B"),
             ("subject",)),
    "arc": ({"id": "1", "question": "q", "choices": {"text": ["u", "v"], "label": ["1", "2"]}, "answerKey": "2"},
            ("q\nA. u\nB. v\nAnswer:", " B"), ("id",)),
    "mmlu as csv": ({"question": "q", "A": "u", "B": "v", "C": "w", "D": "", "answer": "B"},
                    ("q\nA. u\nB. v\nC. w\nAnswer:", " B"), ()),
}  # fmt: skip
RENAMED = {
    "hellaswag": (
        {"ctx": "q", "endings": ["u", "v"], "label": "0"}, {"question": "ctx", "choices": "endings", "answer": "label"},
        ("q\nA. u\nB. v\nAnswer:", " A"),
    ),
    "the stack": ({"content": "t", "lang": "py"}, {"text": "content"}, (None, "t")),
    "raw question": ({"question": "p", "answer": "c"}, {"prompt": "question", "completion": "answer"}, ("p", "c")),
}  # fmt: skip
REFUSED = {
    "squad": ({"context": "i", "question": "q", "answers": {"text": ["a"]}}, "has the keys context, question, answers"),
    "token ids": ({"input_ids": [1], "labels": [1]}, "; for token ids: data=tokens"),
    "pairs": ({"prompt": "p", "chosen": "c", "rejected": "r"}, "; for pairs: data=preference"),
    "pictures": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, SAYS]},
        "the type image; expected",
    ),
    "no answer": ({"prompt": [ASKS], "completion": [ASKS]}, "has no assistant message"),
    "no choice": ({"question": "q", "choices": ["u", "v"], "answer": 2}, "answer is 2; expected a letter"),
    "one choice": ({"question": "q", "choices": ["u"], "answer": 0}, "choices has 1 text; expected a list of 2 to 26"),
    "a truth": ({"question": "q", "choices": ["u", "v"], "answer": True}, "answer is True; expected a letter"),
    "equal choices": ({"question": "q", "choices": ["u", "u"], "answer": 1}, "choices has the right one, u, twice"),
    "null": ({"prompt": None, "completion": "c"}, "has the keys prompt (null), completion; expected"),
    "bytes": ({"prompt": "p", "completion": b"c"}, "completion is bytes, expected text"),
}
PAIRS = {
    "explicit": ({"prompt": "p", "chosen": "c", "rejected": "r"}, ("p", "c"), ("p", "r")),
    "implicit": ({"chosen": "say: yes", "rejected": "say: no"}, ("say:", " yes"), ("say:", " no")),
    "conversational": (
        {"prompt": [ASKS], "chosen": [SAYS], "rejected": [{"role": "assistant", "content": "b"}]},
        EXCHANGE, [("user", "q"), ("assistant", "b")],
    ),
    "ultrafeedback": (
        {"prompt": "q", "chosen": MESSAGES, "rejected": [ASKS, {"role": "assistant", "content": "b"}], "score": 8.0},
        EXCHANGE, [("user", "q"), ("assistant", "b")],
    ),
    "implicit conversational": (
        {"chosen": MESSAGES, "rejected": [ASKS, {"role": "assistant", "content": "b"}]},
        EXCHANGE, [("user", "q"), ("assistant", "b")],
    ),
    "orca pairs": ({"question": "p", "chosen": "c", "rejected": "r"}, ("p", "c"), ("p", "r")),
    "kto, wanted": ({"prompt": "p", "completion": "c", "label": True}, ("p", "c"), None),
    "kto, unwanted": ({"prompt": "p", "completion": "c", "label": False}, None, ("p", "c")),
}  # fmt: skip


def meaning(value):
    """Return the roles and contents of a conversation, or the prompt and the completion."""
    return [(m.role, m.content) for m in value.messages] if value.messages else (value.prompt, value.completion)


@pytest.mark.parametrize("name", SETS)
def test_a_published_record_is_recognised_by_its_columns(name):
    record, expected, others = SETS[name]
    for form in (record, json.dumps(record).encode()):
        value = convert(form, {})
        assert meaning(value) == expected and value.others == others
    assert set(value.columns) | set(value.others) == {key for key, item in record.items() if item is not None}


@pytest.mark.parametrize("name", RENAMED)
def test_columns_of_other_names_are_read_by_the_setting(name):
    record, columns, expected = RENAMED[name]
    assert meaning(convert(record, columns)) == expected
    with pytest.raises(UserError, match=r"has no column nowhere \(data\.columns\.text\); it has"):
        convert(record, {"text": "nowhere"})


@pytest.mark.parametrize("name", REFUSED)
def test_a_record_of_another_kind_is_refused(name):
    record, words = REFUSED[name]
    with pytest.raises(UserError, match=re.escape(words)):
        convert(record, {})


@pytest.mark.parametrize("name", PAIRS)
def test_preferences_are_pairs_or_have_labels(name):
    record, chosen, rejected = PAIRS[name]
    values = convert_pair(record, {})
    assert [meaning(value) for value in values] == [half for half in (chosen, rejected) if half]
    assert values[0].label is record.get("label")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"chosen": "yes", "rejected": "no"}, "have no common beginning"),
        ({"chosen": "yes", "rejected": [SAYS]}, "chosen is a text and rejected is a list"),
        ({"prompt": "p", "completion": "c", "label": "good"}, "label is good; expected true or false"),
        (
            {"prompt": "p", "completion": "c"},
            "prompt, completion; expected chosen and rejected, and",
        ),
    ],
)
def test_a_record_that_is_no_preference_is_refused(record, words):
    with pytest.raises(UserError, match=words):
        convert_pair(record, {})


def test_a_system_message_precedes_only_conversations_without_one():
    assert meaning(convert({"messages": MESSAGES}, {}, "s")) == TOLD
    assert meaning(convert({"messages": [SYSTEM, *MESSAGES]}, {}, "other")) == TOLD
    assert meaning(convert({"prompt": "p", "completion": "c"}, {}, "s")) == ("p", "c")
    value = convert({"prompt": [ASKS, SAYS, ASKS], "completion": [SAYS]}, {}, "s")
    assert value.first == 4, "the answer of the prompt is not learned"


# -- files ------------------------------------------------------------------------------------------------------------

ROWS = [{"prompt": f"p{i}é", "completion": 'c,"\n' * (1 + i % 2)} for i in range(7)]


def write_table(path, rows):
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, rows[0].keys(), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)


def write_arrow(path, rows, new=None):
    new = new or pyarrow.ipc.new_stream
    table = pyarrow.Table.from_pylist(rows)
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_parquet(path, rows):
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)


def write_zst(path, rows):
    with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
        file.write(lines(rows))


def compress_table(path, rows):
    write_table(path.with_suffix(""), rows)
    path.write_bytes(gzip.compress(path.with_suffix("").read_bytes()))
    path.with_suffix("").unlink()


WRITERS = {
    "x.jsonl": lambda path, rows: path.write_bytes(lines(rows)),
    "x.json": lambda path, rows: path.write_text(json.dumps(rows, indent=1)),
    "lines.json": lambda path, rows: path.write_bytes(lines(rows)),
    "x.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "x.json.gz": lambda path, rows: path.write_bytes(gzip.compress(json.dumps(rows).encode())),
    "x.jsonl.xz": lambda path, rows: path.write_bytes(lzma.compress(lines(rows))),
    "x.jsonl.zst": write_zst,
    "x.csv": write_table,
    "x.tsv": write_table,
    "x.tsv.gz": lambda path, rows: compress_table(path, rows),
    "x.parquet": write_parquet,
    "stream.arrow": write_arrow,
    "file.arrow": lambda path, rows: write_arrow(path, rows, pyarrow.ipc.new_file),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_file_format_gives_the_same_records(tmp_path, name):
    WRITERS[name](tmp_path / name, ROWS)
    places, records = zip(*iter_records(tmp_path / name), strict=True)
    assert [meaning(convert(record, {})) for record in records] == [(row["prompt"], row["completion"]) for row in ROWS]
    # a line of a table is that of the record's end; a record has two lines more for each newline in its text
    last = {"json": "[6]", "parquet": "[6]", "arrow": "[6]", "csv": ":18", "tsv": ":18"}
    kind = "jsonl" if name == "lines.json" else name.split(".")[1]
    assert len({*places}) == 7 and places[-1] == f"{tmp_path / name}{last.get(kind, ':7')}"
    data = ExampleData(path=str(tmp_path / name), tokenizer="byte", val_fraction=0.3)
    data.check()
    assert data.open(None).describe()["examples"] == 7 and ExampleData.recognises(tmp_path / name) == 2


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("a.jsonl.gz", ".jsonl"), ("a.tsv.xz", ".tsv"), ("a.b.csv", ".csv"), ("a.parquet", ".parquet"),
     ("a.parquet.gz", ""), ("a.arrow.zst", ""), ("a.gz", ""), ("a.txt", "")],
)  # fmt: skip
def test_only_formats_of_text_are_read_compressed(tmp_path, name, suffix):
    assert record_suffix(tmp_path / name) == suffix


def test_a_renamed_column_takes_precedence_over_one_of_its_new_name():
    record = {"prompt": "x", "question": "q", "text": None, "kind": 1}
    assert decode(record, {"prompt": "question"}) == {"prompt": "q", "kind": 1}


def open_folder(path, **changes):
    data = ExampleData(path=str(path), tokenizer="byte", **changes)
    data.check()
    return data.open(None)


def texts(part):
    return bytes(int(i) for i in part.ids[part.learned] if i < 256).decode()


def test_a_directory_has_its_own_held_out_split(tmp_path):
    for split, text in (("train", "a"), ("valid", "b"), ("test", "c")):
        (tmp_path / f"{split}.jsonl").write_bytes(lines([{"text": text}] * 3))
    (tmp_path / "README.md").write_text("about")
    dataset = open_folder(tmp_path)
    assert (texts(dataset.train), texts(dataset.held_out)) == ("aaa", "bbb")
    assert dataset.omissions() == ["3 examples of other splits than train and the held-out one"]
    assert "held out: the validation split" in dataset.remarks()
    evaluated = open_folder(tmp_path, val_fraction=1.0)
    assert (texts(evaluated.train), texts(evaluated.held_out)) == ("", "bbb")
    (tmp_path / "valid.jsonl").unlink()
    assert texts(open_folder(tmp_path).held_out) == "ccc"
    (tmp_path / "test.jsonl").unlink()
    assert texts(open_folder(tmp_path).held_out) == "a", "without a split of its own, val_fraction holds out"
    same = open_folder(tmp_path / "train.jsonl", val_path=str(tmp_path / "train.jsonl"))
    assert texts(same.train) == texts(same.held_out) == "aaa"


@pytest.mark.parametrize("cls", [ExampleData, Text, Tokens])
def test_val_fraction_has_no_effect_on_data_with_a_held_out_part(tmp_path, cls):
    for split in ("train", "val"):
        (tmp_path / f"{split}.jsonl").write_bytes(lines([{"text": "a"}] * 3))
        np.arange(200, dtype="<i4").tofile(tmp_path / f"{split}.bin")
    for settings, count in (({}, 0), ({"val_fraction": 0.3}, 1)):
        data = cls(path=str(tmp_path), **settings)
        warnings = [*data.warnings(RunPreview({}, data.open(None), None, None))]
        assert len(warnings) == count and all("part, validation" in line for line in warnings)


def test_a_column_names_the_split(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(lines([{"text": "a", "fold": "train"}, {"text": "b", "fold": "dev"}]))
    dataset = open_folder(tmp_path / "x.jsonl", columns={"split": "fold"})
    assert (texts(dataset.train), texts(dataset.held_out)) == ("a", "b")
    (tmp_path / "x.jsonl").write_bytes(lines([{"text": "a", "fold": "dev"}] * 3))
    with pytest.raises(UserError, match="has no example of the training split"):
        open_folder(tmp_path / "x.jsonl", columns={"split": "fold"})
    assert texts(open_folder(tmp_path / "x.jsonl", columns={"split": "fold"}, val_fraction=1.0).held_out) == "aaa"
    (tmp_path / "x.jsonl").write_bytes(lines([{"text": "a", "fold": "first"}] * 2))
    with pytest.raises(UserError, match="fold is first; expected train, validation or test"):
        open_folder(tmp_path / "x.jsonl", columns={"split": "fold"})


def test_directories_of_the_hub_and_of_datasets_are_read(tmp_path):
    hub, saved = tmp_path / "hub", tmp_path / "saved"
    (hub / "data").mkdir(parents=True)
    for part in range(2):
        write_parquet(hub / "data" / f"train-0000{part}-of-00002.parquet", [{"text": "ab"[part]}] * 2)
    write_parquet(hub / "data" / "validation-00000-of-00001.parquet", [{"text": "v"}])
    for split in ("train", "test"):
        (saved / split).mkdir(parents=True)
        write_arrow(saved / split / "data-00000-of-00001.arrow", [{"text": split[0]}] * 2)
        write_arrow(saved / split / "cache-1.arrow", [{"text": "x"}])
        (saved / split / "state.json").write_text("{}")
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert (texts(open_folder(hub).train), texts(open_folder(hub).held_out)) == ("aabb", "v")
    first = open_folder(saved)
    assert (first.describe()["train_examples"], first.describe()["held_out_split"]) == (2, "test")


def test_files_that_cannot_be_read_are_told_for_records_and_token_ids(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "a"}] * 4))
    np.arange(200, dtype="<i4").tofile(tmp_path / "a.bin")
    for suffix in (".jsonl", ".bin"):
        (tmp_path / f"gone{suffix}").symlink_to(tmp_path / "nowhere")
    for dataset in (ExampleData(path=str(tmp_path)).open(None), Tokens(path=str(tmp_path)).open(None)):
        (omission,) = dataset.omissions()
        assert re.match(r"1 skipped, such as .*gone\.\w+: No such file", omission)


def test_shards_are_read_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 9, 1):
        (tmp_path / f"part{number}.jsonl").write_bytes(lines([{"text": "a"}]))
    assert [path.stem for path in find_records(str(tmp_path)).files] == ["part1", "part9", "part10"]
    (tmp_path / "x.csv").write_text("text\na\n")
    with pytest.raises(UserError, match=r"has 1 \.csv and 3 \.jsonl files; choose .*data\.path='.*/\*\.jsonl'"):
        find_records(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="contains no file of examples"):
        find_records(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("name", "split"),
    [("train-00000-of-00002.parquet", "train"), ("val/x.csv", "validation"), ("fineweb_dev_01.jsonl", "validation"),
     ("test1.jsonl", "test"), ("latest.jsonl", None), ("contest/x.jsonl", None), ("test/train.jsonl", "train")],
)  # fmt: skip
def test_names_show_the_split(tmp_path, name, split):
    assert split_name(tmp_path / "data" / name) == split


# -- preferences ------------------------------------------------------------------------------------------------------


def open_pairs(path, rows, **changes):
    path.write_bytes(lines(rows))
    data = Preference(path=str(path), tokenizer="byte", **changes)
    data.check()
    return data.open(None)


def halves(dataset, part):
    """Return the learned text of each row of a part."""
    ends = np.cumsum(part.lengths)
    rows = [slice(end - n, end) for end, n in zip(ends, part.lengths, strict=True)]
    return [bytes(int(i) for i in part.ids[row][part.learned[row]] if i < 256).decode() for row in rows]


def test_conversations_and_texts_are_pairs_of_rows(tmp_path):
    chats = {"chosen": MESSAGES, "rejected": [ASKS, {"role": "assistant", "content": "b"}]}
    dataset = open_pairs(tmp_path / "x.jsonl", [chats] * 4, val_fraction=0.25)
    assert halves(dataset, dataset.train) == ["a", "b"] * 3 and dataset.chat_template
    assert bytes(dataset.train.ids[: dataset.train.first[0]].tolist()).decode() == "user:\nq\nassistant:\n"


def test_completions_with_labels_are_matched_and_the_rarer_label_repeats(tmp_path):
    rows = [{"prompt": "p", "completion": text, "label": text < "e"} for text in "abcdxy"]
    (tmp_path / "y.jsonl").write_bytes(lines([rows[0], rows[-1]]))
    dataset = open_pairs(tmp_path / "x.jsonl", rows, val_path=str(tmp_path / "y.jsonl"))
    assert halves(dataset, dataset.train) == [*"axbycxdy"] and halves(dataset, dataset.held_out) == ["a", "y"]
    with pytest.raises(UserError, match="need both labels; the training part has none with the label false"):
        open_pairs(tmp_path / "x.jsonl", rows[:4], val_path=str(tmp_path / "y.jsonl"))


def test_some_of_each_label_are_held_out_though_labels_alternate(tmp_path):
    rows = [{"prompt": "p", "completion": "ab"[i % 2], "label": i % 2 == 0} for i in range(80)]
    with pytest.raises(UserError, match="no example is left to hold out"):
        open_pairs(tmp_path / "x.jsonl", rows[:2])
    dataset = open_pairs(tmp_path / "x.jsonl", rows)
    assert halves(dataset, dataset.held_out) == ["a", "b"] * 2 and halves(dataset, dataset.train) == ["a", "b"] * 38


# -- text -------------------------------------------------------------------------------------------------------------


def open_text(path, **changes):
    data = Text(path=str(path), tokenizer="byte", **changes)
    data.check()
    return data.open(None)


def documents(ids):
    return "".join("|" if i == 256 else chr(i) for i in ids)


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ("x.tsv", "lines.json")])
def test_records_of_text_are_documents_and_the_last_are_held_out(tmp_path, name):
    WRITERS[name](tmp_path / name, [{"id": str(i), "text": text * 2} for i, text in enumerate("abcd")])
    dataset = open_text(tmp_path / name, val_fraction=0.25)
    assert (documents(dataset.train), documents(dataset.held_out)) == ("aa|bb|cc|", "dd|")
    assert not dataset.omissions() and dataset.describe()["documents"] == 4
    cut = open_text(tmp_path / name, val_fraction=0.5, max_mb=3e-6)
    assert (documents(cut.train), documents(cut.held_out)) == ("aa|", "b|") and "data.max_mb" in cut.omissions()[0]


def test_text_has_its_own_held_out_files(tmp_path):
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.jsonl").write_bytes(lines([{"content": split[0]}]))
    (tmp_path / "README.md").write_text("about")
    dataset = open_text(tmp_path, columns={"text": "content"})
    assert (documents(dataset.train), documents(dataset.held_out)) == ("t|", "v|")
    assert "test.jsonl: is neither of the training" in dataset.omissions()[0]
    raw = open_text(tmp_path, suffixes=".jsonl", val_path=str(tmp_path / "README.md"))
    assert documents(raw.train).startswith('{"content": "t"}') and documents(raw.held_out) == "about|"
    with pytest.raises(UserError, match=r"has the keys content; expected text \(data\.columns={text: NAME}\)"):
        open_text(tmp_path)
    (tmp_path / "code.py").write_text("x = 1")
    assert "about" in documents(open_text(tmp_path).train), "a directory with text is read as text"
