"""Reads the presets of models: an INI file with llama-server's keys, which are flags of `serve` without
dashes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from vkbackend.errors import InvalidArgument
from vkbackend.paths import quoted, why
from vkbackend.tools.flags.table import OFF, ON, flags_of

ALL = "*"  # The section for all models.
YES, NO = (*ON, "yes", ""), (*OFF, "no")
MAX_NBYTES = 1 << 20
# A preset cannot set these flags, because they apply to the whole server.
SERVER_DESTS = frozenset(
    "host port api_key api_key_file insecure allowed_host allowed_media_host cors_origins cors_methods "
    "cors_headers cors_credentials ssl_key_file ssl_cert_file queue max_streams shutdown_timeout "
    "sse_ping_interval timeout log_disable log_file ui metrics models_dir models_preset models_max "
    "models_memory models_devices models_download models_autoload load_timeout list_devices version help "
    "runtime "
    "hostfile".split()
)
Parse = Callable[[Sequence[str]], argparse.Namespace]
Actions = Callable[[Sequence[str]], dict[str, argparse.Action]]


@dataclass(slots=True)
class Preset:
    """`words` are flags. `loads` means that the model is loaded when the server starts."""

    words: list[str] = field(default_factory=list)
    dests: set[str] = field(default_factory=set)
    loads: bool = False
    stop_s: float = 10.0  # Running answers may continue for this time after a request to unload the model.
    where: str = ""


def read_presets(path: str, actions: Actions, parse: Parse) -> dict[str, Preset]:
    """Return the presets by section. Each preset begins with the words of section `*`. `actions(words)`
    returns the parser's actions by flag, and `parse` checks words. Raises InvalidArgument with section, key
    and line."""
    sections = _sections(path)
    keys = {key for lines in sections.values() for _, key, _ in lines}
    known = actions([name for key in sorted(keys) for name in (*_spelled(key), *_opposites(key))])
    everywhere = _preset(path, ALL, sections.pop(ALL, []), Preset(), known, parse)
    presets = {ALL: everywhere}
    for name, lines in sections.items():
        presets[name] = _preset(path, name, lines, everywhere, known, parse)
    return presets


def _sections(path: str) -> dict[str, list[tuple[int, str, str]]]:
    """Return (line number, key, value) by section."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_NBYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--models-preset {quoted(path)} cannot be read: {why(error)}") from None
    if len(content) > MAX_NBYTES:
        raise InvalidArgument(f"--models-preset {quoted(path)} is larger than {MAX_NBYTES >> 20} MiB")
    sections: dict[str, list[tuple[int, str, str]]] = {}
    name: str | None = None
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line[0] in ";#":
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if line.startswith("[") and line.endswith("]"):
            name = line[1:-1].strip()
            if not name or name in sections:
                reason = "appears twice" if name else "has no name"
                raise InvalidArgument(f"{path}, line {number}: the section {line} {reason}")
            sections[name] = []
        elif not equals or not key:
            raise InvalidArgument(f"{path}, line {number}: expected KEY = VALUE or [NAME]")
        elif name is not None:
            sections[name].append((number, key, value))
        elif (key, value) != ("version", "1"):
            raise InvalidArgument(f"{path}, line {number}: {key} before a section; expected version = 1")
    return sections


def _preset(
    path: str,
    section: str,
    lines: Sequence[tuple[int, str, str]],
    everywhere: Preset,
    known: Mapping[str, argparse.Action],
    parse: Parse,
) -> Preset:
    preset = Preset(list(everywhere.words), set(everywhere.dests), everywhere.loads, everywhere.stop_s)
    preset.where = f"{Path(path).name}, [{section}]"
    words_at: list[tuple[str, list[str]]] = []
    for number, key, value in lines:
        where = f"{path}, line {number}, [{section}] {key}"
        if key == "load-on-startup":
            preset.loads = _switch(where, value)
        elif key == "stop-timeout":
            if not value.isdecimal() or len(value) > 5:
                raise InvalidArgument(f"{where} = {value}: expected seconds, a whole number")
            preset.stop_s = float(value)
        else:
            words, dest = _words(where, key, value, known)
            words_at.append((where, words))
            preset.dests.add(dest)
    added = [word for _, words in words_at for word in words]
    try:
        parse(added)
    except InvalidArgument as error:
        for where, words in words_at:  # Find the key.
            _check(where, words, parse)
        raise InvalidArgument(f"{preset.where}: {error}") from None
    preset.words += added
    return preset


def _check(where: str, words: Sequence[str], parse: Parse) -> None:
    try:
        parse(words)
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from None


def _switch(where: str, value: str) -> bool:
    if value.lower() not in (*YES, *NO):
        raise InvalidArgument(f"{where} = {value}: expected true or false")
    return value.lower() in YES


def _spelled(key: str) -> list[str]:
    """Return the flags that a key may mean, the likeliest first."""
    by_variable = {flag.env: flag.long_name for flag in flags_of("serve") if flag.env}
    return [by_variable[key]] if key in by_variable else [f"--{key}", f"-{key}"]


def _opposites(key: str) -> list[str]:
    return [f"--no-{key}", f"--{key.removeprefix('no-')}"]


def _words(where: str, key: str, value: str, known: Mapping[str, argparse.Action]) -> tuple[list[str], str]:
    """Return the words of a key, and the destination of its flag."""
    flag = next((name for name in _spelled(key) if name in known), None)
    if flag is None:
        near = get_close_matches(key, [name.lstrip("-") for name in known], 1, 0.75)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InvalidArgument(f"{where}: no flag of `vkbackend serve` has this name{hint}")
    action = known[flag]
    if action.dest in SERVER_DESTS:
        raise InvalidArgument(f"{where}: the server has this flag, not a model; give it on the command line")
    if action.nargs != 0:
        return [f"{flag}={value}"], action.dest
    if _switch(where, value):
        return [flag], action.dest
    return [name for name in _opposites(key) if name in known and known[name].nargs == 0][:1], action.dest
