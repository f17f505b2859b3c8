"""Tokenizers in GGUF files: reading, validation, export, and conversion for other libraries.

That their ids are llama.cpp's own is tests/judge/test_tokenizers.py.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from toyexp.formats.gguf.header import GGUFError
from toyexp.formats.gguf.read import GGUFFile
from toyexp.formats.gguf.tokenizer import ENDS, read_tokenizer
from toyexp.formats.gguf.write import write_model
from toyexp.tokenizers.byte_level import BPE, Bytes, Characters
from toyexp.tokenizers.pretokenizers import PRE_TOKENIZERS
from toyexp.tokenizers.sentencepiece import BLANK, SentencePiece
from toyexp.tokenizers.tokenizer import (
    BYTE,
    CONTROL,
    END_OF_TEXT,
    NORMAL,
    SYMBOLS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Tokenizer,
    encode_documents,
)
from toyexp_models.llama import Llama

PROSE = "The café sold 12345 crêpes, didn't it?\n\tfor i in range(10): print(f'{i}')  # 中文 🙂\n" * 3
Keys = dict[str, Any]


def byte_level(**changes: Any) -> Keys:
    """The keys of a byte-level BPE with control tokens in front, as chat models have them."""
    trained = BPE.train([PROSE], 300)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<b>", *trained.pieces[:-1], "<|pad|>", "<|pad2|>"]
    types = [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * (len(tokens) - 6) + [UNUSED] * 2
    keys = {
        "model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": np.array(types, np.int32),
        "merges": [f"{a} {b}" for a, b in trained.merges], "eos_token_id": 2, "bos_token_id": 0,
    }  # fmt: skip
    return {k: v for k, v in (keys | changes).items() if v is not None}


def sentencepiece(**changes: Any) -> Keys:
    """The keys of a small SentencePiece vocabulary with all bytes."""
    words = {(BLANK + PROSE.replace(" ", BLANK))[n : n + k] for n in range(len(PROSE)) for k in (1, 1, 2, 3, 5)}
    normal = sorted(w for w in words if w)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "<b>", *normal]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [USER_DEFINED] + [NORMAL] * len(normal)
    scores = [0.0] * 260 + [-1.5 * n for n in range(len(normal))]
    keys = {
        "model": "llama", "tokens": tokens, "token_type": np.array(types, np.int32),
        "scores": np.array(scores, np.float32), "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return {k: v for k, v in (keys | changes).items() if v is not None}


def write_gguf(path: Path, keys: Keys, **further: Any) -> Path:
    """A GGUF with these `tokenizer.ggml.*` keys and `tokenizer.*` keys, by gguf-py."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {**{f"tokenizer.ggml.{k}": v for k, v in keys.items()}, **further}.items():
        if isinstance(value, np.ndarray):
            kind = gguf.GGUFValueType[value.dtype.name.upper()]
            writer.add_key_value(key, value.tolist(), gguf.GGUFValueType.ARRAY, sub_type=kind)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            writer.add_uint32(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def read(path: Path, keys: Keys, **further: Any) -> Tokenizer:
    with GGUFFile(write_gguf(path / "vocabulary.gguf", keys, **further)) as file:
        return read_tokenizer(file)


def write(path: Path, tokenizer: Tokenizer, rows: int) -> Path:
    model = Llama(d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=8, context=8, vocab=rows)
    write_model(path, model, {t.name: t.init.draw(t.shape, 0, t.name) for t in model.tensors()}, tokenizer)
    return path


def fields(path: Path) -> dict[str, tuple[Any, Any]]:
    """Every `tokenizer.*` key by gguf-py, with its types."""
    reader_fields = gguf.GGUFReader(path).fields
    return {k: (f.types, f.contents()) for k, f in reader_fields.items() if k.startswith("tokenizer.")}


# -- special tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_control_tokens_are_parsed_from_text_only_on_request(tmp_path, make):
    tokenizer = read(tmp_path, make())
    control = tokenizer.pieces[tokenizer.eos]
    plain = tokenizer.encode(f"a{control}b")
    assert tokenizer.eos not in plain.tolist() and tokenizer.decode(plain) == f"a{control}b"
    meant = tokenizer.encode(f"a{control}b", special=True)
    assert meant.tolist().count(tokenizer.eos) == 1
    user = tokenizer.pieces.index("<b>")
    assert tokenizer.encode("x<b>y").tolist().count(user) == 1  # found either way, and shown
    assert tokenizer.token_bytes(user) == b"<b>" and tokenizer.token_bytes(tokenizer.eos) == b""


def test_the_longest_special_token_is_matched_first(tmp_path):
    # llama.cpp looks for one token after the other, longest first: "<<b>>" is "<" and "<b>>", not "<<b" and so on.
    types = np.array([USER_DEFINED] * 3 + [NORMAL] * 256 + [CONTROL], np.int32)
    keys = {"tokens": ["<<b", "<b>>>", "b>", *SYMBOLS, END_OF_TEXT], "merges": ["ÿ ÿ"], "eos_token_id": 259}
    tokenizer = read(tmp_path, byte_level(token_type=types, bos_token_id=None, **keys))
    assert [tokenizer.pieces[i] for i in tokenizer.encode("<<b>>> <<b> <b>")] == [
        "<", "<b>>>", "Ġ", "<<b", ">", "Ġ", "<", "b>",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "keys", "ends"),
    [
        ([], {}, []),
        (["<|im_end|>", "<|endoftext|>"], {}, ["<|im_end|>", "<|endoftext|>"]),
        (["what", "ever"], {"eot_token_id": 256, "eom_token_id": 257}, ["what", "ever"]),
        (["<|fim_pad|>", "<|file_sep|>", "<|fim_prefix|>"], {}, ["<|fim_pad|>", "<|file_sep|>"]),
        (["<|fim_pad|>", "other"], {"fim_pad_token_id": 257}, ["other"]),
        (["<|fim_pad|>", "other"], {"fim_pad_token_id": 999}, ["<|fim_pad|>"]),  # which names none
        (["<|end|>", "<|call|>", "<|return|>"], {}, ["<|call|>", "<|return|>"]),  # as gpt-oss has them
        (["<|end|>", "<|call|>"], {}, ["<|end|>", "<|call|>"]),
        (["</s>", "<|tool_response>"], {}, ["<|tool_response>"]),
    ],
)
def test_end_tokens_are_found_by_key_and_by_name(tmp_path, tokens, keys, ends):
    count = 256 + len(tokens)
    keys = {"tokens": [*SYMBOLS, *tokens, "<end>"], "token_type": None, "eos_token_id": count, **keys}
    tokenizer = read(tmp_path, byte_level(merges=["ÿ ÿ"], **keys))
    assert {tokenizer.pieces[i] for i in tokenizer.end_ids} == {*ends, "<end>"}
    assert all(tokenizer.token_bytes(i) == b"" for i in tokenizer.end_ids if tokenizer.pieces[i] in ENDS)


