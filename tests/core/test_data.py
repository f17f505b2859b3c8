import gzip
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toyexp import TokenDataset, UserError
from toyexp.base import files as finding
from toyexp.base.files import read_text
from toyexp.base.random import stream
from toyexp.cli.main import main
from toyexp.config.request import Request
from toyexp.interfaces.dataset import batch_digest
from toyexp.plugins.discovery import load
from toyexp.tokenizers.byte_level import BPE, Bytes, Characters
from toyexp.tokenizers.tokenizer import encode_documents
from toyexp.training.experiment import prepare
from toyexp_data import cache as caching
from toyexp_data import corpus as reading
from toyexp_data.cache import load_or_pack, recall, remember
from toyexp_data.examples import ExampleData
from toyexp_data.files import FoundFiles
from toyexp_data.images import Images
from toyexp_data.text import Stdlib, Text
from toyexp_data.tokens import Tokens, read_tokens

DONOR = Path(__file__).parents[2] / "plugins" / "toyexp_recipes" / "assets"
SIZES = st.integers(2, 400), st.integers(1, 40), st.integers(1, 9)


def corpus(train, held_out=100, eval_batches=4):
    """Ids that tell their own position, so that a window can be recognised."""
    ids = np.arange(train + held_out, dtype=np.int32)
    return TokenDataset(ids[:train], ids[train:], None, train + held_out, eval_batches, {})


