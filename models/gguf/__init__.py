"""Reads GGUF files. A file's header is checked before tensors are loaded."""