def phi(path: Path, name: Any = "Phi-3 mini", **further: Any) -> Tokenizer:
    """A tokenizer with phi-3's special tokens in a file that is called so."""
    keys = sentencepiece()
    tokens = [*keys["tokens"], "<|endoftext|>", "<|user|>"]
    types = np.append(keys["token_type"], [CONTROL, CONTROL]).astype(np.int32)
    scores = np.append(keys["scores"], [0, 0]).astype(np.float32)
    keys |= {"tokens": tokens, "token_type": types, "scores": scores}
    return read(path, keys, **{"general.name": name, **further})


def test_special_tokens_of_a_file_called_phi_3_swallow_the_white_space_after_them(tmp_path):
    tokenizer = phi(tmp_path)
    user = tokenizer.pieces.index("<|user|>")
    bare = tokenizer.encode("<|user|>The", special=True).tolist()
    assert bare[0] == user and tokenizer.encode("<|user|> \n\tThe", special=True).tolist() == bare
    assert tokenizer.encode(" \nThe", special=True, after=user).tolist() == bare[1:], "cut apart it is the same"
    for name in ("<s>", "<|endoftext|>"):
        assert len(tokenizer.encode(f"{name}\nThe", special=True)) > len(bare), "these keep it"
    other = phi(tmp_path, name="phi-2")
    assert other.encode("<|user|> The", special=True).tolist() != bare
    assert other.fingerprint() != tokenizer.fingerprint()
    assert phi(tmp_path, name=np.array([3], np.int32)).swallow_after == frozenset(), "no name at all"