def take_rows(batches, count):
    """Return the first `count` rows of a stream of batches."""
    rows = np.concatenate([batches.batch(k)["tokens"] for k in range(-(-count // batches.batch(0)["tokens"].shape[0]))])
    return rows[:count]


# -- batches ----------------------------------------------------------------------------------------------------------


@given(*SIZES, st.integers(0, 2**40), st.integers(0, 50))
@settings(deadline=None, max_examples=60)
def test_a_batch_depends_only_on_seed_and_number(train, context, rows, seed, k):
    train = max(train, context + 1)
    fresh = corpus(train).batches(context, rows, seed).batch(k)
    used = corpus(train).batches(context, rows, seed)
    for other in (k + 7, 0, k // 2):  # earlier calls have no effect
        used.batch(other)
    assert batch_digest(used.batch(k)) == batch_digest(fresh)


def test_data_and_model_seeds_are_independent():
    registry = load(["toyexp.testing.null"])
    small = ["engine=noop", "data=random", "model.d_model=16", "model.n_layers=1", "model.d_ff=16"]

    def batch_digests(*words):
        """Return the digests of the first batch and of the initial values."""
        run = prepare(Request([], registry, ["toyexp.testing.null"]).build_config(*small, *words))
        return batch_digest(run.batches.batch(0)), run.plan.initial_values(run.plan.tensors[0]).tobytes()

    (order, values), (other_order, other_values) = batch_digests("seed=1"), batch_digests("seed=2")
    assert order != other_order and values != other_values
    assert batch_digests("seed=1", "data_seed=2") == (other_order, values)
    assert batch_digests("seed=1", "model_seed=2") == (order, other_values)
    assert batch_digests("seed=3", "data_seed=1", "model_seed=2") == (order, other_values)
    with pytest.raises(UserError, match=r"unknown key data\.seed; did you mean data_seed\?"):
        batch_digests("data.seed=2")
    with pytest.raises(UserError, match="model_seed=-1: must be a whole number from 0"):
        batch_digests("model_seed=-1")


def test_another_seed_gives_another_order():
    digests = {batch_digest(corpus(1000).batches(8, 4, seed).batch(0)) for seed in range(20)}
    assert len(digests) == 20


def test_the_order_is_the_same_in_every_process_and_on_every_machine():
    batch = corpus(1000).batches(8, 4, seed=3).batch(5)
    # Numbers written down once: Philox and SHA-256 are fixed by their definitions.
    assert batch["tokens"][:, 0].tolist() == [782, 254, 726, 894]
    assert [hex(int(w)) for w in stream(0, "data-order", 0).random_raw(2)] == [
        "0xf7af5dbcac458863",
        "0x94f110b670a78fd3",
    ]


@given(*SIZES, st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_the_target_of_every_token_is_the_token_after_it(train, context, rows, seed):
    train = max(train, context + 1)
    for k in range(3):
        batch = corpus(train).batches(context, rows, seed).batch(k)
        assert batch["tokens"].shape == batch["targets"].shape == batch["weights"].shape == (rows, context)
        # Ids are positions, so "the next token" is one more; a window that wrapped around would break this.
        assert np.array_equal(batch["targets"], batch["tokens"] + 1)
        assert np.array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
        assert batch["tokens"].min() >= 0 and batch["targets"].max() < train
        assert (batch["weights"] == 1).all()
        assert [batch[n].dtype for n in ("tokens", "targets", "weights")] == [np.int32, np.int32, np.float32]
        assert all(array.flags.c_contiguous for array in batch.values())


@given(st.integers(2, 400), st.integers(1, 30), st.integers(1, 9), st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_an_epoch_visits_every_window_once(train, context, rows, seed):
    train = max(train, context + 1)
    batches = corpus(train).batches(context, rows, seed)
    windows = max((train - 1) // context - 1, 1)
    starts = take_rows(batches, 3 * windows)[:, 0]
    for epoch in range(3):
        seen = sorted(starts[epoch * windows : (epoch + 1) * windows])
        assert all(b - a == context for a, b in itertools.pairwise(seen)), "side by side, none twice, none left out"
        # What lies before the first and after the last is left to other epochs: less than two windows.
        assert seen[0] + train - (seen[-1] + context + 1) < 2 * context


def test_every_token_is_eventually_used():
    batches = corpus(100).batches(7, 4, seed=0)
    seen = {int(t) for k in range(400) for t in batches.batch(k)["targets"].ravel()}
    assert seen == set(range(1, 100))


def test_epochs_differ_in_order_and_in_where_windows_begin():
    batches = corpus(1000).batches(10, 98, seed=0)
    first, second = (batches.batch(k)["tokens"][:, 0] for k in range(2))
    assert len(first) == 98
    assert first.tolist() != second.tolist() and first.min() != second.min()


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 30))
@settings(deadline=None, max_examples=40)
def test_a_large_batch_equals_its_concatenated_micro_batches(rows, accumulate, k):
    small, large = (corpus(300).batches(7, n, seed=1) for n in (rows, rows * accumulate))
    joined = np.concatenate([small.batch(k * accumulate + i)["tokens"] for i in range(accumulate)])
    assert np.array_equal(large.batch(k)["tokens"], joined)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 30))
@settings(deadline=None, max_examples=40)
def test_a_block_equals_its_concatenated_batches(rows, count, k):
    """Also across the end of an epoch."""
    batches = corpus(60).batches(7, rows, seed=1)
    block, singles = batches.block(k, count), [batches.batch(k + i) for i in range(count)]
    for name, values in block.items():
        assert np.array_equal(values, np.concatenate([batch[name] for batch in singles]))


def test_the_smallest_corpus_repeats_one_window():
    batches = corpus(9, held_out=9).batches(8, 5, seed=0)
    assert np.array_equal(batches.batch(123)["tokens"], np.tile(np.arange(8), (5, 1)))


@pytest.mark.parametrize(("train", "held_out", "part"), [(8, 100, "training"), (100, 8, "held-out")])
def test_data_shorter_than_a_window_is_rejected_with_its_part_and_length(train, held_out, part):
    with pytest.raises(UserError) as error:
        corpus(train, held_out).batches(8, 1, 0)
    words = (
        f"model.context=8: the data is too short: a row needs 9 tokens, but the {part} part has 8; use about 120 tokens"
    )
    assert words in str(error.value) and str(error.value).endswith(" or more, or model.context=7 or less")


def test_the_error_for_a_short_text_estimates_the_characters_that_suffice(tmp_path):
    """5 % of 400 characters are 20 tokens; 65 tokens are 5 % of 1300."""
    (tmp_path / "short.txt").write_text("abcd" * 100)
    with pytest.raises(UserError, match="use about 1,300 characters or more"):
        open_text(tmp_path / "short.txt", tokenizer="char", val_fraction=0.05).batches(64, 1, 0)


# -- held-out data ----------------------------------------------------------------------------------------------------


@given(st.integers(2, 500), st.integers(1, 20), st.integers(1, 9), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_held_out_batches_cover_different_windows_and_repeats_have_weight_zero(held_out, context, rows, eval_batches):
    held_out = max(held_out, context + 1)
    batches = corpus(50, held_out, eval_batches).batches(context, rows, 0)
    evaluations = batches.held_out()
    windows = (held_out - 1) // context
    assert len(evaluations) <= eval_batches
    starts = [int(b["tokens"][i, 0]) for b in evaluations for i in range(rows) if b["weights"][i].any()]
    assert len(starts) == len(set(starts)) == min(windows, eval_batches * rows)
    assert min(starts) == 50, "from the beginning of the held-out part"
    for batch in evaluations:
        assert set(np.unique(batch["weights"])) <= {0.0, 1.0}
        assert batch["tokens"].shape == (rows, context), "engines take one shape"
        assert np.array_equal(batch["targets"], batch["tokens"] + 1)
        assert (batch["tokens"] >= 50).all(), "nothing of the training part"


def test_held_out_windows_are_spread_over_the_whole_part():
    held_out = corpus(50, held_out=1001, eval_batches=2).batches(10, 2, 0).held_out()
    assert [int(t) - 50 for b in held_out for t in b["tokens"][:, 0]] == [0, 250, 500, 750]


def test_held_out_data_does_not_depend_on_the_seed():
    first, second = (corpus(200, 200).batches(9, 3, seed).held_out() for seed in (0, 1))
    assert [batch_digest(b) for b in first] == [batch_digest(b) for b in second]


def test_the_digest_of_the_data_changes_with_a_token_and_with_the_split():
    def digest(train, held_out):
        arrays = (np.array(ids, np.int32) for ids in (train, held_out))
        return TokenDataset(*arrays, None, 10, 1, {}).describe()["tokens_sha256"]

    assert digest([1, 2], [3]) == digest([1, 2], [3])
    assert digest([1, 2], [3]) != digest([1, 2], [4])


# -- the split --------------------------------------------------------------------------------------------------------


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)


@given(st.lists(TEXTS, max_size=5), st.floats(0.01, 0.99))
@settings(deadline=None, max_examples=60)
def test_each_document_is_cut_once_and_loses_nothing(documents, fraction):
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(n)) for n in range(len(documents))]
        for file, text in zip(files, documents, strict=True):
            file.write_bytes(text.encode())
        corpus = reading.Corpus(FoundFiles(files), None, fraction)
        train, held_out = ([*map("".join, part)] for part in map(corpus.parts, (False, True)))
        assert [a + b for a, b in zip(train, held_out, strict=True)] == documents
        assert all(len(h) == int(len(d) * fraction) for d, h in zip(documents, held_out, strict=True))
        assert corpus.facts.digest == hashlib.sha256("\0".join(documents).encode()).hexdigest()


def test_no_further_file_is_read_once_the_text_is_long_enough(tmp_path):
    files = [tmp_path / "first.txt", tmp_path / "second.txt"]
    files[0].write_text("café", encoding="utf-8")
    files[1].write_bytes(b"\xe9")
    assert reading.Corpus(FoundFiles(files), 4, 0.5).facts.documents == 1
    with pytest.raises(UserError, match=r"second\.txt: not UTF-8"):
        _ = reading.Corpus(FoundFiles(files), 5, 0.5).facts


# -- tokenizers -------------------------------------------------------------------------------------------------------

SENTENCES = ["It's 1999, isn't it?  Café — naïve\n\tdef f(x): return x**2\n", "日本語 🙂 e\u0301 ''' \r\n\x00"] * 3
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


@pytest.fixture(scope="module")
def bpe():
    return BPE.train(SENTENCES, 300)


@given(TEXTS)
def test_bytes_round_trip_any_text(text):
    ids = Bytes().encode(text)
    assert ids.tolist() == list(text.encode()) and ids.dtype == np.int32
    assert Bytes().decode(ids) == text


@given(TEXTS)
def test_bpe_round_trips_any_text(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert ids.dtype == np.int32 and (len(ids) == 0 or ids.max() < bpe.eos)


@given(st.lists(st.sampled_from("abc é日🙂\n"), max_size=60).map("".join))
def test_characters_round_trip_their_training_text(text):
    tokenizer = Characters.from_texts(["abc é日🙂\n"])
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) == len(text)


def test_an_unknown_character_is_named():
    with pytest.raises(UserError, match="the character 'z' is not in this character tokenizer"):
        Characters.from_texts(["abc"]).encode("abz")


def test_bpe_learns_the_same_tokens_from_the_same_text(bpe):
    again = BPE.train(SENTENCES, 300)
    assert again.fingerprint() == bpe.fingerprint()
    assert len(bpe.encode(SENTENCES[0])) < len(SENTENCES[0].encode()), "it merges"
    assert BPE.train(SENTENCES, 299).fingerprint() != bpe.fingerprint()


def test_bpe_rejects_a_vocabulary_too_small_for_the_bytes():
    with pytest.raises(UserError, match=r"data\.bpe_vocab=257"):
        BPE.train(SENTENCES, 257)


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_documents_are_joined_by_end_of_text_and_read_back_without_it(bpe, kind):
    tokenizer = {"byte": Bytes(), "char": Characters.from_texts(SENTENCES), "bpe": bpe}[kind]
    ids = np.concatenate(
        [*encode_documents(tokenizer, [[SENTENCES[0]], [""], [], [SENTENCES[1][:7], SENTENCES[1][7:]]])]
    )
    assert np.flatnonzero(ids == tokenizer.eos).tolist() == [len(tokenizer.encode(SENTENCES[0])), len(ids) - 1]
    assert tokenizer.decode(ids) == SENTENCES[0] + SENTENCES[1]
    assert ids.dtype == np.int32 and ids.max() < tokenizer.vocab


def test_a_broken_character_decodes_to_the_replacement_character():
    assert Bytes().decode([0x61, 0xE6, 0x97]) == "a\ufffd"


# -- text files -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def open_text(path, **changes):
    data = Text(**{"path": str(path), "tokenizer": "byte", "val_fraction": 0.25, **changes})
    data.check()
    return data.open(None)


def test_a_folder_is_read_in_path_order_with_the_chosen_suffixes(tmp_path):
    for name, text in {"b.txt": "bbbb", "a/z.txt": "zzzz", "c.md": "cccc", "d.bin": "dddd"}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    dataset = open_text(tmp_path / "in")
    assert dataset.tokenizer.decode(dataset.train) == "zzzbbbccc"
    assert dataset.tokenizer.decode(dataset.held_out) == "zbc"
    assert dataset.describe()["documents"] == 3
    only = open_text(tmp_path / "in", suffixes=".bin")
    assert only.tokenizer.decode(only.train) == "ddd"


def test_max_mb_limits_reading_with_a_note_and_has_no_default_for_own_text(tmp_path):
    (tmp_path / "t.txt").write_text("x" * 3000)
    sizes = ({"max_mb": 0.001}, {"max_mb": 1e-8}, {"max_mb": 0}, {})
    datasets = [open_text(tmp_path / "t.txt", **size) for size in sizes]
    lengths = [len(d.train) + len(d.held_out) for d in datasets]
    assert lengths == [1000 + 2, 1 + 1, 3000 + 2, 3000 + 2], "the least that is asked for is not everything"
    omissions = ["0.001 of 0.003 MB: data.max_mb"], ["0.000001 of 0.003000 MB: data.max_mb"], [], []
    assert [d.omissions() for d in datasets] == list(omissions)


def test_omissions_are_in_the_data_line_the_log_and_run_start(tmp_path, capsys):
    (tmp_path / "t.txt").write_text("a few words " * 10_000)
    small = ["model.d_model=8", "model.n_layers=1", "model.context=8", "steps=1", "checkpoint_every=0", "engine=ggml"]
    words = ["data=text", f"data.path={tmp_path / 't.txt'}", "data.tokenizer=byte", *small, "engine.threads=1"]
    for name, more in {"part": ["data.max_mb=0.05"], "whole": []}.items():
        run = tmp_path / name
        assert main([*words, *more, f"hydra.run.dir={run}", "eval_every=0", "callbacks=[events]"]) == 0
        omission = "0.05 of 0.12 MB: data.max_mb"
        line = (
            f"data    text ({omission}; 47.5k tokens to train on)" if more else "data    text (114k tokens to train on)"
        )
        assert line in capsys.readouterr().out and line in (run / "log.txt").read_text()
        start = json.loads((run / "events.jsonl").read_text().splitlines()[0])
        assert start["data"]["left_out"] == ([omission] if more else [])
    quick = ["data.max_mb=0.05", "data.eval_batches=1", "model.context=8", "engine=ggml", "engine.threads=1"]
    assert main(["eval", str(next(DONOR.glob("*.gguf"))), *words[:2], *quick]) == 0
    assert "t.txt; 0.05 of 0.12 MB: data.max_mb, " in capsys.readouterr().out


def test_reported_megabytes_are_bytes_for_any_script(tmp_path):
    (tmp_path / "t.txt").write_text("я" * 600_000)
    assert open_text(tmp_path / "t.txt", max_mb=0.5).omissions() == ["1.0 of 1.2 MB: data.max_mb"]


def test_the_stdlib_data_reports_how_much_is_read():
    data = Stdlib(tokenizer="byte")
    assert data.max_mb == 4.0
    (omission,) = Stdlib(max_mb=0.5, tokenizer="byte").open(None).omissions()
    assert re.fullmatch(r"0\.5 of \d+\.\d MB: data\.max_mb", omission)


def test_other_files_in_a_directory_are_counted(tmp_path):
    for name in ("a.txt", "b.rst", "c.csv", "sub/d.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("abcd")
    os.mkfifo(tmp_path / "in" / "pipe.txt")
    (tmp_path / "in" / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "in" / "link").symlink_to(tmp_path, target_is_directory=True)
    others, strange = open_text(tmp_path / "in").omissions()
    assert others == "2 of 4 files: data.suffixes"
    assert strange.startswith("3 skipped, such as ")
    everything = open_text(tmp_path / "in", suffixes="*")
    assert everything.describe()["documents"] == 4 and len(everything.omissions()) == 1


def test_files_that_are_not_text_are_rejected_or_skipped_and_counted(tmp_path):
    for name, raw in {"a.txt": b"good text", "b.txt": b"bad \xff", "c.txt": b"more of it"}.items():
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError, match=r"b\.txt: not UTF-8 text \(byte 4 is 0xff\).*data\.on_error=skip"):
        open_text(tmp_path)
    dataset = open_text(tmp_path, on_error="skip", val_fraction=0.5)
    assert dataset.tokenizer.decode(dataset.train) == "good more " and dataset.describe()["documents"] == 2
    good = tmp_path / "good"
    good.mkdir()
    for name in ("a.txt", "c.txt"):
        (good / name).write_bytes((tmp_path / name).read_bytes())
    assert open_text(good).describe()["text_sha256"] == dataset.describe()["text_sha256"], "what it left is no trace"
    (omission,) = dataset.omissions()
    assert omission.startswith("1 skipped (data.on_error), such as ") and "b.txt: not UTF-8 text" in omission


def test_a_directory_that_vanishes_during_the_search_is_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").touch()
    files = finding.iter_files(tmp_path, unreadable := [])
    rest = {"a", "b"} - {next(files).parent.name}
    shutil.rmtree(tmp_path / rest.pop())
    assert [*files] == [] and len(unreadable) == 1 and "No such file or directory" in unreadable[0]


def test_files_are_read_in_the_order_of_their_numbers_and_hidden_ones_are_not(tmp_path):
    for name in ("part10.txt", "part9.txt", ".part1.txt", ".git/config.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name[-6:-4] * 2)
    dataset = open_text(tmp_path, val_fraction=0.1)
    assert dataset.tokenizer.decode(dataset.train) == "t9t91010"


def test_a_readme_is_text_if_there_are_no_records(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "README.md").write_text("about " * 9)
    for path in (folder, folder / "README.md"):
        assert open_text(path).describe()["documents"] == 1
    (folder / "x.jsonl").write_text('{"text": "good"}\n' * 9)
    assert open_text(folder).describe()["documents"] == 9


def test_a_pattern_selects_the_matching_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b1.txt", "b2.rst", "c.txt", "[x].txt"):
        Path(name).write_text(name[:2] * 4)
    dataset = open_text("b*")
    assert dataset.tokenizer.decode(dataset.train) == "b1b1b1b2b2b2"
    assert open_text("[x].txt").describe()["documents"] == 1, "a file of that name comes first"
    with pytest.raises(UserError, match="matches no file"):
        open_text("z*.txt")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"good \xff bad", "byte 5 is 0xff"),
        (b"a" * 2_000_000 + "\u20ac".encode()[:2], "byte 2000000 is 0xe2"),
        ("text".encode("utf-16"), "iconv -f UTF-16"),
        ("naïve".encode("latin-1"), "save it as UTF-8 in a text editor; if it is Latin-1: iconv -f LATIN1"),
        (gzip.compress(b"text"), "gunzip"),
        (b"GGUF\xff", "it is a GGUF model"),
    ],
    ids=["a byte", "cut within a character", "UTF-16", "Latin-1", "gzip", "GGUF"],
)
def test_invalid_utf8_is_rejected_with_the_byte_and_a_remedy(tmp_path, raw, words):
    (tmp_path / "t.txt").write_bytes(raw)
    with pytest.raises(UserError, match=r"t\.txt: not UTF-8 text") as error:
        open_text(tmp_path / "t.txt")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("raw", "offset", "words"),
    [
        ("naïve text".encode("utf-16-le"), 1, "if it is UTF-16: iconv -f UTF-16LE -t UTF-8"),
        ("naïve text".encode("utf-16-be"), 0, "if it is UTF-16: iconv -f UTF-16LE -t UTF-8"),
        (b"\0" * 2000, 0, "if it is UTF-16"),
        (b"fine text \0 and more of it", 10, "tr -d '\\0'"),
        (b"a" * 9_000 + b"\0", 9_000, "tr -d '\\0'"),
    ],
    ids=["UTF-16LE", "UTF-16BE", "all NUL", "one NUL", "the last byte"],
)
def test_a_text_with_a_nul_is_rejected_with_its_offset_or_skipped(tmp_path, monkeypatch, raw, offset, words):
    monkeypatch.setattr(reading, "CHUNK", 4096)
    (tmp_path / "t.txt").write_bytes(raw)
    for read in (open_text, read_text):
        with pytest.raises(UserError, match=rf"t\.txt: not text \(byte {offset} is NUL\)") as error:
            read(tmp_path / "t.txt")
        assert words in str(error.value)
    (tmp_path / "u.txt").write_text("good text")
    dataset = open_text(tmp_path, on_error="skip")
    assert dataset.describe()["documents"] == 1 and f"byte {offset} is NUL" in dataset.omissions()[0]


