"""Flags that take files, with or without scales. Commas separate files, and the flag may be repeated."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from vkbackend.errors import InvalidArgument


class Files(argparse.Action):
    """Append (file, 1.0) for each file."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        args: argparse.Namespace,
        values: str | Sequence[Any] | None,
        flag: str | None = None,
    ) -> None:
        files = [self.entry(*self.pair(word)) for word in str(values).split(",")]
        setattr(args, self.dest, (*getattr(args, self.dest), *files))

    def pair(self, word: str) -> tuple[str, float]:
        return word, 1.0

    def entry(self, path: str, scale: float) -> tuple[Any, ...]:
        return path, scale


class ScaledFiles(Files):
    """Append (file, scale) for each FILE:SCALE."""

    def pair(self, word: str) -> tuple[str, float]:
        path, _, scale = word.rpartition(":")
        try:
            if not path:
                raise ValueError
            return path, float(scale)
        except ValueError:
            raise InvalidArgument(f"{self.option_strings[0]} {word}: expected FILE:SCALE") from None
