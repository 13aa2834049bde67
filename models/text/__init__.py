"""Tokenizers, chat templates, the strings that end a text."""
