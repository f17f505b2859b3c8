"""Text to token ids and back, as llama.cpp does it. What plugins may use of it stands here."""

from typing import TYPE_CHECKING

from toyexp.base.lazy import lazy

if TYPE_CHECKING:
    from toyexp.text.byte_level import BPE, Bytes, Characters, check_bpe_vocab
    from toyexp.text.chat import REASONING, BadChat, Rendered, Template, control_pattern
    from toyexp.text.pretokenizers import PRE_TOKENIZERS
    from toyexp.text.tokenizer import cut_up, encoded

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