@pytest.mark.parametrize(
    ("name", "plain", "of_phi"),
    [
        ("mine", "mine", "mine (tokenizer of phi-3)"),
        ("my Phi3 run", "my phi 3 run", "my Phi3 run"),
        ("phi-3-phi3", "phi 3-phi 3", "phi-3-phi3"),
        ("a modern-bert", "a modern bert", "a modern bert (tokenizer of phi-3)"),
    ],
)
def test_an_exports_pre_tokenizer_makes_llama_cpp_give_the_trained_ids(tmp_path, name, plain, of_phi):
    for tokenizer, expected in ((read(tmp_path, sentencepiece()), plain), (phi(tmp_path), of_phi)):
        model = Llama(d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=8, context=8, vocab=tokenizer.vocab)
        values = {t.name: t.init.draw(t.shape, 0, t.name) for t in model.tensors()}
        write_model(tmp_path / "model.gguf", model, values, tokenizer, general={"name": name})
        with GGUFFile(tmp_path / "model.gguf") as file:
            assert file.metadata["general.name"] == expected
            assert read_tokenizer(file).fingerprint() == tokenizer.fingerprint()


def test_a_token_outside_the_byte_symbols_never_matches_text(tmp_path):
    tokens = [*SYMBOLS, "a☃", "ab", END_OF_TEXT, "☃"]
    tokenizer = read(tmp_path, byte_level(tokens=tokens, token_type=None, merges=["a ☃", "a b"], eos_token_id=258))
    assert tokenizer.encode("a☃ab").tolist() == [ord("a"), *"☃".encode(), 257]
    assert tokenizer.decode([256, 257, 259]) == "a☃ab☃"


# -- the beginning and the end of a text ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "start", "end"),
    [
        (byte_level(), [], []),
        (byte_level(add_bos_token=True), [0], []),
        (byte_level(pre="llama-bpe"), [0], []),
        (byte_level(pre="llama-bpe", add_bos_token=False), [], []),
        (byte_level(pre="tekken", add_eos_token=True), [0], [2]),
        (sentencepiece(), [1], []),
        (sentencepiece(bos_token_id=None, eos_token_id=None), [1], []),
        (sentencepiece(add_bos_token=False), [], []),
    ],
)
def test_prompts_and_documents_start_with_the_files_tokens(tmp_path, keys, start, end):
    tokenizer = read(tmp_path, keys)
    ids = tokenizer.encode("The café").tolist()
    assert tokenizer.prompt("The café").tolist() == [*start, *ids, *end]
    documents = np.concatenate([*encode_documents(tokenizer, [["The ", "café"], [""], ["The café"]])])
    assert documents.tolist() == [*start, *ids, tokenizer.eos] * 2
    assert len(tokenizer.prompt("")) >= 1


def test_sentencepiece_adds_a_space_before_text_and_after_special_tokens(tmp_path):
    tokenizer = read(tmp_path, sentencepiece())
    with_space, rest = tokenizer.encode("The"), tokenizer.encode("The", after=tokenizer.encode("x")[-1])
    assert tokenizer.token_bytes(with_space[0])[:1] == b" " and b"".join(map(tokenizer.token_bytes, rest)) == b"The"
    assert tokenizer.encode("The", after=tokenizer.eos).tolist() == with_space.tolist()
    assert tokenizer.encode("</s>The", special=True).tolist() == [tokenizer.eos, *with_space]
    assert tokenizer.decode(tokenizer.prompt("The café ")) == "The café "
    bare = read(tmp_path, sentencepiece(add_space_prefix=False))
    assert bare.encode(" The").tolist() == with_space.tolist() and bare.decode(with_space) == " The"


def test_sentencepiece_falls_back_to_bytes(tmp_path):
    tokenizer = read(tmp_path, sentencepiece())
    ids = tokenizer.encode("中🙃").tolist()
    assert ids[-4:] == [3 + b for b in "🙃".encode()]
    assert [tokenizer.token_bytes(i) for i in ids[-4:]] == [bytes([b]) for b in "🙃".encode()]
    assert tokenizer.decode(ids) == "中🙃"


