"""The files of a tokenizer in a directory for transformers."""

from __future__ import annotations

import json
from typing import Any

from toyexp.run import dump_json
from toyexp.sentencepiece import SentencePiece
from toyexp.sentencepiece_model import lacking, sentencepiece_model
from toyexp.tokenizer import Tokenizer


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """What each file holds."""
    library, settings = tokenizer.to_huggingface()
    files = {"tokenizer.json": library.encode()}
    if isinstance(tokenizer, SentencePiece):
        settings |= _sentencepiece_settings(tokenizer, library)
        if not lacking(tokenizer):
            files["tokenizer.model"] = sentencepiece_model(tokenizer)
    return files | {"tokenizer_config.json": dump_json(settings, indent=2).encode()}


def _sentencepiece_settings(tokenizer: SentencePiece, library: str) -> dict[str, Any]:
    """What llama.cpp's converter looks for here and not in the vocabulary; tokenizer.json has it too."""
    added = {str(token.pop("id")): token for token in json.loads(library)["added_tokens"]}
    found = {i: token for i, token in added.items() if not token["special"]}
    settings: dict[str, Any] = {"added_tokens_decoder": found} if found else {}
    if tokenizer.unknown is not None:
        settings["unk_token"] = tokenizer.pieces[tokenizer.unknown]
    return settings | {"add_prefix_space": tokenizer.prefix}
