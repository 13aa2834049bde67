"""Flags of control vectors, with llama.cpp's names."""

from __future__ import annotations

import argparse

from vkbackend.tools.flags.options import adder
from vkbackend.tools.flags.scaled_files import Files, ScaledFiles


def add_control_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser, "control vectors")
    add(
        "control_vectors",
        "--control-vector",
        action=Files,
        metavar="FILE",
        help="add the directions of this GGUF file to the residual; several files, comma-separated or each "
        "with the flag, add up",
    )
    add(
        "control_vectors",
        "--control-vector-scaled",
        action=ScaledFiles,
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
