"""Flags of control vectors, with llama.cpp's names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from vkbackend.errors import InvalidArgument
from vkbackend.tools.flags.options import adder


class _Files(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        args: argparse.Namespace,
        values: str | Sequence[Any] | None,
        flag: str | None = None,
    ) -> None:
        files = [self.pair(word) for word in str(values).split(",")]
        setattr(args, self.dest, (*getattr(args, self.dest), *files))

    def pair(self, word: str) -> tuple[str, float]:
        return word, 1.0


class _ScaledFiles(_Files):
    def pair(self, word: str) -> tuple[str, float]:
        path, _, scale = word.rpartition(":")
        try:
            if not path:
                raise ValueError
            return path, float(scale)
        except ValueError:
            raise InvalidArgument(f"--control-vector-scaled {word}: expected FILE:SCALE") from None


def add_control_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser, "control vectors")
    add(
        "control_vectors",
        "--control-vector",
        action=_Files,
        metavar="FILE",
        help="add the directions of this GGUF file to the residual; several files, comma-separated or each "
        "with the flag, add up",
    )
    add(
        "control_vectors",
        "--control-vector-scaled",
        action=_ScaledFiles,
        metavar="FILE:SCALE",
        help="the same with a scale, which may be negative; several, comma-separated or each with the flag",
    )
    add(
        "control_vector_layer_range",
        "--control-vector-layer-range",
        nargs=2,
        type=int,
        metavar=("FIRST", "LAST"),
        help="the first and the last layer to steer, counted from 0 (default: all in the files)",
    )
