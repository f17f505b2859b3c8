"""Text to token ids and back, as llama.cpp does it. What plugins may use of it stands here."""

from typing import TYPE_CHECKING

from toyexp.base.lazy import lazy

if TYPE_CHECKING:
    from toyexp.text.chat import REASONING, BadChat, Rendered, Template, control_pattern
    from toyexp.text.pieces import cut_up, encoded
    from toyexp.text.pretokenizers import PRE_TOKENIZERS
    from toyexp.text.tokenizer import BPE, Bytes, Characters, check_bpe_vocab

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
