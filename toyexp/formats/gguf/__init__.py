"""GGUF files: a reader for untrusted files, an atomic writer, and the tokenizer inside them."""
