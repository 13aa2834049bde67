"""The flags of control vectors, named as llama.cpp's."""

from __future__ import annotations

import argparse
from typing import Any

from vkbackend.errors import InvalidArgument


def add_control_arguments(parser: argparse.ArgumentParser) -> None:
    """--control-vector, --control-vector-scaled, --control-vector-layer-range."""
    add = parser.add_argument_group("control vectors").add_argument
    add(
        "--control-vector",
        action="append",
        default=[],
        metavar="FILE",
        help="add the directions of this GGUF file to the residual; several files, comma-separated or each "
        "with the flag, add up",
    )
    add(
        "--control-vector-scaled",
        action="append",
        default=[],
        metavar="FILE:SCALE",
        help="the same, times a scale, which may be negative; comma-separated or with the flag, too",
    )
    add(
        "--control-vector-layer-range",
        nargs=2,
        type=int,
        metavar=("FIRST", "LAST"),
        help="the layers that are steered, both included, counted from 0 (default: all that the files have)",
    )


def control_of(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `LLM` that these flags stand for."""
    files = [(path, 1.0) for path in _words(args.control_vector)]
    layers = args.control_vector_layer_range
    return {
        "control_vectors": files + [parse_scaled(word) for word in _words(args.control_vector_scaled)],
        "control_vector_layer_range": None if layers is None else tuple(layers),
    }


def _words(lists: list[str]) -> list[str]:
    return [word for text in lists for word in text.split(",")]


def parse_scaled(word: str) -> tuple[str, float]:
    path, _, scale = word.rpartition(":")
    try:
        if not path:
            raise ValueError
        return path, float(scale)
    except ValueError:
        raise InvalidArgument(f"--control-vector-scaled {word}: expected FILE:SCALE") from None
