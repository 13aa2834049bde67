"""Reads GGUF files. A file's header is checked completely before tensors are loaded."""