def test_merging_takes_linear_time(tmp_path):
    tokenizer = read(tmp_path, sentencepiece(tokens=None) | sentencepiece_of_letters())
    seconds = []
    for count in (10_000, 100_000):  # one word, which is merged as a whole
        start = time.process_time()
        assert tokenizer.decode(tokenizer.encode("ab" * count)) == "ab" * count
        seconds.append(time.process_time() - start)
    assert seconds[1] < 40 * seconds[0]  # a quadratic merge would take a hundred times as long


def sentencepiece_of_letters() -> Keys:
    tokens = ["<unk>", "<s>", "</s>", BLANK, "a", "b", "ab", "ba", "abab"]
    types = np.array([UNKNOWN, CONTROL, CONTROL] + [NORMAL] * 6, np.int32)
    return {"tokens": tokens, "token_type": types, "scores": np.zeros(9, np.float32)}


# -- faults -----------------------------------------------------------------------------------------------------------

TYPES = byte_level()["token_type"]


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        (byte_level(pre="gemma4"), "(gpt2, pre-tokenizer gemma4) is not supported; supported: llama, and gpt2 with "),
        (byte_level(model="t5"), "(t5, pre-tokenizer qwen2) is not supported"),
        (byte_level(tokens=["a", "b", "a"]), "two equal tokens: a"),
        (byte_level(token_type=TYPES[:-1]), f"has {len(TYPES)} tokens, and token_type for {len(TYPES) - 1}"),
        (byte_level(token_type=TYPES.astype(np.uint32)), "token_type is no list of 32-bit integers"),
        (byte_level(token_type="x"), "token_type is no list of 32-bit integers"),
        (byte_level(eos_token_id=len(TYPES)), "an eos_token_id that is no token"),
        (byte_level(bos_token_id=1 << 31), "a bos_token_id that is no token"),
        (byte_level(eot_token_id="x"), "an eot_token_id that is no token: x"),
        (byte_level(add_bos_token=1), "add_bos_token=1: not true or false"),
        (byte_level(bos_token_id=None, add_bos_token=True), "and no bos_token_id"),
        (byte_level(bos_token_id=None, pre="llama3"), "and no bos_token_id"),
        (byte_level(merges=["q qq"]), "its merge q qq uses or makes a text that is not a token"),
        (byte_level(merges=["q z"]), "its merge q z uses or makes a text that is not a token"),
        (byte_level(merges=["qz"]), "a merge that is not a pair"),
        (byte_level(merges=["q "]), "a merge that is not a pair"),
        (byte_level(pre=np.array([1, 2], np.int32)), "(gpt2, pre-tokenizer [1 2]) is not supported"),
        (byte_level(token_type=np.where(TYPES == USER_DEFINED, BYTE, TYPES).astype(np.int32)), "has byte tokens"),
        (sentencepiece(tokens=None), "lacks tokens"),
        (sentencepiece(scores=np.zeros(5, np.float32)), "and scores for 5"),
        (sentencepiece(scores=np.zeros(5, np.float64)), "scores is no list of 32-bit numbers"),
        (sentencepiece_of_letters() | {"model": "llama", "eos_token_id": 9}, "an eos_token_id that is no token: 9"),
        (
            sentencepiece_of_letters() | {"model": "llama", "scores": np.array([0] * 8 + [np.nan], np.float32)},
            "its token abab has no score",
        ),
        (
            sentencepiece_of_letters() | {"model": "llama", "token_type": np.full(9, BYTE, np.int32)},
            "its byte token <unk> is not of the form <0x0A>",
        ),
    ],
)
def test_an_invalid_vocabulary_is_rejected_in_one_line(tmp_path, keys, cause):
    with pytest.raises(GGUFError) as caught:
        read(tmp_path, keys)
    assert cause in str(caught.value) and "\n" not in str(caught.value)


def test_a_text_without_tokens_is_rejected_by_its_character(tmp_path):
    letters = read(tmp_path, sentencepiece_of_letters() | {"model": "llama"})
    with pytest.raises(Exception, match="the character 'é' is not in this tokenizer"):
        letters.encode("abé")
    keys = byte_level(tokens=[*(s for s in SYMBOLS if s != "q"), "<end>"], token_type=None, merges=["ÿ ÿ"])
    with pytest.raises(Exception, match="the character 'q' is not in this tokenizer"):
        read(tmp_path, keys | {"eos_token_id": 255}).encode("a quiz")


# -- out again --------------------------------------------------------------------------------------------------------

