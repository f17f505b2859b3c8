import itertools
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toyexp import TokenDataset, UserError
from toyexp.data import batch_digest, split_documents
from toyexp.init import stream
from toyexp.tokenizer import BPE, Bytes, Characters
from toyexp_data.cache import cached_tokens
from toyexp_data.text import Stdlib, Text
from toyexp_data.tokens import Tokens, read_tokens

SIZES = st.integers(2, 400), st.integers(1, 40), st.integers(1, 9)


def corpus(train, held_out=100, eval_batches=4):
    """Ids that tell their own position, so that a window can be recognised."""
    ids = np.arange(train + held_out, dtype=np.int32)
    return TokenDataset(ids[:train], ids[train:], None, train + held_out, eval_batches, {})


def rows_of(batches, count):
    """The first `count` rows of the stream, whatever batches they come in."""
    rows = np.concatenate([batches.batch(k)["tokens"] for k in range(-(-count // batches.batch(0)["tokens"].shape[0]))])
    return rows[:count]


# -- batches ----------------------------------------------------------------------------------------------------------


@given(*SIZES, st.integers(0, 2**40), st.integers(0, 50))
@settings(deadline=None, max_examples=60)
def test_a_batch_depends_on_seed_and_number_alone(train, context, rows, seed, k):
    train = max(train, context + 1)
    fresh = corpus(train).batches(context, rows, seed).batch(k)
    used = corpus(train).batches(context, rows, seed)
    for other in (k + 7, 0, k // 2):  # whatever was asked before leaves no trace
        used.batch(other)
    assert batch_digest(used.batch(k)) == batch_digest(fresh)


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
    starts = rows_of(batches, 3 * windows)[:, 0]
    for epoch in range(3):
        seen = sorted(starts[epoch * windows : (epoch + 1) * windows])
        assert all(b - a == context for a, b in itertools.pairwise(seen)), "side by side, none twice, none left out"
        # What lies before the first and after the last is left to other epochs: less than two windows.
        assert seen[0] + train - (seen[-1] + context + 1) < 2 * context


def test_no_token_is_left_out_for_ever():
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
def test_a_large_batch_is_its_micro_batches_one_after_the_other(rows, accumulate, k):
    small, large = (corpus(300).batches(7, n, seed=1) for n in (rows, rows * accumulate))
    joined = np.concatenate([small.batch(k * accumulate + i)["tokens"] for i in range(accumulate)])
    assert np.array_equal(large.batch(k)["tokens"], joined)


def test_the_smallest_corpus_is_one_window_again_and_again():
    batches = corpus(9, held_out=9).batches(8, 5, seed=0)
    assert np.array_equal(batches.batch(123)["tokens"], np.tile(np.arange(8), (5, 1)))


@pytest.mark.parametrize(("train", "held_out", "part"), [(8, 100, "training"), (100, 8, "held-out")])
def test_data_shorter_than_a_window_is_refused_with_the_part_and_its_length(train, held_out, part):
    with pytest.raises(UserError) as error:
        corpus(train, held_out).batches(8, 1, 0)
    assert f"model.context=8 is longer than the {part} part of the data (8 tokens; a window needs 9)" in str(
        error.value
    )


# -- held-out data ----------------------------------------------------------------------------------------------------


@given(st.integers(2, 500), st.integers(1, 20), st.integers(1, 9), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_held_out_batches_cover_different_windows_and_repeats_weigh_nothing(held_out, context, rows, eval_batches):
    held_out = max(held_out, context + 1)
    batches = corpus(50, held_out, eval_batches).batches(context, rows, 0)
    found = batches.held_out()
    windows = (held_out - 1) // context
    assert len(found) <= eval_batches
    starts = [int(b["tokens"][i, 0]) for b in found for i in range(rows) if b["weights"][i].any()]
    assert len(starts) == len(set(starts)) == min(windows, eval_batches * rows)
    assert min(starts) == 50, "from the beginning of the held-out part"
    for batch in found:
        assert set(np.unique(batch["weights"])) <= {0.0, 1.0}
        assert batch["tokens"].shape == (rows, context), "engines take one shape"
        assert np.array_equal(batch["targets"], batch["tokens"] + 1)
        assert (batch["tokens"] >= 50).all(), "nothing of the training part"


def test_held_out_windows_are_spread_over_the_whole_part():
    found = corpus(50, held_out=1001, eval_batches=2).batches(10, 2, 0).held_out()
    assert [int(t) - 50 for b in found for t in b["tokens"][:, 0]] == [0, 250, 500, 750]


def test_held_out_data_does_not_depend_on_the_seed():
    one, two = (corpus(200, 200).batches(9, 3, seed).held_out() for seed in (0, 1))
    assert [batch_digest(b) for b in one] == [batch_digest(b) for b in two]


def test_the_digest_of_the_data_changes_with_a_token_and_with_the_split():
    def digest(train, held_out):
        arrays = (np.array(ids, np.int32) for ids in (train, held_out))
        return TokenDataset(*arrays, None, 10, 1, {}).describe()["tokens_sha256"]

    assert digest([1, 2], [3]) == digest([1, 2], [3])
    assert digest([1, 2], [3]) != digest([1, 2], [4])


# -- the split --------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(max_size=60), max_size=5), st.floats(0.01, 0.99))
def test_each_document_is_cut_once_and_loses_nothing(documents, fraction):
    train, held_out = split_documents(documents, fraction)
    assert [a + b for a, b in zip(train, held_out, strict=True)] == documents
    assert all(len(h) == int(len(d) * fraction) for d, h in zip(documents, held_out, strict=True))


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
def test_characters_round_trip_the_texts_they_were_made_of(text):
    tokenizer = Characters.of(["abc é日🙂\n"])
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) == len(text)


def test_a_character_the_corpus_did_not_have_is_named():
    with pytest.raises(UserError, match="the character 'z' is not in this character tokenizer"):
        Characters.of(["abc"]).encode("abz")


def test_bpe_learns_the_same_tokens_from_the_same_text(bpe):
    again = BPE.train(SENTENCES, 300)
    assert again.fingerprint() == bpe.fingerprint()
    assert len(bpe.encode(SENTENCES[0])) < len(SENTENCES[0].encode()), "it merges"
    assert BPE.train(SENTENCES, 299).fingerprint() != bpe.fingerprint()


def test_bpe_refuses_a_vocabulary_without_room_for_the_bytes():
    with pytest.raises(UserError, match=r"data\.bpe_vocab=257"):
        BPE.train(SENTENCES, 257)


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_documents_are_joined_by_end_of_text_and_read_back_without_it(bpe, kind):
    tokenizer = {"byte": Bytes(), "char": Characters.of(SENTENCES), "bpe": bpe}[kind]
    ids = tokenizer.encode_documents([SENTENCES[0], "", SENTENCES[1]])
    assert np.flatnonzero(ids == tokenizer.eos).tolist() == [len(tokenizer.encode(SENTENCES[0])), len(ids) - 1]
    assert tokenizer.decode(ids) == SENTENCES[0] + SENTENCES[1]
    assert ids.dtype == np.int32 and ids.max() < tokenizer.vocab
    assert tokenizer.encode_documents([]).shape == (0,)


def test_a_broken_character_decodes_to_the_replacement_character():
    assert Bytes().decode([0x61, 0xE6, 0x97]) == "a\ufffd"


# -- text files -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOYEXP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(path, **changes):
    data = Text(**{"path": str(path), "tokenizer": "byte", "val_fraction": 0.25, **changes})
    data.check()
    return data.open(None)


def test_a_folder_is_read_in_path_order_with_the_chosen_suffixes(tmp_path):
    for name, text in {"b.txt": "bbbb", "a/z.txt": "zzzz", "c.md": "cccc", "d.bin": "dddd"}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    dataset = opened(tmp_path / "in")
    assert dataset.tokenizer.decode(dataset.train) == "zzzbbbccc"
    assert dataset.tokenizer.decode(dataset.held_out) == "zbc"
    assert dataset.describe()["documents"] == 3
    only = opened(tmp_path / "in", suffixes=".bin")
    assert only.tokenizer.decode(only.train) == "ddd"


def test_max_mb_stops_reading_and_zero_reads_everything(tmp_path):
    (tmp_path / "t.txt").write_text("x" * 3000)
    sizes = (0.001, 1e-8, 0)
    lengths = [len(d.train) + len(d.held_out) for d in (opened(tmp_path / "t.txt", max_mb=m) for m in sizes)]
    assert lengths == [1000 + 2, 1 + 1, 3000 + 2], "the least that is asked for is not everything"


def test_text_that_is_not_utf8_is_refused_with_the_byte(tmp_path):
    (tmp_path / "t.txt").write_bytes(b"good \xff bad")
    with pytest.raises(UserError, match=r"t\.txt: not UTF-8 text \(byte 5 is 0xff\)"):
        opened(tmp_path / "t.txt")


def test_empty_text_is_refused(tmp_path):
    (tmp_path / "t.txt").write_text("")
    with pytest.raises(UserError, match="there is no text to learn from"):
        opened(tmp_path / "t.txt")


def test_the_standard_library_is_the_same_text_every_time():
    data = Stdlib(max_mb=0.05, tokenizer="byte")
    data.check()
    one, two = data.open(None), data.open(None)
    assert one.describe() == two.describe() and one.describe()["documents"] > 1


# -- the cache --------------------------------------------------------------------------------------------------------


def test_tokens_are_made_once_and_then_read(cache):
    made = []

    def make():
        made.append(1)
        return [np.arange(5, dtype=np.int32), np.arange(2, dtype=np.int32)]

    first, again = cached_tokens("key", make), cached_tokens("key", make)
    assert len(made) == 1
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(first, again, strict=True))
    cached_tokens("another key", make)
    assert len(made) == 2
    assert sorted(p.suffix for p in cache.iterdir()) == [".npz", ".npz"], "no temporary file stays"


def test_another_tokenizer_or_split_does_not_meet_the_first_ones_tokens(tmp_path):
    (tmp_path / "t.txt").write_text("abcd" * 100)
    byte, char, quarter = (
        opened(tmp_path / "t.txt", **c) for c in ({}, {"tokenizer": "char"}, {"val_fraction": 0.5})
    )  # fmt: skip
    assert byte.train.max() == 256 and char.train.max() == 4 and len(quarter.train) < len(byte.train)


def damaged(kind, whole):
    """The bytes of a cache file that was hurt in one of the ways files are."""
    middle = len(whole) // 2
    return {
        "empty": b"",
        "cut in half": whole[:middle],
        "cut by a byte": whole[:-1],
        "garbage": b"garbage" * 50,
        "zip header, then garbage": whole[:4] + b"\xff" * 300,
        "flipped contents": whole[:200] + bytes(b ^ 0xFF for b in whole[200:260]) + whole[260:],
        "another archive": b"PK\x05\x06" + b"\0" * 18,
        "a pickle": b"\x80\x04K\x01.",
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "empty", "cut in half", "cut by a byte", "garbage", "zip header, then garbage", "flipped contents",
        "another archive", "a pickle",
    ],
)  # fmt: skip
def test_a_damaged_cache_file_is_made_again(cache, kind):
    def make():
        return [np.arange(500, dtype=np.int32), np.arange(200, dtype=np.int32)]

    cached_tokens("key", make)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damaged(kind, whole))
    train, held_out = cached_tokens("key", make)
    assert np.array_equal(train, make()[0]) and np.array_equal(held_out, make()[1])
    assert path.read_bytes() == whole, "and the next run finds a good one"


@pytest.mark.parametrize("how", ["a file stands in its place", "it is a dangling link", "the parent is a file"])
def test_a_cache_that_cannot_be_written_is_only_slower(tmp_path, monkeypatch, how):
    place = tmp_path / "place"
    if how == "it is a dangling link":
        place.symlink_to(tmp_path / "nowhere" / "deep")
    else:
        place.write_text("not a folder")
    monkeypatch.setenv("TOYEXP_CACHE", str(place / "below" if how == "the parent is a file" else place))
    (tmp_path / "t.txt").write_text("abcd" * 100)
    assert len(opened(tmp_path / "t.txt").train) == 301


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("TOYEXP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cached_tokens("key", lambda: [1, 2]) == [1, 2]


def test_an_interrupted_write_leaves_no_half_cache_file(cache, monkeypatch):
    def interrupted(file, **arrays):
        file.write(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached_tokens("key", lambda: [np.arange(5), np.arange(2)])
    assert list(cache.iterdir()) == []


def test_a_full_disk_leaves_no_half_cache_file(tmp_path):
    # The file-size limit of a child process stands for the full disk.
    program = (
        "import resource, signal, sys, numpy as np\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "from toyexp_data.cache import cached_tokens\n"
        "a, b = cached_tokens('k', lambda: [np.arange(9000), np.arange(5)])\n"
        "print(len(a), len(b))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("9000 5\n", "", 0)
    assert list((tmp_path / "cache").iterdir()) == []


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


def test_the_largest_uint16_ids_stay_positive(tmp_path):
    assert token_file(tmp_path, struct.pack("<4H", 65535, 0, 40000, 1), dtype="uint16", val_fraction=0.5).vocab == 65536


@pytest.mark.parametrize(
    ("raw", "dtype", "words"),
    [
        (INT32[:-1], "auto", "39 bytes are no whole number of 4-byte ids"),
        (UINT16[:-1], "uint16", "19 bytes are no whole number of 2-byte ids"),
        (b"", "auto", "0 bytes"),
        (struct.pack("<3i", 1, -2, 3), "auto", "the id at position 1 is negative; is it uint16? data.dtype=uint16"),
        (struct.pack("<3i", 1, 2**24, 3), "auto", "position 1 holds the id 16777216; at most 16777216 make sense"),
        (toyc(IDS, version=2), "auto", "TOYC version 2; version 1 is supported"),
        (toyc(IDS), "uint16", "is a TOYC file, whose ids are int32; leave data.dtype=uint16 out"),
        (toyc(IDS)[:12], "auto", "a TOYC header has 16 bytes, the file 12"),
        (toyc([]), "auto", "0 bytes"),
        (toyc(IDS, vocab=9), "auto", "its header says 9 ids, position 5 holds 9"),
    ],
)
def test_files_that_hold_no_tokens_are_refused_with_the_cause(tmp_path, raw, dtype, words):
    path = tmp_path / "ids.bin"
    path.write_bytes(raw)
    with pytest.raises(UserError) as error:
        read_tokens(path, dtype)
    assert words in str(error.value) and str(error.value).startswith(str(path))


def test_ids_beyond_the_tokenizer_are_refused(tmp_path):
    from toyexp.gguf.write import write_model
    from toyexp_models.llama import Llama

    model = Llama(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=32, context=8, vocab=257)
    values = {t.name: np.zeros(t.shape, np.float32) for t in model.tensors()}
    write_model(tmp_path / "tokenizer.gguf", model, values, Bytes())
    with pytest.raises(UserError, match=r"its ids go up to 257, .*tokenizer\.gguf has 257 tokens"):
        token_file(tmp_path, struct.pack("<3i", 1, 257, 3), tokenizer=str(tmp_path / "tokenizer.gguf"))
    good = token_file(tmp_path, struct.pack("<3i", 104, 105, 256), tokenizer=str(tmp_path / "tokenizer.gguf"))
    assert good.vocab == 257 and good.tokenizer.decode(good.train) == "hi"
