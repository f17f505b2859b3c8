"""The files of a tokenizer in a directory for transformers."""

from __future__ import annotations

import json
from typing import Any

from toyexp.base.writing import dump_json
from toyexp.formats.sentencepiece_model import lacking, sentencepiece_model
from toyexp.text.sentencepiece import SentencePiece
from toyexp.text.tokenizer import Tokenizer

# Of some model_types transformers 5 takes only vocabulary and merges from tokenizer.json, and cuts and normalises text
# in a way of its own. It leaves the tokenizer of a directory alone that names a class of its own. That class is here
# for whoever allows code from the directory (trust_remote_code=True); nobody else imports it.
CLASS = {"AutoTokenizer": ["tokenization.FromFile", "tokenization.FromFile"]}  # without and with the library tokenizers
CODE = '''\
"""The tokenizer of this directory is its tokenizer.json, whatever others of its model_type do."""

from transformers import PreTrainedTokenizerFast


class FromFile(PreTrainedTokenizerFast):
    """tokenizer.json as it stands."""
'''


def tokenizer_files(tokenizer: Tokenizer, replaced: bool) -> dict[str, bytes]:
    """What each file holds; `replaced`: transformers would have another tokenizer for a model of this kind."""
    library, settings = tokenizer.to_huggingface()
    files = {"tokenizer.json": library.encode()}
    if isinstance(tokenizer, SentencePiece):
        settings |= _sentencepiece_settings(tokenizer, library)
        if not lacking(tokenizer):
            files["tokenizer.model"] = sentencepiece_model(tokenizer)
    if replaced:
        settings["auto_map"] = CLASS
        files["tokenization.py"] = CODE.encode()
    return files | {"tokenizer_config.json": dump_json(settings, indent=2).encode()}


def _sentencepiece_settings(tokenizer: SentencePiece, library: str) -> dict[str, Any]:
    """What llama.cpp's converter looks for here and not in the vocabulary; tokenizer.json has it too."""
    added = {str(token.pop("id")): token for token in json.loads(library)["added_tokens"]}
    found = {i: token for i, token in added.items() if not token["special"]}
    settings: dict[str, Any] = {"added_tokens_decoder": found} if found else {}
    if tokenizer.unknown is not None:
        settings["unk_token"] = tokenizer.pieces[tokenizer.unknown]
    return settings | {"add_prefix_space": tokenizer.prefix}
