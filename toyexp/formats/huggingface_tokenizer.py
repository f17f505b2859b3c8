"""Convert the tokenizer of a transformers directory to the keys `tokenizer.*` of a GGUF file."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from toyexp.base.errors import UserError, printable
from toyexp.base.files import read_file
from toyexp.base.lazy import tokenizers as hf
from toyexp.formats.gguf.header import ARRAY_LIMIT
from toyexp.formats.gguf.tokenizer import BYTE_TOKEN, NULL_MERGE
from toyexp.formats.safetensors import json_object
from toyexp.formats.sentencepiece_model import read_sentencepiece
from toyexp.tokenizers.byte_level import Characters
from toyexp.tokenizers.pretokenizers import PRE_TOKENIZERS
from toyexp.tokenizers.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

LIMIT = 256 << 20  # bytes of a file
# Pre-tokenizers are recognised by their cuts of this text. llama.cpp cuts capitals outside ASCII in its own way.
PROBE = (
    "Hello World's camelCase HTTPServer don'tx it'S we'LL  12 1234567 3.14e-5\n\n \r\n\tx_y  = [a]+b;// ...!?\n "
    "caf\u00e9 \u65e5\u672c\u306e\u30c6 \ud55c\uad6d \u0939\u093f\u0928\u094d \u0627\u0644 \u0e44\u0e17 \u0661\u0662 "
    "\u0661\u0662\u0663\u0664 \U0001f600 $5 #tag \u2014 a/b\r\nend   "
)


def tokenizer_keys(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys without their prefix `tokenizer.`; `config` is the content of config.json.

    Raise UserError for a tokenizer that llama.cpp does not have.
    """
    contents, settings, generation = (
        json_object(read_file(path, LIMIT), f"{path}:") if (path := folder / name).exists() else {}
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    )
    path = folder / ("tokenizer.json" if (folder / "tokenizer.json").exists() else "tokenizer.model")
    try:
        model = b"" if path.suffix == ".json" else read_file(path, LIMIT)
        keys = _keys(contents, model, settings, generation.get("eos_token_id", config.get("eos_token_id")))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, struct.error) as error:
        raise UserError(f"{path}: {printable(str(error))}") from None
    template, chat = folder / "chat_template.jinja", settings.get("chat_template")
    chat = read_file(template, LIMIT).decode(errors="replace") if template.exists() else chat
    return keys | ({"chat_template": chat} if isinstance(chat, str) else {})


def _keys(contents: Mapping[str, Any], sentencepiece: bytes, settings: Mapping[str, Any], ends: Any) -> dict[str, Any]:
    """Return the keys without the chat template; `ends` is the value of eos_token_id, an id or a list of ids.

    The tokens are in `contents`, the content of tokenizer.json, or in the bytes of tokenizer.model. Raise ValueError
    for a kind of tokenizer that llama.cpp does not have, and others for damaged contents.
    """
    model, keys, vocab = contents.get("model", {}), dict[str, Any](), dict[Any, tuple[int, int]]()
    if model.get("type") == "WordLevel":  # toyexp's tokenizer of characters
        return Characters(sorted(model["vocab"], key=model["vocab"].__getitem__)[:-1]).gguf_metadata()
    if sentencepiece:
        vocab, keys = read_sentencepiece(sentencepiece)
        added = [{**t, "id": int(i)} for i, t in settings.get("added_tokens_decoder", {}).items()]
        added = [token for token in added if token["content"] not in vocab]
    elif model.get("type") == "BPE":
        vocab, added = {text: (i, NORMAL) for text, i in model["vocab"].items()}, contents["added_tokens"]
    else:
        raise ValueError(f"it has no BPE but {model.get('type')}")
    vocab |= {t["content"]: (t["id"], CONTROL if t["special"] else USER_DEFINED) for t in added}
    if (size := 1 + max(i for i, _ in vocab.values())) > ARRAY_LIMIT:
        raise ValueError(f"it has the token id {size - 1}, the limit is {ARRAY_LIMIT}")
    pieces, types = [f"[PAD{i}]" for i in range(size)], np.full(size, UNUSED, np.int32)
    for text, (i, kind) in vocab.items():
        pieces[i], types[i] = text, kind
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    if sentencepiece:
        keys |= {"model": "llama", "scores": np.append(keys["scores"], np.zeros(size)).astype(np.float32)[:size]}
    elif "ByteLevel" in str(contents.get("pre_tokenizer")):
        keys = {"model": "gpt2", "pre": _pre_tokenizer(contents), "merges": merges or [" ".join(NULL_MERGE)]}
    else:  # SentencePiece: a merge that comes earlier has a token of a higher score
        ranks = {merge.replace(" ", ""): rank for rank, merge in reversed([*enumerate(merges)])}
        prepended = ("Prepend", "'prepend_scheme': 'first'", "'prepend_scheme': 'always'")
        is_prepended = any(
            word in str([contents.get("normalizer"), contents.get("pre_tokenizer")]) for word in prepended
        )
        scores = np.array([-ranks.get(piece, len(merges)) for piece in pieces], np.float32)
        types[[i for i, piece in enumerate(pieces) if BYTE_TOKEN.fullmatch(piece)]] = BYTE
        types[[i for i, piece in enumerate(pieces) if piece == model.get("unk_token")]] = UNKNOWN
        keys = {"model": "llama", "scores": scores, "add_space_prefix": is_prepended}
    for name, key in (("eos", "eos"), ("bos", "bos"), ("pad", "padding"), ("unk", "unknown")):
        text = settings.get(f"{name}_token")
        text = text.get("content") if isinstance(text, dict) else text
        keys |= {f"{key}_token_id": vocab[text][0]} if text in vocab else {}
    ends = [ends] if isinstance(ends, int) else ends or []
    for key, i in zip(
        ("eos_token_id", "eot_token_id"), (i for i in ends if i != keys.get("eos_token_id")), strict=False
    ):
        keys.setdefault(key, i)
    processor = contents.get("post_processor") or {}
    templates = [p["single"] for p in (processor, *processor.get("processors", ())) if "single" in p]
    for name, place in (("bos", 0), ("eos", -1)):
        by_default = bool(sentencepiece) and name == "bos"  # as in LlamaTokenizer of transformers
        given = settings.get(f"add_{name}_token", by_default) is True
        given = "SpecialToken" in templates[0][place] if templates else given
        keys[f"add_{name}_token"] = given
    return {f"ggml.{key}": value for key, value in (keys | {"tokens": pieces, "token_type": types}).items()}


def _pre_tokenizer(contents: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer that cuts PROBE in the same way; raise ValueError if none does."""

    def words(pre_tokenizer: Any) -> list[str]:
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(PROBE)]

    minimal = {"version": "1.0", "added_tokens": [], "pre_tokenizer": contents["pre_tokenizer"]}
    engine = hf.Tokenizer.from_str(json.dumps(minimal | {"model": {"type": "BPE", "vocab": {}, "merges": []}}))
    ignores, cuts = bool(contents["model"].get("ignore_merges")), words(engine.pre_tokenizer)
    for name, pre in PRE_TOKENIZERS.items():
        if pre.ignore_merges == ignores and words(pre.build()) == cuts:
            return name
    raise ValueError("llama.cpp has no pre-tokenizer that cuts text as this one does")
