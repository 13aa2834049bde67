"""The argument parser of `vkbackend`. An error is one line that says what to type instead."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NoReturn

from vkbackend.errors import InvalidArgument
from vkbackend.paths import quoted

TALKS = ("generate", "chat")  # one program in llama.cpp
CONVERSATION = {
    "-cnv": "chat",
    "--conversation": "chat",
    "-no-cnv": "generate",
    "--no-conversation": "generate",
}
FREE_TEXT = {"-p": "--prompt", "-sys": "--system-prompt", "-r": "--reverse-prompt"}

HINT = 0.75  # A suggested flag has at least this similarity (difflib's).


class Parser(argparse.ArgumentParser):
    sources: Sequence[str] = ()  # "--flag comes from VARIABLE"
    raises = False  # Raise InvalidArgument instead of exiting.

    def error(self, message: str) -> NoReturn:
        message = with_sources(message, self.sources)
        if self.raises:
            raise InvalidArgument(message)
        self.exit(2, f"{self.prog}: error: {message}; `{self.prog} -h` lists the arguments\n")


def with_sources(message: str, lines: Iterable[str]) -> str:
    """Append to the message which of its flags come from environment variables."""
    named = (line for line in lines if re.search(rf"(?<![\w-]){line.partition(' ')[0]}(?![\w-])", message))
    return "; ".join((message, *(line for line in named if " comes from " in line)))


def bind_values(argv: Sequence[str]) -> list[str]:
    """Join free text to its option with "=", because argparse would read "-1,2" or "- a list" as an
    option."""
    long_names = {"-ts": "--tensor-split"} | (FREE_TEXT if argv[:1] and argv[0] in TALKS else {})
    long_names |= {name: name for name in long_names.values()}
    out: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":  # another command follows
            return [*out, word, *words]
        if word.startswith("--"):  # llama.cpp accepts --ctx_size too
            name, equals, rest = word.partition("=")
            word = name.replace("_", "-") + equals + rest
        value = next(words, None) if word in long_names else None
        out.append(word if value is None else f"{long_names[word]}={value}")
    return out


def conversation(words: Sequence[str]) -> list[str]:
    """Replace `generate` by `chat` for -cnv, and the reverse for -no-cnv. The last flag wins."""
    if not words or words[0] not in TALKS:
        return list(words)
    chosen = [CONVERSATION[word] for word in words if word in CONVERSATION]
    return [*(chosen[-1:] or words[:1]), *(word for word in words[1:] if word not in CONVERSATION)]


def unknown_command(word: str, commands: Iterable[str]) -> str:
    if word.endswith(".gguf") or os.path.isfile(word):
        return (
            f"{quoted(word)} is not a command; type `vkbackend generate -m {word}` or `vkbackend info {word}`"
        )
    near = get_close_matches(word.lower(), list(commands), 1, 0.5)
    return f"unknown command {word!r}" + (f"; did you mean `vkbackend {near[0]}`?" if near else "")


def unknown_arguments(
    words: Sequence[str], command: argparse.ArgumentParser, other: argparse.ArgumentParser | None
) -> list[str]:
    """Return messages about words that are unknown to `command`, but may be flags of `other`."""
    known = command._option_string_actions
    bare = {name.lstrip("-"): name for name in known}  # Dashes would make short names similar.
    flags = list(dict.fromkeys(word.partition("=")[0] for word in words if is_flag(word)))
    unknown, sentences = [], []
    for flag in flags:
        if other is not None and flag in other._option_string_actions:
            sentences.append(f"{flag} is a flag of `{other.prog}`")
            continue
        close = [bare[name] for name in get_close_matches(flag.lstrip("-"), list(bare), 3, HINT)]
        near = [name for name in close if _bare(name) != _bare(flag)]
        unknown.append(flag + (f" (did you mean {near[0]}?)" if near else ""))
    if unknown:
        sentences.insert(0, f"unknown flag{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}")
    if not sentences:
        word = words[0]
        if "--model" in known:
            return [f"{quoted(word)} is not a flag; pass a model with -m: `{command.prog} -m {word}`"]
        return [f"unrecognized argument {word!r}"]
    return sentences


def is_flag(word: str) -> bool:
    return re.match("-{1,2}[A-Za-z]", word) is not None


def _bare(flag: str) -> str:
    return flag.removeprefix("--no-").lstrip("-")
