"""LLAMA_ARG_* variables, each of which sets a flag as in llama.cpp. The command line overrides variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from vkbackend.tools.flags.table import OFF, ON, Flag, flags_of

READ_BY = ("generate", "chat", "serve", "perplexity")  # llama-bench reads none.
OTHERS = ("HF_TOKEN", "MTMD_BACKEND_DEVICE")  # HF_TOKEN is read elsewhere; MTMD_BACKEND_DEVICE has no effect.
EXCLUSIVE = (
    ("-m", "--model", "-hf", "-hfr", "--hf-repo", "-mu", "--model-url", "-dr", "--docker-repo"),
    ("--chat-template", "--chat-template-file"),
    ("--grammar", "--grammar-file", "-j", "--json-schema", "-jf", "--json-schema-file"),
)
NO = "LLAMA_ARG_NO_"


def words_of_environment(
    command: str, line: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[list[str], list[str]]:
    """Return the flags that variables set, as words of a command line, and notes. Notes omit values, because
    a value may be an API key."""
    words: list[str] = []
    notes: list[str] = []
    if command not in READ_BY:
        return words, notes
    given = {word.partition("=")[0] for word in line}
    flags = {flag.env: flag for flag in flags_of(command) if flag.env and flag.env not in OTHERS}
    for name, flag in flags.items():
        if name not in environ or not (wanted := _words(flag, environ[name], flags)):
            continue
        opposite = flags.get(_opposite(name))
        rivals = {*flag.names, *(opposite.names if opposite else ())}
        for group in EXCLUSIVE:
            rivals |= set(group) if rivals & set(group) else set()
        if winner := sorted(rivals & given):
            notes.append(f"{name} is set, and {winner[0]} of the command line wins")
        else:
            words += wanted
            notes.append(f"{wanted[0].partition('=')[0]} comes from {name}")
    return words, notes


def _words(flag: Flag, value: str, flags: Mapping[str, Flag]) -> list[str]:
    if not flag.switch:
        return [f"{flag.long_name}={value}"]
    if flag.env.startswith(NO) or value in ON:  # a variable with any value sets a --no- flag
        return [flag.long_name]
    opposite = flags.get(_opposite(flag.env))
    return [opposite.long_name] if opposite and value in OFF else []


def _opposite(name: str) -> str:
    return name.replace(NO, "LLAMA_ARG_") if name.startswith(NO) else name.replace("LLAMA_ARG_", NO)
