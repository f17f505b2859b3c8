"""Read and write model files. The content of a file is never trusted. Plugins may import the names listed here."""

from typing import TYPE_CHECKING

from toyexp.base.lazy import lazy

if TYPE_CHECKING:
    from toyexp.formats.file_plan import read_adapter
    from toyexp.formats.gguf.form import GGUFForm, Keys, decimal, gguf_architecture, gguf_form, read_model
    from toyexp.formats.gguf.ggml_types import GGUF_TYPES, dequantise
    from toyexp.formats.gguf.header import GGUFError
    from toyexp.formats.gguf.open_model import mappable_tensor, open_gguf, read_exported, require_model
    from toyexp.formats.gguf.quantise import FILE_TYPES, K_QUANTS, check_type
    from toyexp.formats.gguf.read import GGUFFile
    from toyexp.formats.gguf.tokenizer import has_text, read_chat_template, read_tokenizer
    from toyexp.formats.gguf.write import check_keys, model_metadata, rewrite_gguf, write_adapter, write_model
    from toyexp.formats.huggingface import hf_notes, write_adapter_folder, write_folder
    from toyexp.formats.huggingface_reader import is_folder, read_folder
    from toyexp.formats.layout import (
        HF_FILES,
        HF_TYPES,
        ArrayFunction,
        Conversion,
        HFTensor,
        Layout,
        hf_layout,
        identity,
    )
    from toyexp.formats.records import (
        READERS,
        BadExample,
        Record,
        decode,
        iter_records,
        join_names,
        kind_of,
        parse_cell,
        read_question,
        record_suffix,
        require_unicode,
        text_of,
    )
    from toyexp.formats.safetensors import SafetensorsFile, write_safetensors

__getattr__, __dir__, __all__ = lazy(__name__, __file__)
