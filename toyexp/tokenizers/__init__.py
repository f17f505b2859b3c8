"""Convert text to token ids and back exactly as llama.cpp does. Plugins may import the names listed here."""

from typing import TYPE_CHECKING

from toyexp.base.lazy import lazy

if TYPE_CHECKING:
    from toyexp.tokenizers.byte_level import BPE, Bytes, Characters, check_bpe_vocab
    from toyexp.tokenizers.chat_template import REASONING, BadChat, Rendered, Template, control_pattern
    from toyexp.tokenizers.pretokenizers import PRE_TOKENIZERS
    from toyexp.tokenizers.tokenizer import encode_documents, split_text

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
