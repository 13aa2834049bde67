"""Tokenizers, chat templates and stop strings."""
