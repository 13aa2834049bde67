"""llama.cpp's flags that vkbackend accepts without effect or refuses."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from vkbackend.tools.flags.notes import note
from vkbackend.tools.flags.table import OFF, Flag, flags_of


def add_table_arguments(parser: argparse.ArgumentParser, command: str, words: Iterable[str]) -> None:
    """Add the refused and ineffective flags that are in `words`. Adding all would be slow."""
    known = parser._option_string_actions
    given = {word.partition("=")[0] for word in words}
    for flag in flags_of(command):
        names = [name for name in flag.names if name in given and name not in known]
        if names and flag.kind in ("none", "refused"):
            action = _WithoutEffect if flag.kind == "none" else _Refused
            parser.add_argument(*names, action=action, flag=flag, lists=command == "bench")


def summary(command: str) -> str:
    none, refused = (
        ", ".join(flag.long_name for flag in flags_of(command) if flag.kind == kind)
        for kind in ("none", "refused")
    )
    return (
        f"llama.cpp's flags taken without effect: {none}. Refused, with a sentence that says what to use "
        f"instead: {refused}. docs/llama-cpp.md has the reasons."
    )


class _OfTable(argparse.Action):
    def __init__(self, option_strings: Any, dest: str, flag: Flag, lists: bool) -> None:
        optional = flag.value.startswith("[") or flag.kind == "refused"
        count = {"nargs": 0} if flag.switch else {"nargs": "?"} if optional else {}
        super().__init__(option_strings, argparse.SUPPRESS, help=argparse.SUPPRESS, **count)
        self.flag, self._lists = flag, lists

    def check(self, value: str) -> None:
        for word in value.split(",") if self._lists else [value]:
            if self.flag.choices and word not in self.flag.choices:
                shown = ", ".join(word for word in self.flag.choices if word not in _SYNONYMS)
                raise argparse.ArgumentError(self, f"{word!r}: expected one of {shown}")
            if self.flag.value in ("N", "<n>", "<0...100>"):
                try:
                    float(word)
                except ValueError:
                    raise argparse.ArgumentError(self, f"{word!r}: expected a number") from None


_SYNONYMS = ("enabled", "true", "1", "disabled", "false", "0", "-1")


class _WithoutEffect(_OfTable):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, name: Any = None) -> None:
        if isinstance(values, str):
            self.check(values)
        note(namespace, f"{name} has no effect: {self.flag.text}", of=self.flag.names)


class _Refused(_OfTable):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, name: Any = None) -> None:
        if values in self.flag.neutral or ("off" in self.flag.neutral and values in OFF):
            note(namespace, f"{name} {values} has no effect: it is so without the flag", of=self.flag.names)
        else:
            namespace.refused = [*getattr(namespace, "refused", ()), (name, self.flag.text)]


def refusals(namespace: argparse.Namespace) -> list[str]:
    """Return a sentence for each reason, with the flags that were refused for it."""
    reasons: dict[str, list[str]] = {}
    for name, text in getattr(namespace, "refused", ()):
        reasons.setdefault(text, []).append(name)
    return [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in reasons.items()]