def test_a_character_across_two_read_blocks_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK", 5)
    text = "aé日🙂\r\nb" * 40
    (tmp_path / "t.txt").write_bytes(text.encode())
    dataset = open_text(tmp_path / "t.txt", tokenizer="char", val_fraction=0.5)
    assert dataset.tokenizer.decode(dataset.train) + dataset.tokenizer.decode(dataset.held_out) == text


def test_empty_text_is_refused(tmp_path):
    (tmp_path / "t.txt").write_text("")
    with pytest.raises(UserError, match="found no text in"):
        open_text(tmp_path / "t.txt")


def test_too_few_records_to_hold_one_out_are_counted(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a" * 900}) + "\n" + json.dumps({"text": "b" * 900}))
    with pytest.raises(UserError, match=r"val_fraction=0\.4: holds out none of the records \(2\).*data\.val_path="):
        open_text(tmp_path / "x.jsonl", val_fraction=0.4)
    assert len(open_text(tmp_path / "x.jsonl", val_fraction=0.5).held_out)


def test_a_character_missing_in_a_files_tokenizer_names_both_files(tmp_path):
    from toyexp.formats.gguf.write import write_model
    from toyexp_models.gpt2 import GPT2

    characters = Characters(sorted("abc"))
    model = GPT2(d_model=16, n_layers=1, n_heads=2, d_ff=32, context=8, vocab=characters.vocab)
    values = {t.name: np.zeros(t.shape, np.float32) for t in model.tensors()}
    write_model(tmp_path / "own.gguf", model, values, characters)
    (tmp_path / "in").mkdir()
    for name, text in {"a.txt": "abcabc", "b.txt": "abcé", "c.txt": "é"}.items():
        (tmp_path / "in" / name).write_text(text)
    for data, file in (
        (Text(path=str(tmp_path / "in"), val_fraction=0.5), r"\S*b\.txt"),
        (Stdlib(max_mb=0.01), r"\S*\.py"),
    ):
        with pytest.raises(UserError, match=rf"data={data.name}: {file} holds the character '.', .* of \S*own\.gguf"):
            data.open(tmp_path / "own.gguf")


def test_the_standard_library_is_the_same_text_every_time():
    data = Stdlib(max_mb=0.05, tokenizer="byte")
    data.check()
    first, second = data.open(None), data.open(None)
    assert first.describe() == second.describe() and first.describe()["documents"] > 1


NO_FILES = {
    "/dev/zero": "is a device",
    "/dev/null": "is a device",
    "pipe": "is a pipe, which can be read only once",
    "socket": "is a socket",
    "nowhere": "not found (looked in",
    "file/below": "not found (looked in",
    "a" * 300: "cannot be read",
}


@pytest.fixture
def no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("file").write_text("text")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        yield


ASKED = {
    "text": lambda path: Text(path=path),
    "examples": lambda path: ExampleData(path=path),
    "tokens": lambda path: Tokens(path=path),
    "tokens' tokenizer": lambda path: Tokens(path="file", tokenizer=path),
    "images": lambda path: Images(path=path),
    "labels": lambda path: Images(path=".", labels=path),
}


@pytest.mark.timeout(10)  # a pipe would be waited for, and a device read, without end
@pytest.mark.parametrize("name", NO_FILES)
@pytest.mark.parametrize("part", ASKED)
def test_special_files_are_rejected_immediately_everywhere(no_files, part, name):
    with pytest.raises(UserError) as error:
        ASKED[part](name).check()
    words = NO_FILES[name].partition(",")[0]  # only the error about a file has a remedy
    assert f"={name}: {words}" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("key", ["data.tokenizer", "recipe=lora recipe.base", "recipe=warm recipe.donor"])
def test_a_gguf_that_is_a_pipe_is_rejected_before_anything_is_written(no_files, key, capfd):
    Path("pipe.gguf").symlink_to("pipe")
    assert main([*f"{key}=pipe.gguf".split(), "engine=cpu", "hydra.run.dir=run"]) == 2
    err = capfd.readouterr().err
    assert "pipe.gguf: is a pipe" in err and err.count("\n") == 1 and not Path("run").exists()


def test_a_configuration_that_is_a_pipe_is_refused(no_files, capfd):
    os.mkfifo("mine.yaml")
    assert main(["--config-path", ".", "--config-name", "mine"]) == 2
    assert "mine.yaml: is a pipe" in capfd.readouterr().err


def test_a_directory_in_place_of_a_file_and_vice_versa(no_files):
    for data, words in (
        (ExampleData(path="."), "data.path=.: contains no file of examples"),
        (Tokens(path="."), "data.path=.: contains no file of token ids (.bin .npy)"),
        (Images(path="file"), "data.path=file: is a file, not a folder"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            data.check()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.timeout(20)
def test_virtual_system_files_are_rejected_without_blocking(tmp_path):
    for name in ("kmsg" if os.access("/proc/kmsg", os.R_OK) else "stat", "cpuinfo", "self/mem"):
        with pytest.raises(UserError, match=rf"/proc/{name}: is a system file in /proc, not a text file"):
            open_text(f"/proc/{name}")
    with pytest.raises(UserError, match="contains no file with the suffix"):
        open_text("/proc/self/net")
    with pytest.raises(UserError, match=r"found no text in .*is a system file"):
        open_text("/proc/sys/kernel", suffixes="*", on_error="skip")


def test_a_long_directory_search_shows_progress(tmp_path, monkeypatch):
    statuses = []
    monkeypatch.setattr(finding, "STATUS_EVERY", 2)
    for module in (finding, reading):
        monkeypatch.setattr(module, "show_status", statuses.append)
    for name in "abc":
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "t.txt").write_text("text")
    open_text(tmp_path / "in")
    assert [line.rpartition("in ")[2] for line in statuses] == ["2 folders", "4 folders", "reading the text"]


@pytest.mark.parametrize("vocab", [257, 1_000_000_000])
def test_an_impossible_vocabulary_size_is_rejected_before_reading(tmp_path, vocab):
    with pytest.raises(UserError, match=rf"data\.bpe_vocab={vocab}: .* (258|1048576)"):
        Text(path=str(tmp_path), tokenizer="bpe", bpe_vocab=vocab).check()


# -- the cache --------------------------------------------------------------------------------------------------------


def split(*parts):
    """Return arguments of `load_or_pack`: parts that come in pieces."""
    return lambda: [np.array_split(np.array(part, np.int32), 3) for part in parts]


def test_tokens_are_cached_and_memory_mapped(cache):
    calls = []

    def make():
        calls.append(1)
        return split(range(5), [7, 70_000])()

    first, again = (load_or_pack("key", 70_001, make) for _ in range(2))
    assert len(calls) == 1
    assert [p.tolist() for p in first.parts] == [p.tolist() for p in again.parts] == [[*range(5)], [7, 70_000]]
    content = np.array([*range(5), 7, 70_000], np.int32).tobytes()
    assert first.sha256 == again.sha256 == hashlib.sha256(content).hexdigest()
    load_or_pack("another key", 70_001, make)
    assert len(calls) == 2
    assert sorted(p.suffix for p in cache.iterdir()) == [".ids", ".ids", ".json", ".json"], "no temporary file stays"


@pytest.mark.parametrize(("vocab", "size"), [(65_536, 2), (65_537, 4)])
def test_ids_take_two_bytes_where_they_fit(cache, vocab, size):
    (ids, none) = load_or_pack("key", vocab, split([vocab - 1, 0], [])).parts
    assert ids.tolist() == [vocab - 1, 0] and ids.itemsize == size and none.tolist() == []
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


def test_mapped_ids_make_the_same_batches_as_ids_in_memory():
    rng = np.random.default_rng(0)
    train, held_out = (rng.integers(0, 300, n, dtype=np.int32) for n in (900, 300))
    mapped = load_or_pack("key", 300, split(train, held_out))
    first, second = (
        TokenDataset(train, held_out, None, 300, 3, {}),
        TokenDataset(*mapped.parts, None, 300, 3, {}, mapped.sha256),
    )
    assert first.describe() == second.describe()
    a, b = (d.batches(16, 4, seed=5) for d in (first, second))
    for k in (0, 40, 1000):
        assert batch_digest(a.batch(k)) == batch_digest(b.batch(k))
        assert type(b.batch(k)["tokens"]) is np.ndarray and b.batch(k)["tokens"].dtype == np.int32
    assert [*map(batch_digest, a.held_out())] == [*map(batch_digest, b.held_out())]


def test_another_tokenizer_or_split_has_its_own_cached_tokens(tmp_path):
    (tmp_path / "t.txt").write_text("abcd" * 100)
    byte, char, quarter = (
        open_text(tmp_path / "t.txt", **c) for c in ({}, {"tokenizer": "char"}, {"val_fraction": 0.5})
    )  # fmt: skip
    assert byte.train.max() == 256 and char.train.max() == 4 and len(quarter.train) < len(byte.train)


def damage_bytes(kind, content):
    """Return the bytes of a cache file with one kind of damage."""
    middle = len(content) // 2
    return {
        "empty": b"",
        "cut in half": content[:middle],
        "cut by a byte": content[:-1],
        "garbage": b"garbage" * 50,
        "a header, then garbage": content[:512] + b"\xff" * 300,
        "flipped contents": content[:600] + bytes(b ^ 0xFF for b in content[600:660]) + content[660:],
        "a flipped bit in the header": content[:20] + bytes([content[20] ^ 1]) + content[21:],
        "zeros, as a crash leaves them": bytes(len(content)),
        "longer": content + b"\0" * 4,
    }[kind]


DAMAGE = [
    "empty", "cut in half", "cut by a byte", "garbage", "a header, then garbage", "flipped contents",
    "a flipped bit in the header", "zeros, as a crash leaves them", "longer",
]  # fmt: skip


@pytest.mark.parametrize("suffix", ["ids", "json"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cache_file_is_made_again(cache, kind, suffix):
    make = split(range(500), range(200))
    load_or_pack("key", 500, make)
    (path,) = cache.glob(f"*.{suffix}")
    content = path.read_bytes()
    path.write_bytes(damage_bytes(kind, content))
    again = load_or_pack("key", 500, make)
    assert [p.tolist() for p in again.parts] == [[*range(500)], [*range(200)]]
    assert path.read_bytes() == content, "and the next run finds a good one"


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_cached_fact_is_ignored(cache, kind):
    remember("text", "key", {"digest": "a" * 600})
    (path,) = cache.iterdir()
    assert recall("text", "key") == {"digest": "a" * 600}
    path.write_bytes(damage_bytes(kind, path.read_bytes()))
    assert recall("text", "key") is None


@pytest.mark.parametrize("how", ["a file stands in its place", "it is a dangling link", "the parent is a file"])
def test_an_unwritable_cache_only_costs_time(tmp_path, monkeypatch, capsys, how):
    directory = tmp_path / "place"
    if how == "it is a dangling link":
        directory.symlink_to(tmp_path / "nowhere" / "deep")
    else:
        directory.write_text("not a folder")
    monkeypatch.setenv("TOYEXP_CACHE", str(directory / "below" if how == "the parent is a file" else directory))
    (tmp_path / "t.txt").write_text("abcd" * 100)
    assert len(open_text(tmp_path / "t.txt").train) == 301
    (note,) = capsys.readouterr().err.splitlines()
    assert "no cache in" in note and str(directory) in note and "set another TOYEXP_CACHE" in note


def test_the_cache_is_not_blamed_for_an_error_of_the_data(cache, capsys):
    def fail():
        raise ValueError("the data cannot be read")

    with pytest.raises(ValueError, match="data cannot be read"):
        load_or_pack("key", 10, fail)
    assert capsys.readouterr().err == ""


def test_a_pipe_at_the_path_of_a_cache_file_is_replaced_without_blocking(cache):
    load_or_pack("key", 10, lambda: [[np.arange(9)]])
    remember("facts", "key", {"a": 1})
    for path in cache.iterdir():
        path.unlink()
        os.mkfifo(path)
    assert recall("facts", "key") is None
    assert load_or_pack("key", 10, lambda: [[np.arange(9)]]).parts[0].tolist() == list(range(9))
    assert [p.is_file() for p in cache.glob("*.ids")] == [True]


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("TOYEXP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert [p.tolist() for p in load_or_pack("key", 9, split([1, 2], [3])).parts] == [[1, 2], [3]]
    remember("text", "key", {})
    assert recall("text", "key") is None


@pytest.mark.parametrize(
    ("toyexp_cache", "user_cache", "expected"),
    [("~/a", "", "{home}/a"), (" ", "~/b", "{home}/b/toyexp"), ("", " ", "{home}/.cache/toyexp"), ("c d", "e", "c d")],
)
def test_a_cache_directory_may_begin_with_a_tilde_and_blanks_count_as_unset(
    monkeypatch, tmp_path, toyexp_cache, user_cache, expected
):
    for name, value in (("HOME", str(tmp_path)), ("TOYEXP_CACHE", toyexp_cache), ("XDG_CACHE_HOME", user_cache)):
        monkeypatch.setenv(name, value)
    assert caching.cache_dir() == Path(expected.format(home=tmp_path))


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("changed")])
def test_an_interrupt_leaves_no_partial_cache_file(cache, error):
    def make():
        yield [np.arange(5)]
        raise error

    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        load_or_pack("key", 9, make)
    assert list(cache.iterdir()) == []


def test_temporary_files_of_a_killed_process_are_removed_after_a_day(cache):
    cache.mkdir()
    old, new = cache / ".tokens-1.ids.7.tmp", cache / ".tokens-2.ids.8.tmp"
    for path, age in ((old, 2 * 24 * 3600), (new, 60)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    load_or_pack("key", 9, split([1], [2]))
    assert not old.exists() and new.exists()


@pytest.mark.parametrize("limit", [1000, 0])
def test_a_full_disk_leaves_no_partial_cache_file(tmp_path, limit):
    # The file-size limit of a child process stands for the full disk: neither the cache nor a temporary file has room.
    program = (
        "import resource, signal, sys, numpy as np\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "from toyexp_data.cache import load_or_pack\n"
        "a, b = load_or_pack('k', 9000, lambda: [[np.arange(9000)], [np.arange(5)]]).parts\n"
        "print(len(a), len(b), int(a[-1]))\n"
    )
    done = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("9000 5 8999\n", 0) and "File too large" in done.stderr
    assert list((tmp_path / "cache").iterdir()) == []


def test_two_processes_making_the_same_tokens_both_succeed(cache):
    inner = []

    def make():  # while the first writes, another process makes the same
        if not inner:
            inner.append(1)
            inner.append(load_or_pack("key", 9, split([1, 2], [3])))
        yield from split([1, 2], [3])()

    outer = load_or_pack("key", 9, make)
    for tokens in (outer, inner[1], load_or_pack("key", 9, make)):
        assert [p.tolist() for p in tokens.parts] == [[1, 2], [3]]


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_the_second_run_does_not_read_the_text_again(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(reading, "SETTLE_TIME", -9.0)
    (tmp_path / "t.txt").write_text("the cat sat on the mat. " * 500)
    settings = {"tokenizer": tokenizer, "bpe_vocab": 270, "max_mb": 0.01}
    first = open_text(tmp_path / "t.txt", **settings)
    with monkeypatch.context() as patch:
        for name in ("chunks", "open_file"):
            patch.setattr(reading, name, None)
        patch.setattr(BPE, "train", None)
        again = open_text(tmp_path / "t.txt", **settings)
    assert again.describe() == first.describe() and again.omissions() == first.omissions() != []
    assert np.array_equal(again.train, first.train) and again.tokenizer.pieces == first.tokenizer.pieces


def test_a_text_that_changed_is_read_again_even_when_its_time_was_set_back(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "SETTLE_TIME", -9.0)
    path = tmp_path / "t.txt"
    path.write_text("abcd" * 100)
    times = path.stat()
    first = open_text(path).describe()["text_sha256"]
    path.write_text("abce" * 100)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert open_text(path).describe()["text_sha256"] != first


def test_a_text_modified_just_now_is_not_taken_from_the_cache(tmp_path):
    (tmp_path / "t.txt").write_text("abcd" * 100)
    open_text(tmp_path / "t.txt")
    assert not [*caching.cache_dir().glob("text-*")], "its times may not tell the next change"


def test_a_text_that_changes_while_it_is_read_is_rejected(tmp_path, monkeypatch):
    path = tmp_path / "t.txt"
    path.write_text("abcd" * 100)
    encode = Bytes.encode_pieces

    def meanwhile(*args):
        path.write_text("more of it " * 100)
        return encode(*args)

    monkeypatch.setattr(Bytes, "encode_pieces", meanwhile)
    with pytest.raises(UserError, match=r"t\.txt: changed while it was read"):
        open_text(path)
    assert not list(tmp_path.glob("cache/*.ids"))


def test_a_bpe_of_a_long_text_learns_from_a_part_with_a_note(tmp_path):
    (tmp_path / "t.txt").write_text("the cat sat on the mat\n" * 12_000)
    settings = {"tokenizer": "bpe", "bpe_vocab": 270, "val_fraction": 0.05}
    assert open_text(tmp_path / "t.txt", **settings).omissions() == []
    (omission,) = open_text(tmp_path / "t.txt", **settings, bpe_mb=0.1).omissions()
    assert omission == "bpe learned from 0.1 of 0.3 MB: data.bpe_mb"


def test_a_bpe_that_learns_fewer_tokens_than_requested_reports_it(tmp_path):
    (tmp_path / "t.txt").write_text("the cat sat on the mat\n" * 40)
    (tmp_path / "t.jsonl").write_text('{"text": "the cat sat on the mat"}\n' * 40)
    for _ in range(2):  # the second run finds the cached result of the first
        (remark,) = open_text(tmp_path / "t.txt", tokenizer="bpe", bpe_vocab=10_000).remarks()
        assert re.fullmatch(r"only 2\d\d of data\.bpe_vocab=10000 tokens learned: the text has no more pairs", remark)
    assert remark in ExampleData(path=str(tmp_path / "t.jsonl"), tokenizer="bpe", bpe_vocab=10_000).open(None).remarks()
    assert open_text(tmp_path / "t.txt", tokenizer="bpe", bpe_vocab=260).remarks() == []


@given(st.integers(1, 60), st.floats(0.1, 1))
@settings(deadline=None, max_examples=40)
def test_the_part_that_bpe_learns_from_is_spread_over_the_text(count, share):
    pieces = [f"{n:04}" for n in range(count)]
    limit = max(int(4 * count * share), 1)
    sample = [int(p) for p in reading.sample_pieces(pieces, 4 * count, limit)]
    assert sample[0] == 0 and abs(4 * len(sample) - limit) <= 4
    assert max(np.diff([*sample, count]), default=0) <= 2 / share + 2


# -- token files ------------------------------------------------------------------------------------------------------


def token_file(tmp_path, raw, **changes):
    path = tmp_path / "ids.bin"
    path.write_bytes(raw)
    data = Tokens(path=str(path), **changes)
    data.check()
    return data.open(None)


IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
INT32, UINT16 = struct.pack("<10i", *IDS), struct.pack("<10H", *IDS)


def toyc(ids, version=1, vocab=0):
    return b"TOYC" + struct.pack("<III", version, vocab, 0) + struct.pack(f"<{len(ids)}i", *ids)


@pytest.mark.parametrize(
    ("raw", "dtype", "vocab"),
    [
        (INT32, "auto", 10),
        (INT32, "int32", 10),
        (UINT16, "uint16", 10),
        (toyc(IDS), "auto", 10),
        (toyc(IDS, vocab=627), "auto", 627),
        (toyc(IDS, vocab=10), "int32", 10),
    ],
    ids=["auto", "int32", "uint16", "TOYC", "TOYC with vocabulary", "TOYC and its type"],
)
def test_every_form_of_token_file_gives_the_same_ids(tmp_path, raw, dtype, vocab):
    dataset = token_file(tmp_path, raw, dtype=dtype, val_fraction=0.2)
    assert [*dataset.train, *dataset.held_out] == IDS
    assert (len(dataset.train), dataset.vocab, dataset.tokenizer) == (8, vocab, None)


@pytest.mark.parametrize(
    ("raw", "dtype", "vocab"),
    [
        (np.random.default_rng(0).integers(0, 250_000, 500, np.int32).tobytes(), "auto", 250_000),
        (struct.pack("<100i", *range(65_500, 65_600)), "auto", 65_600),
        (struct.pack("<200H", *np.arange(200)), "int32", 199 * 65536 + 199),
        (struct.pack("<200H", *np.arange(200)), "uint16", 200),
    ],
    ids=["a large vocabulary", "ids about 65536", "int32, as typed", "uint16, as typed"],
)
def test_int32_ids_are_not_taken_for_uint16(tmp_path, raw, dtype, vocab):
    assert token_file(tmp_path, raw, dtype=dtype, val_fraction=0.2).vocab == pytest.approx(vocab, rel=0.01)


def test_a_given_token_type_is_trusted(tmp_path):
    ids = np.array([0, 3 << 16] * 20, "<i4")  # which look like uint16
    np.save(tmp_path / "ids.npy", ids)
    (tmp_path / "ids.bin").write_bytes(ids.tobytes())
    for name, dtype in (("ids.npy", "auto"), ("ids.bin", "int32")):
        assert read_tokens(tmp_path / name, dtype)[0].tolist() == ids.tolist()
    with pytest.raises(UserError, match=r"set data\.dtype=uint16"):
        read_tokens(tmp_path / "ids.bin", "auto")


def test_archives_and_models_are_no_token_files(tmp_path):
    (tmp_path / "ids.bin").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(UserError, match="it is a GGUF model"):
        read_tokens(tmp_path / "ids.bin", "auto")
    np.savez(tmp_path / "ids.npz", ids=IDS)
    with pytest.raises(UserError, match=r"ids\.npz: is an archive of arrays; token ids must be one array"):
        read_tokens(tmp_path / "ids.npz", "auto")


def test_the_largest_uint16_ids_stay_positive(tmp_path):
    assert token_file(tmp_path, struct.pack("<4H", 65535, 0, 40000, 1), dtype="uint16", val_fraction=0.5).vocab == 65536


@pytest.mark.parametrize(
    ("raw", "dtype", "words"),
    [
        (INT32[:-1], "auto", "39 bytes are not a whole number of 4-byte ids; is the file cut off?"),
        (INT32[:-2], "auto", "38 bytes are not a whole number of 4-byte ids; for uint16 ids:"),
        (UINT16[:-1], "uint16", "19 bytes are not a whole number of 2-byte ids; is the file cut off?"),
        (toyc(IDS)[:-2], "auto", "38 bytes are not a whole number of 4-byte ids; is the file cut off?"),
        (b"", "auto", "holds no token ids"),
        (struct.pack("<3i", 1, -2, 3), "auto", "1 holds the id -2; ids begin at 0; for uint16 ids: data.dtype=uint16"),
        (struct.pack("<3i", 1, 2**24, 3), "auto", "position 1 holds the id 16777216; the limit is 16777216"),
        (struct.pack("<60H", *[7, 49] * 30), "auto", "up to 3211271 if read as int32, to 49 if read as uint16"),
        (struct.pack("<200H", *np.arange(200)), "auto", "set data.dtype=uint16"),
        (toyc(IDS, version=2), "auto", "is a TOYC file of version 2; only version 1 is supported"),
        (toyc(IDS), "uint16", "is a TOYC file, whose ids are int32; remove data.dtype=uint16"),
        (toyc(IDS)[:12], "auto", "a TOYC file has a header of 16 bytes, this one only 12 bytes"),
        (toyc([]), "auto", "holds no token ids"),
        (toyc(IDS, vocab=9), "auto", "its header gives a vocabulary of 9, but position 5 has the id 9"),
    ],
)
def test_files_without_tokens_are_rejected_with_the_cause(tmp_path, raw, dtype, words):
    path = tmp_path / "ids.bin"
    path.write_bytes(raw)
    with pytest.raises(UserError) as error:
        read_tokens(path, dtype)
    assert words in str(error.value) and str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("ids", "dtype", "words"),
    [
        (np.array([1, -1, 3], np.int64), "auto", "position 1 holds the id -1; ids begin at 0"),
        (np.array([1, 2**24], np.int64), "auto", "position 1 holds the id 16777216; the limit is 16777216"),
        (
            np.array([1, 2], np.uint16),
            "uint16",
            "is an .npy file, which has its own dtype; remove data.dtype=uint16",
        ),
        (b"a text", "auto", "is not an .npy file; rename packed ids to ids.bin"),
        (b"", "auto", "is not an .npy file; rename packed ids to ids.bin"),
        (toyc([1, -1, 3]), "auto", "position 1 holds the id -1; ids begin at 0"),
    ],
    ids=["negative", "too large", "its type typed", "a text", "empty", "TOYC"],
)
def test_the_token_type_cannot_be_set_for_files_that_name_it(tmp_path, ids, dtype, words):
    path = tmp_path / ("ids.bin" if isinstance(ids, bytes) and ids[:4] == b"TOYC" else "ids.npy")
    path.write_bytes(ids) if isinstance(ids, bytes) else np.save(path, ids)
    with pytest.raises(UserError) as error:
        read_tokens(path, dtype)
    assert str(error.value) == f"{path}: {words}"


def llm_c(ids, magic=20240520, kind="<u2", count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(ids) if count is None else count
    return header.tobytes() + np.array(ids, kind).tobytes()


def test_files_of_llm_c_are_read_by_their_header(tmp_path):
    assert [*token_file(tmp_path, llm_c(IDS), val_fraction=0.2).train] == IDS[:8]
    wide = [70_000, *IDS]
    assert [*token_file(tmp_path, llm_c(wide, 20240801, "<u4"), val_fraction=0.2).train] == wide[:9]
    with pytest.raises(UserError, match=r"is a file of llm\.c, whose ids are uint16; remove data\.dtype=int32"):
        token_file(tmp_path, llm_c(IDS), dtype="int32")
    with pytest.raises(UserError, match="header gives 11 ids of 2 bytes, but 20 bytes follow; is the file cut off"):
        token_file(tmp_path, llm_c(IDS, count=11))


def test_shards_are_one_sequence_with_a_held_out_part_of_its_own(tmp_path):
    ids = np.arange(1000, dtype=np.uint16)
    for number, part in enumerate(np.split(ids, [10, 400, 401])):
        (tmp_path / f"fineweb_train_{number + 7}.bin").write_bytes(llm_c(part))
    (tmp_path / "fineweb_val_0.bin").write_bytes(llm_c(ids[:50]))
    for path in (tmp_path, tmp_path / "fineweb_*.bin"):
        data = Tokens(path=str(path))
        data.check()
        dataset = data.open(None)
        assert (len(dataset.train), len(dataset.held_out), dataset.vocab) == (1000, 50, 1000)
        batches = dataset.batches(16, 4, 0)
        assert np.array_equal(np.asarray(dataset.train), ids) and batches.rows_per_epoch == 61
        for batch in (batches.batch(3), batches.held_out()[0]):
            assert (np.diff(batch["tokens"]) == 1).all() and (batch["targets"] == batch["tokens"] + 1).all()
    one = token_file(tmp_path, ids.tobytes(), dtype="uint16", val_fraction=0.05)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "train.bin").write_bytes(ids.tobytes())
    (tmp_path / "whole" / "val.bin").write_bytes(ids[:50].tobytes())
    nano = Tokens(path=str(tmp_path / "whole"), dtype="uint16").open(None)
    assert nano.describe()["tokens_sha256"] == dataset.describe()["tokens_sha256"] != one.describe()["tokens_sha256"]
    only = Tokens(
        path=str(tmp_path / "whole" / "train.bin"), val_path=str(tmp_path / "fineweb_val_0.bin"), dtype="uint16"
    )
    with pytest.raises(UserError, match="whose ids are uint16"):
        Tokens(path=str(tmp_path / "fineweb_val_0.bin"), dtype="int32").open(None)
    assert (len(only.open(None).train), len(only.open(None).held_out)) == (1000, 50)


def test_ids_beyond_the_tokenizer_are_rejected(tmp_path):
    from toyexp.formats.gguf.write import write_model
    from toyexp_models.llama import Llama

    model = Llama(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=32, context=8, vocab=257)
    values = {t.name: np.zeros(t.shape, np.float32) for t in model.tensors()}
    write_model(tmp_path / "tokenizer.gguf", model, values, Bytes())
    with pytest.raises(UserError, match=r"its ids go up to 257, but data\.tokenizer=.*tokenizer\.gguf has 257 tokens"):
        token_file(tmp_path, struct.pack("<3i", 1, 257, 3), tokenizer=str(tmp_path / "tokenizer.gguf"))
    good = token_file(tmp_path, struct.pack("<3i", 104, 105, 256), tokenizer=str(tmp_path / "tokenizer.gguf"))
    assert good.vocab == 257 and good.tokenizer.decode(good.train) == "hi"
    assert main(["export", str(tmp_path / "tokenizer.gguf"), "--type", "hf", "--to", str(tmp_path / "hf")]) == 0
    assert token_file(tmp_path, struct.pack("<2i", 104, 105), tokenizer=str(tmp_path / "hf")).vocab == 257
