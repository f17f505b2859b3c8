"""GGUF files: a careful reader, an atomic writer, and the tokenizer inside them."""
