"""Notes about flags. Commands print the notes to stderr after they have checked their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Hashable, Iterable


def note(namespace: argparse.Namespace, line: str, *, of: Hashable = None) -> None:
    """Queue a line, unless a line with an equal `of` is already queued. `of` defaults to the line."""
    lines = getattr(namespace, "noted", {})
    _keep(namespace, lines if (of or line) in lines else {**lines, of or line: line})


def note_first(namespace: argparse.Namespace, lines: Iterable[str]) -> None:
    _keep(namespace, {**dict.fromkeys(lines, ""), **getattr(namespace, "noted", {})})


def _keep(namespace: argparse.Namespace, lines: dict[Hashable, str]) -> None:
    namespace.noted, namespace.notes = lines, [text or str(of) for of, text in lines.items()]
