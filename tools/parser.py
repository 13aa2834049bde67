"""The argument parser of `vkbackend`: an error is one line that says what to type instead."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NoReturn

TALKS = ("generate", "chat")  # one program in llama.cpp
CONVERSATION = {
    "-cnv": "chat",
    "--conversation": "chat",
    "-no-cnv": "generate",
    "--no-conversation": "generate",
}
FREE_TEXT = {"-p": "--prompt", "-sys": "--system-prompt", "-r": "--reverse-prompt"}

# Flags of llama.cpp that do not exist here.
MISSING = {
    "--lora": "adapters are not supported yet; merge it into the model",
    "-md": "draft models are not supported yet",
    "--mmproj": "images and sound are not supported yet",
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; `{self.prog} -h` lists the arguments\n")


def bind_values(argv: Sequence[str]) -> list[str]:
    """Join free text to its option: argparse would take "-1,2" or "- a list" for an option."""
    long_names = {"-ts": "--tensor-split"} | (FREE_TEXT if argv[:1] and argv[0] in TALKS else {})
    long_names |= {name: name for name in long_names.values()}
    out: list[str] = []
    words = iter(argv)
    for word in words:
        value = next(words, None) if word in long_names else None
        out.append(word if value is None else f"{long_names[word]}={value}")
    return out


def conversation(words: Sequence[str]) -> list[str]:
    """Apply -cnv (`generate` becomes `chat`) and -no-cnv (the reverse); the last one wins."""
    if not words or words[0] not in TALKS:
        return list(words)
    chosen = [CONVERSATION[word] for word in words if word in CONVERSATION]
    return [*(chosen[-1:] or words[:1]), *(word for word in words[1:] if word not in CONVERSATION)]


def unknown_command(word: str, commands: Iterable[str]) -> str:
    if word.endswith(".gguf") or os.path.isfile(word):
        return f"{word!r} is not a command; type `vkbackend generate -m {word}` or `vkbackend info {word}`"
    near = get_close_matches(word.lower(), list(commands), 1, 0.5)
    return f"unknown command {word!r}" + (f"; did you mean `vkbackend {near[0]}`?" if near else "")


def unknown_argument(
    word: str, command: argparse.ArgumentParser, other: argparse.ArgumentParser | None
) -> str:
    """The message for a word that `command` does not know; `other` may know it."""
    known = command._option_string_actions
    if not word.startswith("-"):
        if "--model" in known:
            return f"{word!r} is not a flag; pass a model with -m: `{command.prog} -m {word}`"
        return f"unrecognized argument {word!r}"
    flag = word.partition("=")[0]
    if flag in MISSING:
        return f"{flag}: {MISSING[flag]}"
    if other is not None and flag in other._option_string_actions:
        return f"{flag} is a flag of `{other.prog}`"
    shown = [name for name, action in known.items() if action.help != argparse.SUPPRESS]
    near = get_close_matches(flag, shown, 1, 0.0)
    return f"unknown flag {flag}" + (f"; the nearest one is {near[0]}" if near else "")