FURTHER = {
    "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "tokenizer.chat_template.rag": "other",
    "tokenizer.chat_templates": ["rag"],
    "tokenizer.huggingface.json": '{"a": "ü"}',
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.precompiled_charsmap": np.arange(256).astype(np.uint8),
    "tokenizer.ggml.token_type_count": 1,
    "tokenizer.ggml.suppress_tokens": np.array([1, -2], np.int32),
}


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_every_key_of_a_files_tokenizer_survives_the_export(tmp_path, make):
    keys = make()
    tokenizer = read(tmp_path, keys, **FURTHER)
    before = fields(tmp_path / "vocabulary.gguf")
    path = write(tmp_path / "model.gguf", tokenizer, len(keys["tokens"]))
    assert fields(path) == before
    with GGUFFile(path) as file:
        again = read_tokenizer(file)
    assert again.fingerprint() == tokenizer.fingerprint() and again.end_ids == tokenizer.end_ids
    assert again.encode(PROSE).tolist() == tokenizer.encode(PROSE).tolist()


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_the_vocabulary_is_padded_or_trimmed_to_the_embedding(tmp_path, make):
    keys = make()
    tokenizer = read(tmp_path, keys)
    for rows in (tokenizer.vocab, len(keys["tokens"]) + 5):
        with GGUFFile(write(tmp_path / "model.gguf", tokenizer, rows)) as file:
            vocabulary = {k: file.metadata[f"tokenizer.ggml.{k}"] for k in ("tokens", "token_type")}
            assert [len(v) for v in vocabulary.values()] == [rows, rows] and len(set(vocabulary["tokens"])) == rows
            assert vocabulary["token_type"].dtype == np.int32
            assert vocabulary["token_type"][len(keys["tokens"]) :].tolist() == [UNUSED] * max(
                rows - len(keys["tokens"]), 0
            )
            assert len(file.metadata.get("tokenizer.ggml.scores", vocabulary["tokens"])) == rows
            assert read_tokenizer(file).fingerprint() == tokenizer.fingerprint()


def test_a_template_set_later_is_exported(tmp_path):
    tokenizer = read(tmp_path, byte_level(), **FURTHER)
    tokenizer.chat_template = "new"
    with GGUFFile(write(tmp_path / "model.gguf", tokenizer, len(TYPES))) as file:
        assert file.metadata["tokenizer.chat_template"] == "new"
        assert file.metadata["tokenizer.chat_template.rag"] == "other"


@pytest.mark.parametrize(
    "change",
    [
        {"pre": "llama-bpe"}, {"pre": "smollm"}, {"eos_token_id": 0}, {"add_bos_token": True},
        {"token_type": np.where(TYPES == USER_DEFINED, CONTROL, TYPES).astype(np.int32)},
    ],
)  # fmt: skip
def test_the_fingerprint_covers_what_changes_ids(tmp_path, change):
    assert read(tmp_path, byte_level(**change)).fingerprint() != read(tmp_path, byte_level()).fingerprint()


@pytest.mark.parametrize("change", [{"scores": -sentencepiece()["scores"]}, {"add_space_prefix": False}])
def test_the_fingerprint_of_sentencepiece_covers_what_changes_ids(tmp_path, change):
    assert read(tmp_path, sentencepiece(**change)).fingerprint() != read(tmp_path, sentencepiece()).fingerprint()


def test_fingerprints_of_trained_tokenizers_are_stable():
    assert Bytes().fingerprint() == "ab74e5f0d4205c76"
    assert Characters.from_texts(["héllo"]).fingerprint() == "6c0c268f76e7aa2a"
    assert BPE.train(["hello hello world world"] * 3, 270).fingerprint() == "d1acfd6f9cd05b66"


