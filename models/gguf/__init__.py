"""Reads GGUF files; everything in a file is checked before anything is loaded."""
