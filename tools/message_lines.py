"""Read messages from stdin, each of one or several lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress

from vkbackend.tools.flags.text import write_text

QUOTES = '"""'


def messages(first: str | None) -> Iterator[str]:
    """Yield `first` and the messages of stdin without surrounding blanks."""
    if first is not None:
        yield first.strip()
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    with suppress(ImportError):
        import readline  # noqa: F401  (input() edits its line and keeps a history with it)
    while (line := read_line()) is not None:
        yield _whole(line).strip()


def _whole(line: str) -> str:
    text = line.strip()
    if text.startswith(QUOTES):
        text = text.removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES) and (more := read_line("... ")) is not None:
            text += ("\n" if text else "") + more.rstrip("\n")
        return text.rstrip().removesuffix(QUOTES)
    while text.endswith("\\") and (more := read_line("... ")) is not None:
        text = text.removesuffix("\\") + "\n" + more.rstrip()
    return text


def read_line(prompt: str = "> ") -> str | None:
    """Return the next line of stdin, or None at the end. If stdin is a terminal, print `prompt`, but never to
    a piped stdout."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            return input(prompt)
        except EOFError:
            write_text("\n")
            return None
    if sys.stdin.isatty():
        sys.stderr.write(prompt)
        sys.stderr.flush()
    return sys.stdin.readline() or None