# -- Hugging Face -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["byte", "char", "bpe", "qwen2", "llama-bpe", "deepseek-llm", "spm"])
def test_the_tokenizers_library_makes_the_same_ids_of_the_export(tmp_path, name):
    from tokenizers import Tokenizer as Library

    trained = {"byte": Bytes, "char": lambda: Characters.from_texts([PROSE]), "bpe": lambda: BPE.train([PROSE], 300)}
    tokenizer = trained[name]() if name in trained else None
    if tokenizer is None:
        tokenizer = read(tmp_path, sentencepiece() if name == "spm" else byte_level(pre=name), **FURTHER)
    text, config = tokenizer.to_huggingface()
    library = Library.from_str(text)
    assert library.encode(PROSE, add_special_tokens=False).ids == tokenizer.encode(PROSE).tolist()
    assert library.encode(PROSE).ids == tokenizer.prompt(PROSE).tolist()
    assert library.decode(library.encode(PROSE).ids) == PROSE
    eos = tokenizer.pieces[tokenizer.eos]
    ended = library.encode(f"The{eos}", add_special_tokens=False).ids
    assert ended == tokenizer.encode(f"The{eos}", special=True).tolist()
    if name != "char":  # whose words are the characters themselves
        assert [library.token_to_id(piece) for piece in tokenizer.pieces] == [*range(tokenizer.vocab)]
    assert json.loads(text)["version"] == "1.0" and config["eos_token"] == eos
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast" and config["add_bos_token"] == tokenizer.add_bos
    assert config.get("chat_template", "") == tokenizer.chat_template
    if name == "qwen2":
        assert config["pad_token"] == config["bos_token"] == "<|endoftext|>"
        tokenizer.source = {**tokenizer.source, "ggml.padding_token_id": -1}  # none: the end fills up
        assert tokenizer.to_huggingface()[1]["pad_token"] == eos != tokenizer.pieces[-1]


def spaced(pieces, scores):
    """A SentencePiece of these tokens, with all bytes."""
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = np.array([2, 3, 3, *[6] * 256, *[1] * len(pieces)], np.int32)
    scores = np.array([0.0] * len(fixed) + list(scores), np.float32)
    return SentencePiece([*fixed, *pieces], scores, types, 2, frozenset({0, 1, 2}))


def test_runs_of_spaces_with_equal_scores_merge_from_the_left_in_the_library_too():
    """Llama's own vocabulary has them: 2 to 16 blanks are tokens, all with the same score."""
    from tokenizers import Tokenizer as Library

    tokenizer = spaced(["x", *(BLANK * n for n in range(1, 17))], [-1, -2, *[-1e9] * 15])
    library = Library.from_str(tokenizer.to_huggingface()[0])
    for count in range(100):
        text = " " * count + "x" + " " * (count % 40)
        assert library.encode(text, add_special_tokens=False).ids == tokenizer.encode(text).tolist(), count
    assert tokenizer.count_reordered() == 0


@pytest.mark.parametrize(
    ("pieces", "scores", "count"),
    [
        (["a", "b", "c", "ab", "bc"], [0, 0, 0, -1, -2], 0),
        (["a", "b", "c", "ab", "bc"], [0, 0, 0, -1, -1], 2),  # in abc the leftmost goes first
        (["a", "b", "c", "d", "ab", "cd"], [0, 0, 0, 0, -1, -1], 0),  # which never meet
        (["a", "ab", "ac"], [0, -1, -2], 2),  # b and c are no tokens, and join here all the same
    ],
)
def test_tokens_that_the_library_may_merge_differently_are_counted(pieces, scores, count):
    assert spaced(pieces, scores).count_reordered() == count


def test_a_token_that_looks_like_a_byte_symbol_is_marked_for_the_converter(tmp_path):
    """DeepSeek's vocabularies have some: llama.cpp's converter decodes a token unless it is normalised."""
    tokenizer = BPE([*(s for s in SYMBOLS if s != "\u00f6"), "\u00f6", "<|endoftext|>"], [], 256)
    tokenizer.user_defined = frozenset({255})
    added = json.loads(tokenizer.to_huggingface()[0])["added_tokens"]
    assert [(t["content"], t["normalized"], t["special"]) for t in added] == [
        ("\u00f6", True, False),
        ("<|endoftext|>", False, True),
    ]


def test_the_table_names_every_pattern_in_a_form_the_library_takes():
    page = (Path(__file__).parents[2] / "docs" / "pages" / "guides" / "data.md").read_text()
    assert f"{len(PRE_TOKENIZERS)} pre-tokenizers" in page
    for name, pre in PRE_TOKENIZERS.items():
        words = [word for word, _ in pre.build().pre_tokenize_str(PROSE)]
        assert bytes(SYMBOLS.index(c) for c in "".join(words)).decode() == PROSE, name
        assert re.fullmatch(r"[a-z0-9._-]+", name)
